//! The manager's calls to the guest agent of a microVM, over its vsock.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use emergent_guest_client::{CallError, ConnectError, GuestClient};
use emergent_guest_protocol::{CHANNEL_PORT, GuestCall, MachineCall, ShutdownCall};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::socket;

/// The time limit for a connection to an agent that is asked to power off.
const POWER_OFF_CONNECT_TIME: Duration = Duration::from_secs(2);
/// The pause before an agent that did not answer is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(20);
/// The time limit for flushing a microVM's disk.
const FLUSH_TIME: Duration = Duration::from_secs(60);
/// The longest first line of Firecracker's vsock protocol.
const LINE_BYTES: usize = 64;

/// Why a call to the guest agent failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The vsock's Unix socket can't be used.
    #[error("connecting to the guest agent: {0}")]
    Connect(io::Error),
    /// Firecracker closed the connection: the guest has no listener on the port.
    #[error("connecting to the guest agent: nobody listens in the microVM")]
    NobodyListens,
    /// The first line was too long.
    #[error("connecting to the guest agent: it does not speak the vsock protocol")]
    NoVsock,
    /// The first line was not an acceptance.
    #[error("connecting to the guest agent: it was refused: {0}")]
    Refused(String),
    /// The handshake with the agent failed.
    #[error("greeting the guest agent: {0}")]
    Handshake(ConnectError),
    /// The agent refused or failed a call.
    #[error("{step}: {reason}")]
    Call {
        /// The call.
        step: &'static str,
        /// Why.
        reason: CallError,
    },
    /// The host gave no random bytes.
    #[error("random bytes for the guest agent: {0}")]
    Random(getrandom::Error),
    /// A call took too long.
    #[error("{step} did not end within {seconds} s{}", last.as_deref().map(|error| format!(": {error}")).unwrap_or_default())]
    TimedOut {
        /// The call.
        step: &'static str,
        /// The time limit.
        seconds: u64,
        /// The last error before the limit.
        last: Option<Box<GuestError>>,
    },
}

impl GuestError {
    fn timed_out(step: &'static str, within: Duration, last: Option<GuestError>) -> Self {
        Self::TimedOut { step, seconds: within.as_secs(), last: last.map(Box::new) }
    }
}

/// Connects to the agent. Firecracker's vsock protocol begins with a line from each side: one names the port, the other
/// confirms the connection.
pub(crate) async fn connect(vsock: &Path, within: Duration) -> Result<UnixStream, GuestError> {
    let connected = tokio::time::timeout(within, request_port(vsock)).await;
    connected.unwrap_or_else(|_| Err(GuestError::timed_out("connecting to the guest agent", within, None)))
}

async fn request_port(vsock: &Path) -> Result<UnixStream, GuestError> {
    let mut stream = socket::connect(vsock).await.map_err(GuestError::Connect)?;
    let request = format!("CONNECT {CHANNEL_PORT}\n");
    stream.write_all(request.as_bytes()).await.map_err(GuestError::Connect)?;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        if line.len() >= LINE_BYTES {
            return Err(GuestError::NoVsock);
        }
        // One byte at a time: the bytes after the line belong to the agent's channel.
        line.push(stream.read_u8().await.map_err(|_| GuestError::NobodyListens)?);
    }
    if line.starts_with(b"OK ") {
        Ok(stream)
    } else {
        Err(GuestError::Refused(String::from_utf8_lossy(&line).trim().to_owned()))
    }
}

async fn client(vsock: &Path, within: Duration) -> Result<GuestClient, GuestError> {
    let (reader, writer) = connect(vsock, within).await?.into_split();
    GuestClient::connect(reader, writer).await.map_err(GuestError::Handshake)
}

async fn call(client: &GuestClient, step: &'static str, message: &GuestCall) -> Result<(), GuestError> {
    let failed = |reason| GuestError::Call { step, reason };
    let call = client.start(message).await.map_err(failed)?;
    call.answer::<serde_json::Value>().await.map(drop).map_err(failed)
}

/// Gives the agent its machine's identity. Time and random bytes are added here.
pub(crate) async fn identify(
    vsock: &Path,
    mut identity: MachineCall,
    within: Duration,
) -> Result<(), GuestError> {
    const STEP: &str = "telling the guest agent its identity";
    let mut last = None;
    let identified = async {
        // After a start from a snapshot's memory there is no signal that the agent listens again.
        let client = loop {
            match client(vsock, within).await {
                Ok(client) => break client,
                Err(error) => {
                    tracing::debug!(%error, "the guest agent does not answer yet");
                    last = Some(error);
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        };
        identity.entropy = vec![0; 64];
        getrandom::fill(&mut identity.entropy).map_err(GuestError::Random)?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        identity.unix_time_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        call(&client, STEP, &GuestCall::Machine(identity)).await
    };
    match tokio::time::timeout(within, identified).await {
        Ok(identified) => identified,
        Err(_) => Err(GuestError::timed_out(STEP, within, last)),
    }
}

/// Has the agent write all cached data to the disk.
pub(crate) async fn flush(vsock: &Path, within: Duration) -> Result<(), GuestError> {
    const STEP: &str = "flushing the microVM's disk";
    let flushed = async { call(&client(vsock, within).await?, STEP, &GuestCall::Flush(())).await };
    let flushed = tokio::time::timeout(FLUSH_TIME, flushed).await;
    flushed.unwrap_or_else(|_| Err(GuestError::timed_out(STEP, FLUSH_TIME, None)))
}

/// Asks the agent to end all processes, flush the disk and power off. There is no answer if it does: the end of the microVM
/// ends the connection. Returns when the agent can't be asked, or when the connection ends.
pub(crate) async fn power_off(vsock: &Path, grace: Duration) {
    let asked = async {
        let client = client(vsock, POWER_OFF_CONNECT_TIME).await?;
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        call(&client, "powering off", &GuestCall::PowerOff(ShutdownCall { grace_ms })).await
    };
    if let Err(error) = asked.await {
        tracing::debug!(%error, "the guest agent was not asked to power off, or has done it");
    }
}
