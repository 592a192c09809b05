//! Firecracker's API on a Unix socket. The settings before the start make a plan; the start runs it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::{Mutex, Notify};

use crate::machine::{Machine, Plan};
use crate::{Settings, VERSION, option};

/// A double of one Firecracker process.
struct Vmm {
    settings: Settings,
    root: PathBuf,
    id: String,
    state: Mutex<State>,
    started: Notify,
}

#[derive(Default)]
struct State {
    plan: Plan,
    machine: Option<Machine>,
    is_paused: bool,
    /// Whether the guest was notified of a vsock reset since it was paused. A snapshot of its memory notifies it.
    is_reset_sent: bool,
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn run(settings: &Settings, arguments: &[String]) -> anyhow::Result<()> {
    let root = PathBuf::from(option(arguments, "--double-root").unwrap_or_else(|| "/".to_owned()));
    // Relative paths are short enough for sockets.
    std::env::set_current_dir(&root).with_context(|| root.display().to_string())?;
    let root = PathBuf::from(".");
    let socket = option(arguments, "--api-sock").unwrap_or_else(|| "/run/firecracker.socket".to_owned());
    let id = option(arguments, "--id").unwrap_or_else(|| "anonymous-instance".to_owned());
    let listener = UnixListener::bind(root.join(socket.trim_start_matches('/'))).context("the API socket")?;
    let vmm = Arc::new(Vmm {
        settings: settings.clone(),
        root,
        id,
        state: Mutex::default(),
        started: Notify::new(),
    });
    let ended = machine_end(Arc::clone(&vmm));
    tokio::select! {
        result = serve(vmm, listener) => result,
        result = ended => result,
    }
}

async fn serve(vmm: Arc<Vmm>, listener: UnixListener) -> anyhow::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        let vmm = Arc::clone(&vmm);
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(Arc::clone(&vmm), request));
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
        });
    }
}

/// Waits for the end of the machine, which is the end of a Firecracker process.
async fn machine_end(vmm: Arc<Vmm>) -> anyhow::Result<()> {
    vmm.started.notified().await;
    let qemu = {
        let mut state = vmm.state.lock().await;
        let pid = state.machine.as_mut().and_then(|machine| machine.qemu.id()).context("QEMU has ended")?;
        rustix::process::pidfd_open(
            rustix::process::Pid::from_raw(pid.cast_signed()).context("a process id")?,
            rustix::process::PidfdFlags::NONBLOCK,
        )?
    };
    // SAFETY: the descriptor is owned by the registration and closed after it.
    let qemu = unsafe { tokio::io::unix::AsyncFd::register(qemu) }?;
    qemu.readable().await?.retain_ready();
    Ok(())
}

async fn answer(vmm: Arc<Vmm>, request: Request<Incoming>) -> anyhow::Result<Response<Full<Bytes>>> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let body = request.into_body().collect().await?.to_bytes();
    let body = if body.is_empty() { Ok(Value::Null) } else { serde_json::from_slice(&body) };
    let result = match body {
        // On a task of its own: if the client disconnects, QEMU's answers must still be read.
        Ok(body) => tokio::spawn(async move { vmm.act(&method, &path, body).await }).await?,
        Err(error) => Err(error.into()),
    };
    let (status, body) = match result {
        Ok(None) => (StatusCode::NO_CONTENT, String::new()),
        Ok(Some(body)) => (StatusCode::OK, body.to_string()),
        Err(error) => (StatusCode::BAD_REQUEST, json!({ "fault_message": format!("{error:#}") }).to_string()),
    };
    Ok(Response::builder().status(status).body(Full::new(body.into()))?)
}

