//! One life of a server's process: from its start in the sandbox until it ends, its output handed to whom it belongs.

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use emergent_guest_client::{Call, CallError, Event, GuestClient};
use emergent_guest_protocol::{GuestCall, ServeAnswer, ServeCall, ShutdownCall};
use emergent_mcp_bridge::{Bridge, Outgoing};
use emergent_providers::ImageProgram;
use emergent_wire::mcp::{McpConfig, McpExit};
use emergent_wire::tools::WORKSPACE_DIR;
use emergent_wire::{ErrorCode, ErrorDetail};

use super::hosted::Hosted;

/// What is written to a process at once, about.
const BATCH_BYTES: usize = 64 * 1024;
/// Lines of standard error that are shown with an end.
const TAIL_LINES: usize = 20;
/// How long ending processes may take beyond their grace.
const BEYOND_GRACE: Duration = Duration::from_secs(8);

/// Why a process is no more.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// It ended.
    Exited(ServeAnswer),
    /// It could not be started.
    NotStarted(ErrorDetail),
    /// The sandbox is gone, and it with it.
    Lost(String),
}

impl End {
    /// Whether it ended by itself and without an error.
    pub(super) fn is_success(&self) -> bool {
        matches!(self, End::Exited(answer) if answer.exit_code == Some(0))
    }

    /// In words.
    pub(super) fn reason(&self) -> String {
        match self {
            End::Exited(answer) if answer.oom_killed => "it ran out of memory and was ended".to_owned(),
            End::Exited(ServeAnswer { exit_code: Some(code), .. }) => {
                format!("it ended with exit code {code}")
            }
            End::Exited(ServeAnswer { signal: Some(signal), .. }) => format!("it was ended by {signal}"),
            End::Exited(_) => "it was ended".to_owned(),
            End::NotStarted(error) => format!("it can't be started: {}", error.message),
            End::Lost(why) => format!("its sandbox was lost: {why}"),
        }
    }

    /// For whoever asks how it is doing.
    pub(super) fn exit(&self, hosted: &Hosted) -> McpExit {
        let answer = match self {
            End::Exited(answer) => answer.clone(),
            _ => ServeAnswer::default(),
        };
        McpExit {
            at: Utc::now(),
            exit_code: answer.exit_code,
            signal: answer.signal,
            oom_killed: answer.oom_killed,
            reason: self.reason(),
            stderr_tail: hosted.journal.tail(TAIL_LINES),
        }
    }
}

/// What is to be run for a server.
pub(super) fn program(config: &McpConfig, image: ImageProgram) -> Result<ServeCall, ErrorDetail> {
    let command = match (&config.command, &config.args) {
        (command, _) if !command.is_empty() => command.clone(),
        (_, args) if !args.is_empty() => [image.entrypoint, args.clone()].concat(),
        _ => [image.entrypoint, image.arguments].concat(),
    };
    if command.is_empty() {
        let message = "the image runs nothing by itself: register the server with a command";
        return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
    }
    let volumes = config.volumes.iter().map(|volume| volume.path.clone());
    Ok(ServeCall {
        command,
        directory: image.directory,
        user: image.user,
        owned: volumes.chain([WORKSPACE_DIR.to_owned()]).collect(),
        ..ServeCall::default()
    })
}

/// A process that was started.
pub(super) struct Process {
    call: Call,
    writer: tokio::task::JoinHandle<()>,
}

impl Process {
    /// Starts a process whose input is what comes out of a bridge.
    pub(super) async fn start(
        channel: &GuestClient,
        program: &ServeCall,
        mut outgoing: Outgoing,
    ) -> Result<Self, CallError> {
        let call = channel.start(&GuestCall::Serve(program.clone())).await?;
        let input = call.input();
        let writer = tokio::spawn(async move {
            while let Some(batch) = outgoing.next(BATCH_BYTES).await {
                if input.send(&batch).await.is_err() {
                    return;
                }
            }
            // Nobody will write any more: many servers end by themselves then.
            let _ = input.end().await;
        });
        Ok(Self { call, writer })
    }

    /// Starts a process that gets no input.
    pub(super) async fn start_alone(channel: &GuestClient, program: &ServeCall) -> Result<Self, CallError> {
        let call = channel.start(&GuestCall::Serve(program.clone())).await?;
        Ok(Self { call, writer: tokio::spawn(std::future::ready(())) })
    }

    /// Hands its output on until it ends.
    pub(super) async fn follow(mut self, hosted: &Arc<Hosted>, bridge: Option<&Bridge>) -> End {
        loop {
            match self.call.next().await {
                Ok(Event::Stdout(bytes)) => match bridge {
                    Some(bridge) => bridge.receive(&bytes),
                    None => hosted.journal.write(&bytes),
                },
                Ok(Event::Stderr(bytes)) => hosted.journal.write(&bytes),
                Ok(Event::Answer(answer)) => {
                    return match serde_json::from_slice(&answer) {
                        Ok(answer) => End::Exited(answer),
                        Err(error) => End::Lost(error.to_string()),
                    };
                }
                Err(CallError::Failed(error)) if error.code == ErrorCode::Cancelled => {
                    return End::Exited(ServeAnswer::default());
                }
                Err(CallError::Failed(error)) => return End::NotStarted(error),
                Err(error) => return End::Lost(error.to_string()),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.writer.abort();
    }
}

/// Ends every process of a sandbox: SIGTERM, this grace, SIGKILL. False when its agent does not answer.
pub(super) async fn end_all(channel: &GuestClient, grace: Duration) -> bool {
    let ended = async {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let call = channel.start(&GuestCall::Shutdown(ShutdownCall { grace_ms })).await.ok()?;
        call.answer::<serde_json::Value>().await.ok()
    };
    tokio::time::timeout(grace + BEYOND_GRACE, ended).await.ok().flatten().is_some()
}
