//! Firecracker's API on the Unix socket of one microVM.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use rustix::fs::inotify;
use serde_json::{Value, json};
use tokio::io::unix::AsyncFd;

use crate::error::ManagerError;
use crate::socket;

/// How long one request may take. Starting a machine is one.
const REQUEST_TIME: Duration = Duration::from_secs(30);
/// How long copying a machine's memory, or taking it back, may take.
const MEMORY_TIME: Duration = Duration::from_secs(180);
/// The largest answer.
const ANSWER_BYTES: usize = 1 << 20;

/// One microVM's API.
#[derive(Clone, Debug)]
pub(crate) struct Vmm {
    socket: PathBuf,
}

impl Vmm {
    pub(crate) fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Puts a setting.
    pub(crate) async fn put(&self, path: &str, body: &Value) -> Result<(), ManagerError> {
        self.send(Method::PUT, path, body).await.map(drop)
    }

    /// Starts the machine.
    pub(crate) async fn start(&self) -> Result<(), ManagerError> {
        self.put("/actions", &json!({ "action_type": "InstanceStart" })).await
    }

    /// Presses the keys that ask the guest to end.
    pub(crate) async fn press_restart_keys(&self) -> Result<(), ManagerError> {
        self.put("/actions", &json!({ "action_type": "SendCtrlAltDel" })).await
    }

    /// Stops all CPUs, or lets them go on.
    pub(crate) async fn set_paused(&self, paused: bool) -> Result<(), ManagerError> {
        let state = if paused { "Paused" } else { "Resumed" };
        self.send(Method::PATCH, "/vm", &json!({ "state": state })).await.map(drop)
    }

    /// Whether all CPUs are stopped.
    pub(crate) async fn is_paused(&self) -> Result<bool, ManagerError> {
        Ok(self.send(Method::GET, "/", &Value::Null).await?["state"] == "Paused")
    }

    /// Copies the state and the memory of a machine that is paused, to files of its jail.
    pub(crate) async fn copy_memory(&self, state: &str, memory: &str) -> Result<(), ManagerError> {
        let body = json!({ "snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory });
        self.send_within(MEMORY_TIME, Method::PUT, "/snapshot/create", &body).await.map(drop)
    }

    /// Makes the machine one that was copied, on another interface, and lets it go on.
    pub(crate) async fn load_memory(
        &self,
        state: &str,
        memory: &str,
        interface: &str,
    ) -> Result<(), ManagerError> {
        let body = json!({
            "snapshot_path": state,
            "mem_backend": { "backend_type": "File", "backend_path": memory },
            "network_overrides": [{ "iface_id": "eth0", "host_dev_name": interface }],
            "resume_vm": true,
        });
        self.send_within(MEMORY_TIME, Method::PUT, "/snapshot/load", &body).await.map(drop)
    }

    async fn send(&self, method: Method, path: &str, body: &Value) -> Result<Value, ManagerError> {
        self.send_within(REQUEST_TIME, method, path, body).await
    }

    async fn send_within(
        &self,
        within: Duration,
        method: Method,
        path: &str,
        body: &Value,
    ) -> Result<Value, ManagerError> {
        let seconds = within.as_secs();
        match tokio::time::timeout(within, self.exchange(method, path, body)).await {
            Ok(answer) => answer,
            Err(_) => Err(ManagerError::TimedOut {
                what: "a request to Firecracker",
                seconds,
                detail: Some(path.to_owned()),
            }),
        }
    }

    async fn exchange(&self, method: Method, path: &str, body: &Value) -> Result<Value, ManagerError> {
        let lost = |error: &dyn std::fmt::Display| {
            ManagerError::failed("talking to Firecracker", format!("{method} {path}: {error}"))
        };
        let stream = socket::connect(&self.socket).await.map_err(|error| lost(&error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| lost(&error))?;
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method.clone())
            .uri(path)
            .header("Host", "localhost")
            .header("Content-Type", "application/json")
            .body(Full::new(if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) }))
            .map_err(|error| lost(&error))?;
        let response = sender.send_request(request).await.map_err(|error| lost(&error))?;
        let status = response.status();
        let bytes = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
        connection.abort();
        let bytes = bytes.map_err(|error| lost(&error))?.to_bytes();
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        if status.is_success() {
            return Ok(answer);
        }
        let said = answer["fault_message"].as_str().map_or_else(|| status.to_string(), str::to_owned);
        Err(ManagerError::failed("Firecracker refused", format!("{path}: {said}")))
    }
}

/// Waits until somebody listens on a socket.
pub(crate) async fn listens(path: &Path) -> io::Result<()> {
    appears(path).await?;
    // It has its name a moment before it can be connected to, and there is no sign of that.
    loop {
        match socket::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            connected => return connected.map(drop),
        }
    }
}

/// Waits for a file to appear. Its directory is watched, nothing is looked at again and again.
async fn appears(path: &Path) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let watch: OwnedFd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&watch, directory, inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO)?;
    // SAFETY: the descriptor is owned by the registration and closed after it.
    let watch = unsafe { AsyncFd::register(watch) }?;
    let mut events = [0; 4096];
    while !path.exists() {
        let mut ready = watch.readable().await?;
        match rustix::io::read(watch.get_ref(), &mut events) {
            Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test]
    async fn a_file_that_appears_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let (made, other) = (path.clone(), directory.path().join("other"));
        let waiting = tokio::spawn(async move { appears(&path).await });
        std::fs::write(other, "").unwrap();
        tokio::task::yield_now().await;
        std::fs::write(&made, "").unwrap();
        waiting.await.unwrap().unwrap();
        appears(&made).await.unwrap();
    }
}
