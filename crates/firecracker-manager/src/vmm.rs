//! A client of Firecracker's API, which listens on a Unix socket of one microVM's jail.
//!
//! It uses hyper on the socket itself, not reqwest: the socket was made by a process in a jail, so it is opened without
//! following links (`socket`).

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
use tokio_util::task::AbortOnDropHandle;

use crate::socket;

/// The time limit for a request. The start of the guest is one.
const REQUEST_TIME: Duration = Duration::from_secs(30);
/// The time limit for writing or loading a machine's memory.
const MEMORY_TIME: Duration = Duration::from_secs(180);
/// The largest answer.
const ANSWER_BYTES: usize = 1 << 20;

/// Why a request to Firecracker failed.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The socket can't be used.
    #[error("talking to Firecracker: {request}: {reason}")]
    Connect {
        /// Method and path.
        request: String,
        /// Why.
        reason: io::Error,
    },
    /// The exchange of request and answer broke.
    #[error("talking to Firecracker: {request}: {reason}")]
    Exchange {
        /// Method and path.
        request: String,
        /// Why.
        reason: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Firecracker answered with an error.
    #[error("Firecracker refused: {path}: {fault}")]
    Refused {
        /// The path.
        path: String,
        /// Its message, or the HTTP status if it sent none.
        fault: String,
    },
    /// There was no answer in time.
    #[error("a request to Firecracker did not end within {seconds} s: {path}")]
    TimedOut {
        /// The path.
        path: String,
        /// The time limit.
        seconds: u64,
    },
}

/// One microVM's API.
#[derive(Clone, Debug)]
pub(crate) struct Vmm {
    socket: PathBuf,
}

impl Vmm {
    pub(crate) fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Sets a part of the configuration.
    pub(crate) async fn put(&self, path: &str, body: &Value) -> Result<(), VmmError> {
        self.send(Method::PUT, path, body).await.map(drop)
    }

    /// Starts the machine.
    pub(crate) async fn start(&self) -> Result<(), VmmError> {
        self.put("/actions", &json!({ "action_type": "InstanceStart" })).await
    }

    /// Sends Ctrl+Alt+Del to the guest, which asks its kernel to reboot. A reboot ends the microVM.
    pub(crate) async fn press_restart_keys(&self) -> Result<(), VmmError> {
        self.put("/actions", &json!({ "action_type": "SendCtrlAltDel" })).await
    }

    /// Pauses all CPUs, or resumes them.
    pub(crate) async fn set_paused(&self, paused: bool) -> Result<(), VmmError> {
        let state = if paused { "Paused" } else { "Resumed" };
        self.send(Method::PATCH, "/vm", &json!({ "state": state })).await.map(drop)
    }

    /// Whether all CPUs are paused.
    pub(crate) async fn is_paused(&self) -> Result<bool, VmmError> {
        Ok(self.send(Method::GET, "/", &Value::Null).await?["state"] == "Paused")
    }

    /// Writes the state and the memory of a paused machine to files of its jail.
    pub(crate) async fn copy_memory(&self, state: &str, memory: &str) -> Result<(), VmmError> {
        let body = json!({ "snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory });
        self.send_within(MEMORY_TIME, Method::PUT, "/snapshot/create", &body).await.map(drop)
    }

    /// Loads a state and a memory into a machine that was not started, with another interface, and resumes it.
    pub(crate) async fn load_memory(
        &self,
        state: &str,
        memory: &str,
        interface: &str,
    ) -> Result<(), VmmError> {
        let body = json!({
            "snapshot_path": state,
            "mem_backend": { "backend_type": "File", "backend_path": memory },
            "network_overrides": [{ "iface_id": "eth0", "host_dev_name": interface }],
            "resume_vm": true,
        });
        self.send_within(MEMORY_TIME, Method::PUT, "/snapshot/load", &body).await.map(drop)
    }

    async fn send(&self, method: Method, path: &str, body: &Value) -> Result<Value, VmmError> {
        self.send_within(REQUEST_TIME, method, path, body).await
    }

    async fn send_within(
        &self,
        within: Duration,
        method: Method,
        path: &str,
        body: &Value,
    ) -> Result<Value, VmmError> {
        match tokio::time::timeout(within, self.exchange(method, path, body)).await {
            Ok(answer) => answer,
            Err(_) => Err(VmmError::TimedOut { path: path.to_owned(), seconds: within.as_secs() }),
        }
    }

    async fn exchange(&self, method: Method, path: &str, body: &Value) -> Result<Value, VmmError> {
        let name = format!("{method} {path}");
        let broken = |reason: Box<dyn std::error::Error + Send + Sync>| VmmError::Exchange {
            request: name.clone(),
            reason,
        };
        let stream = socket::connect(&self.socket).await;
        let stream = stream.map_err(|reason| VmmError::Connect { request: name.clone(), reason })?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| broken(error.into()))?;
        let connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("Host", "localhost")
            .header("Content-Type", "application/json")
            .body(Full::new(if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) }))
            .map_err(|error| broken(error.into()))?;
        let response = sender.send_request(request).await.map_err(|error| broken(error.into()))?;
        let status = response.status();
        let bytes = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
        drop(connection);
        let bytes = bytes.map_err(broken)?.to_bytes();
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        if status.is_success() {
            return Ok(answer);
        }
        let fault = answer["fault_message"].as_str().map_or_else(|| status.to_string(), str::to_owned);
        Err(VmmError::Refused { path: path.to_owned(), fault })
    }
}

/// Waits until a process listens on a socket.
pub(crate) async fn listens(path: &Path) -> io::Result<()> {
    appears(path).await?;
    // The socket's name appears a moment before the process listens, and there is no event for that.
    loop {
        match socket::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            connected => return connected.map(drop),
        }
    }
}

/// Waits until a file appears, by inotify on its directory.
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
    async fn waiting_ends_when_the_file_appears() {
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
