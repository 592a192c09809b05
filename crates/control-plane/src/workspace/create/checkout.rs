//! The checkout of a new workspace's repository.

use std::time::Duration;

use emergent_guest_client::{CallError, GuestClient};
use emergent_guest_protocol::{GitFailureReason, GuestCall};
use emergent_wire::git::{GitAction, GitAnswer, GitRequest};
use emergent_wire::workspace::Workspace;
use tokio::time::Instant;

use crate::workspace::error::{CheckoutError, Result, WorkspaceError};

/// The pauses between attempts to reach a repository.
const PAUSES: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(8)];
/// No attempt begins after this time.
const ATTEMPTS_TIME: Duration = Duration::from_secs(10 * 60);
/// The time limit of one attempt. The agent ends git earlier.
const ATTEMPT_TIME: Duration = Duration::from_secs(10 * 60 + 20);
/// The warning for a repository that needs credentials, when the server has none.
const AUTHENTICATION_FAILED: &str =
    "Repository authentication failed — connect GitHub in Settings > Integrations";

/// Clones the repository of a workspace, if it has one. Returns warnings: a repository that needs credentials leaves the
/// workspace empty.
pub(super) async fn checkout(channel: &GuestClient, workspace: &Workspace) -> Result<Vec<String>> {
    let Some(url) = &workspace.repository_url else {
        return Ok(Vec::new());
    };
    let request = GitRequest {
        repository_url: Some(url.clone()),
        branch: workspace.branch.clone(),
        ..GitRequest::new(GitAction::Clone)
    };
    clone(channel, request).await
}

async fn clone(channel: &GuestClient, request: GitRequest) -> Result<Vec<String>> {
    let begun = Instant::now();
    let mut pauses = PAUSES.iter();
    loop {
        let attempt = async {
            let call = channel.start(&GuestCall::Git(request.clone())).await?;
            Ok(call.answer::<GitAnswer>().await)
        };
        let answer: Result<_> = tokio::time::timeout(ATTEMPT_TIME, attempt)
            .await
            .unwrap_or(Err(WorkspaceError::NoAnswer(ATTEMPT_TIME)));
        let error = match answer? {
            Ok(_) => return Ok(Vec::new()),
            Err(error) => error,
        };
        let reason = match &error {
            CallError::Failed(detail) => GitFailureReason::of(detail),
            _ => None,
        };
        match reason {
            Some(GitFailureReason::AuthenticationRequired) => {
                return Ok(vec![AUTHENTICATION_FAILED.to_owned()]);
            }
            Some(GitFailureReason::NetworkUnreachable | GitFailureReason::TransferInterrupted) => {
                match pauses.next().filter(|_| begun.elapsed() < ATTEMPTS_TIME) {
                    Some(pause) => tokio::time::sleep(*pause).await,
                    None => return Err(WorkspaceError::Checkout(CheckoutError(error))),
                }
            }
            _ => return Err(WorkspaceError::Checkout(CheckoutError(error))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use emergent_guest_protocol::{AgentHello, Decoder, Frame, Kind, PROTOCOL_VERSION, Receiver};
    use emergent_wire::{ErrorCode, ErrorDetail};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    /// An agent whose git calls all fail for this reason after this time. Counts them.
    async fn agent(
        mut stream: DuplexStream,
        reason: GitFailureReason,
        time: Duration,
        calls: Arc<AtomicUsize>,
    ) {
        let hello =
            AgentHello { protocol: PROTOCOL_VERSION, version: "test".to_owned(), boot_id: "1".to_owned() };
        let (mut decoder, mut buffer) = (Decoder::new(Receiver::Guest), [0; 1024]);
        let mut failing = None;
        loop {
            let due = async {
                match failing {
                    Some((call, at)) => {
                        tokio::time::sleep_until(at).await;
                        call
                    }
                    None => std::future::pending().await,
                }
            };
            let read = tokio::select! {
                read = stream.read(&mut buffer) => read.unwrap(),
                call = due => {
                    failing = None;
                    let error = reason.add_to(ErrorDetail::new(ErrorCode::GitFailed, "git clone failed"));
                    let frame = Frame::message(Kind::Error, call, &error).unwrap();
                    stream.write_all(&frame.to_bytes()).await.unwrap();
                    continue;
                }
            };
            if read == 0 {
                return;
            }
            let mut bytes = &buffer[..read];
            while let Some(frame) = decoder.decode(&mut bytes).unwrap() {
                let answer = match frame.kind {
                    Kind::Hello => Frame::message(Kind::Hello, 0, &hello).unwrap(),
                    Kind::Ping => Frame::new(Kind::Pong, 0, frame.payload),
                    Kind::Call => {
                        calls.fetch_add(1, Ordering::SeqCst);
                        failing = Some((frame.call, Instant::now() + time));
                        continue;
                    }
                    _ => continue,
                };
                stream.write_all(&answer.to_bytes()).await.unwrap();
            }
        }
    }

    /// The number of attempts.
    async fn attempts(reason: GitFailureReason, time: Duration) -> usize {
        let (host, guest) = tokio::io::duplex(1 << 16);
        let calls = Arc::new(AtomicUsize::new(0));
        let agent = tokio::spawn(agent(guest, reason, time, Arc::clone(&calls)));
        let (reader, writer) = tokio::io::split(host);
        let channel = GuestClient::connect(reader, writer).await.unwrap();
        assert!(clone(&channel, GitRequest::new(GitAction::Clone)).await.is_err());
        channel.close();
        agent.await.unwrap();
        calls.load(Ordering::SeqCst)
    }

    #[tokio::test(start_paused = true)]
    async fn failures_that_can_pass_are_repeated_for_a_limited_time() {
        let (second, minutes) = (Duration::from_secs(1), Duration::from_secs(6 * 60));
        for reason in [GitFailureReason::NetworkUnreachable, GitFailureReason::TransferInterrupted] {
            assert_eq!(attempts(reason, second).await, PAUSES.len() + 1);
            assert_eq!(attempts(reason, minutes).await, 2);
        }
        // An agent that does not end git in time.
        let begun = Instant::now();
        assert_eq!(attempts(GitFailureReason::NetworkUnreachable, 10 * minutes).await, 1);
        assert!(begun.elapsed() < ATTEMPT_TIME + second, "{:?}", begun.elapsed());
        assert_eq!(attempts(GitFailureReason::DiskFull, second).await, 1);
    }
}
