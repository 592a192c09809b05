//! Observes whether a remote asks for credentials.
//!
//! git asks its credential helpers (`get`) when a remote wants credentials, and tells them (`erase`) when a remote rejects
//! those that it got. The agent adds itself as the last helper. It answers nothing, and reports both to the git tool through
//! a socket, because git's exit status and exit code do not tell this failure from others.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The agent's subcommand that git runs as a credential helper.
pub(crate) const SUBCOMMAND: &str = "git-credential";

/// The receiving end of the reports of one git command.
pub(super) struct CredentialObserver {
    socket: UnixDatagram,
    name: String,
}

impl CredentialObserver {
    pub(super) fn new() -> std::io::Result<Self> {
        // An abstract name: no file, and private to the sandbox.
        let name = format!("emergent-git-{}", uuid::Uuid::new_v4().simple());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, name })
    }

    /// The git setting that makes the agent a credential helper.
    pub(super) fn setting(&self) -> std::io::Result<String> {
        let agent = std::env::current_exe()?;
        let quoted = agent.to_string_lossy().replace('\'', r"'\''");
        Ok(format!("credential.helper=!'{quoted}' {SUBCOMMAND} {}", self.name))
    }

    /// Whether git has asked for credentials so far, or has had some rejected.
    pub(super) fn was_asked(&self) -> bool {
        self.socket.recv(&mut [0]).is_ok()
    }
}

/// The subcommand: reports an operation of git's to the observer called `name`. git passes the operation as an argument and
/// the credentials on standard input, which is not read.
pub(crate) fn report(name: &str, operation: &str) -> Result<(), String> {
    if !matches!(operation, "get" | "erase") {
        return Ok(());
    }
    let send = || -> std::io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?;
        // The first report is enough: a full queue is no failure.
        socket.set_nonblocking(true)?;
        let _ = socket.send(b"c");
        Ok(())
    };
    send().map_err(|error| format!("the credential helper can't reach the agent: {error}"))
}