impl Vmm {
    async fn act(&self, method: &Method, path: &str, body: Value) -> anyhow::Result<Option<Value>> {
        let mut state = self.state.lock().await;
        let is_running = state.machine.is_some();
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        match (method.as_str(), &parts[..]) {
            ("GET", [""]) => {
                let name = match (is_running, state.is_paused) {
                    (false, _) => "Not started",
                    (true, false) => "Running",
                    (true, true) => "Paused",
                };
                let info = json!({ "id": self.id, "state": name, "vmm_version": VERSION, "app_name": "Firecracker" });
                return Ok(Some(info));
            }
            ("GET", ["version"]) => return Ok(Some(json!({ "firecracker_version": VERSION }))),
            ("GET", ["machine-config"]) => return Ok(Some(state.plan.machine.clone())),
            ("PATCH", ["vm"]) if is_running => self.pause(&mut state, &body).await?,
            ("PUT", ["actions"]) => match body["action_type"].as_str() {
                Some("InstanceStart") if is_running => {
                    bail!("The requested operation is not supported after starting the microVM.")
                }
                Some("InstanceStart") => {
                    state.machine =
                        Some(Machine::start(&self.settings, &self.root, &state.plan, None).await?);
                    self.started.notify_one();
                }
                Some("SendCtrlAltDel") => {
                    let machine = state.machine.as_mut();
                    machine.context("The microVM is not started.")?.press_restart_keys().await?;
                }
                other => bail!("unknown action {other:?}"),
            },
            ("PUT", ["snapshot", "create"]) => self.copy(&mut state, &body).await?,
            ("PUT", ["snapshot", "load"]) if !is_running => self.load(&mut state, &body).await?,
            ("PUT", _) if is_running => {
                bail!("The requested operation is not supported after starting the microVM.")
            }
            ("PUT", ["machine-config"]) => state.plan.machine = body,
            ("PUT", ["boot-source"]) => {
                self.must_exist(&body["kernel_image_path"])?;
                state.plan.boot = body;
            }
            ("PUT", ["drives", _]) => {
                self.must_exist(&body["path_on_host"])?;
                state.plan.drives.push(body);
            }
            ("PUT", ["network-interfaces", _]) => state.plan.interfaces.push(body),
            ("PUT", ["vsock"]) => state.plan.vsock = Some(body),
            ("PUT", ["entropy"]) => state.plan.has_entropy = true,
            ("PUT", ["logger" | "metrics" | "serial"]) => {}
            _ => bail!("Invalid request method and/or path: {method} {path}."),
        }
        Ok(None)
    }

    async fn pause(&self, state: &mut State, body: &Value) -> anyhow::Result<()> {
        let pause = match body["state"].as_str() {
            Some("Paused") => true,
            Some("Resumed") => false,
            other => bail!("unknown state {other:?}"),
        };
        let machine = state.machine.as_mut().context("The microVM is not started.")?;
        machine.set_paused(pause).await?;
        state.is_paused = pause;
        if pause {
            state.is_reset_sent = false;
        } else if !state.is_reset_sent {
            // As in Firecracker 1.16.1: vsock waits for the guest to confirm a reset that was never sent to it.
            machine.open_vsock(false);
        }
        Ok(())
    }

    /// Writes the memory and the plan of a paused machine to files.
    async fn copy(&self, state: &mut State, body: &Value) -> anyhow::Result<()> {
        if !state.is_paused {
            bail!("The microVM must be paused.");
        }
        state.is_reset_sent = true;
        let plan = serde_json::to_vec(&state.plan)?;
        let machine = state.machine.as_mut().context("The microVM is not started.")?;
        machine.copy_memory(&self.inside(&body["mem_file_path"])?).await?;
        std::fs::write(self.inside(&body["snapshot_path"])?, plan)?;
        Ok(())
    }

    /// Starts a machine from such files, with other interfaces if the request names some.
    async fn load(&self, state: &mut State, body: &Value) -> anyhow::Result<()> {
        let mut plan: Plan = serde_json::from_slice(&std::fs::read(self.inside(&body["snapshot_path"])?)?)?;
        for change in body["network_overrides"].as_array().into_iter().flatten() {
            let interface = plan.interfaces.iter_mut().find(|one| one["iface_id"] == change["iface_id"]);
            interface.context("no such interface")?["host_dev_name"] = change["host_dev_name"].clone();
        }
        let memory = self.inside(&body["mem_backend"]["backend_path"])?;
        state.machine = Some(Machine::start(&self.settings, &self.root, &plan, Some(&memory)).await?);
        state.plan = plan;
        state.is_paused = true;
        state.is_reset_sent = true;
        self.started.notify_one();
        if body["resume_vm"] == true {
            self.pause(state, &json!({ "state": "Resumed" })).await?;
        }
        Ok(())
    }

    fn inside(&self, path: &Value) -> anyhow::Result<PathBuf> {
        Ok(self.root.join(path.as_str().context("a path is a text")?.trim_start_matches('/')))
    }

    fn must_exist(&self, path: &Value) -> anyhow::Result<()> {
        let path = self.inside(path)?;
        std::fs::metadata(&path).with_context(|| path.display().to_string()).map(drop)
    }
}
