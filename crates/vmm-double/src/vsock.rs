//! The vsock of a machine. The process `vhost-device-vsock` beside QEMU provides it and can be restarted. Clients connect to a
//! socket of this process, which stays.
//!
//! ```text
//!  v.sock (here) ──▶ gate ──▶ vhost.uds ─ vhost-device-vsock ─ vhost.sock ─ QEMU
//!  v.sock_1025 ◀── link ── vhost.uds_1025 ◀┘
//! ```
//!
//! A connection before the guest's driver is ready would break `vhost-device-vsock` permanently. So connections wait at the gate
//! until the driver is ready.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Context;
use tokio::net::{UnixListener, UnixStream};
use tokio::process::Child;
use tokio::sync::watch;

use crate::Settings;
use crate::machine::{child, wait_for};

/// The socket that QEMU connects to.
pub(crate) const SOCKET: &str = "vhost.sock";
/// The socket for connections to the guest. With `_` and a port appended: a socket for connections from the guest.
const INNER: &str = "vhost.uds";

/// A machine's vsock.
pub(crate) struct Vsock {
    settings: Settings,
    root: PathBuf,
    /// The socket that the manager connects to.
    outer: PathBuf,
    /// The process `vhost-device-vsock`, while the vsock device is plugged in.
    backend: Option<Child>,
    gate: watch::Sender<bool>,
}

impl Vsock {
    /// Listens. Connections wait until the gate is open.
    pub(crate) fn listen(settings: &Settings, root: &Path, outer: PathBuf) -> anyhow::Result<Self> {
        let _ = fs::remove_file(&outer);
        let listener = UnixListener::bind(&outer).with_context(|| outer.display().to_string())?;
        let (gate, opened) = watch::channel(false);
        let inner = root.join(INNER);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(relay(stream, inner.clone(), opened.clone()));
            }
        });
        Ok(Self { settings: settings.clone(), root: root.to_owned(), outer, backend: None, gate })
    }

    pub(crate) fn is_plugged_in(&self) -> bool {
        self.backend.is_some()
    }

    /// Starts the process that QEMU connects to.
    pub(crate) async fn start(&mut self) -> anyhow::Result<()> {
        let (socket, inner) = (self.root.join(SOCKET), self.root.join(INNER));
        for used in [&socket, &inner] {
            let _ = fs::remove_file(used);
        }
        self.link_ports(&inner)?;
        let option = format!("guest-cid=3,socket={},uds-path={}", socket.display(), inner.display());
        let mut backend = child(&self.settings.vhost_device_vsock)
            .args(["--vm", &option])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("vhost-device-vsock can't be started")?;
        // It accepts one connection only, which must be QEMU's. So this waits until the socket exists and does not connect.
        wait_for("vhost-device-vsock", &mut backend, || socket.exists().then_some(())).await?;
        self.backend = Some(backend);
        Ok(())
    }

    /// Links the manager's sockets for connections from the guest to the names that `vhost-device-vsock` uses.
    fn link_ports(&self, inner: &Path) -> io::Result<()> {
        let outer = self.outer.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for entry in fs::read_dir(&self.root)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if let Some(port) = name.strip_prefix(&outer).and_then(|rest| rest.strip_prefix('_')) {
                let link = format!("{}_{port}", inner.display());
                let _ = fs::remove_file(&link);
                symlink(&name, link)?;
            }
        }
        Ok(())
    }

    /// Opens or closes the gate. While it is closed, new connections wait. Closing it ends open connections.
    pub(crate) fn set_open(&self, open: bool) {
        self.gate.send_replace(open);
    }

    /// Ends the process.
    pub(crate) async fn end(&mut self) -> anyhow::Result<()> {
        self.set_open(false);
        if let Some(mut backend) = self.backend.take() {
            backend.kill().await?;
        }
        Ok(())
    }
}

async fn relay(mut outer: UnixStream, inner: PathBuf, mut opened: watch::Receiver<bool>) {
    if opened.wait_for(|open| *open).await.is_err() {
        return;
    }
    let relayed = async {
        let mut inner = UnixStream::connect(inner).await?;
        tokio::io::copy_bidirectional(&mut outer, &mut inner).await
    };
    let mut closed = opened.clone();
    tokio::select! {
        _ = relayed => {}
        _ = closed.wait_for(|open| !*open) => {}
    }
}
