//! The guest agent's end of a microVM's vsock.

use std::path::Path;
use std::time::{Duration, SystemTime};

use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{CHANNEL_PORT, GuestCall, MachineCall, ShutdownCall};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::error::ManagerError;
use crate::socket;

/// How long a connection to the agent may take that is to be asked to end.
const ASK_TIME: Duration = Duration::from_secs(2);
/// How long to wait before the agent is tried again that may not listen yet.
const AGAIN: Duration = Duration::from_millis(20);
/// How long it may take to put on the disk what was written.
const FLUSH_TIME: Duration = Duration::from_secs(60);
/// The longest line that says that a connection was made.
const LINE_BYTES: usize = 64;

/// A connection to the agent, as Firecracker makes it: a line that names the port, and a line that says it is there.
pub(crate) async fn connect(vsock: &Path, within: Duration) -> Result<UnixStream, ManagerError> {
    const WHAT: &str = "connecting to the guest agent";
    let connect = async {
        let failed = |error: std::io::Error| ManagerError::failed(WHAT, error);
        let mut stream = socket::connect(vsock).await.map_err(failed)?;
        stream.write_all(format!("CONNECT {CHANNEL_PORT}\n").as_bytes()).await.map_err(failed)?;
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            if line.len() >= LINE_BYTES {
                return Err(ManagerError::failed(WHAT, "it does not speak the vsock protocol"));
            }
            // One at a time: what comes after the line is the agent's.
            match stream.read_u8().await {
                Ok(byte) => line.push(byte),
                Err(_) => return Err(ManagerError::failed(WHAT, "nobody listens in the microVM")),
            }
        }
        if !line.starts_with(b"OK ") {
            return Err(ManagerError::failed(
                WHAT,
                format!("it was refused: {}", String::from_utf8_lossy(&line).trim()),
            ));
        }
        Ok(stream)
    };
    let seconds = within.as_secs();
    match tokio::time::timeout(within, connect).await {
        Ok(connected) => connected,
        Err(_) => Err(ManagerError::TimedOut { what: WHAT, seconds, detail: None }),
    }
}

/// Tells the agent what the microVM is called, where it is, what time it is. Time and random bytes are filled in.
pub(crate) async fn identify(
    vsock: &Path,
    mut call: MachineCall,
    within: Duration,
) -> Result<(), ManagerError> {
    const WHAT: &str = "telling the guest agent who it is";
    let failed = |error: &dyn std::fmt::Display| ManagerError::failed(WHAT, error);
    let mut last = None;
    let told = async {
        // One that was put back from a copy is not told when its agent listens again.
        let client = loop {
            match client(vsock, within).await {
                Ok(client) => break client,
                Err(error) => {
                    tracing::debug!(%error, "the agent is not there yet");
                    last = Some(error.to_string());
                    tokio::time::sleep(AGAIN).await;
                }
            }
        };
        call.entropy = vec![0; 64];
        getrandom::fill(&mut call.entropy).map_err(|error| failed(&error))?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        call.unix_time_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let answer = client.start(&GuestCall::Machine(call)).await.map_err(|error| failed(&error))?;
        answer.answer::<serde_json::Value>().await.map_err(|error| failed(&error))?;
        Ok(())
    };
    match tokio::time::timeout(within, told).await {
        Ok(told) => told,
        Err(_) => Err(ManagerError::TimedOut { what: WHAT, seconds: within.as_secs(), detail: last }),
    }
}

/// Has the agent put everything on the disk that was written.
pub(crate) async fn flush(vsock: &Path, within: Duration) -> Result<(), ManagerError> {
    const WHAT: &str = "flushing the microVM's disk";
    let failed = |error: &dyn std::fmt::Display| ManagerError::failed(WHAT, error);
    let flushed = async {
        let client = client(vsock, within).await?;
        let call = client.start(&GuestCall::Flush(())).await.map_err(|error| failed(&error))?;
        call.answer::<serde_json::Value>().await.map(drop).map_err(|error| failed(&error))
    };
    match tokio::time::timeout(FLUSH_TIME, flushed).await {
        Ok(flushed) => flushed,
        Err(_) => Err(ManagerError::TimedOut { what: WHAT, seconds: FLUSH_TIME.as_secs(), detail: None }),
    }
}

/// Asks the agent to end all processes, to put everything on the disk and to end the microVM. Returns only if that can't
/// be asked: the microVM's end is the answer.
pub(crate) async fn power_off(vsock: &Path, grace: Duration) {
    let asked = async {
        let client = client(vsock, ASK_TIME).await.ok()?;
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let call = client.start(&GuestCall::PowerOff(ShutdownCall { grace_ms })).await.ok()?;
        call.answer::<serde_json::Value>().await.ok()
    };
    asked.await;
}

async fn client(vsock: &Path, within: Duration) -> Result<GuestClient, ManagerError> {
    let (reader, writer) = connect(vsock, within).await?.into_split();
    GuestClient::connect(reader, writer)
        .await
        .map_err(|error| ManagerError::failed("greeting the guest agent", error))
}
