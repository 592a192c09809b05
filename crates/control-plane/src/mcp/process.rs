//! One process of a server, from its start in the sandbox to its end.

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use emergent_guest_client::{Call, CallError, Event, GuestClient};
use emergent_guest_protocol::{GuestCall, ServeAnswer, ServeCall, ShutdownCall};
use emergent_mcp_bridge::{Bridge, Outgoing};
use emergent_providers::ImageProgram;
use emergent_wire::ErrorCode;
use emergent_wire::mcp::{McpConfig, McpExit};
use emergent_wire::tools::WORKSPACE_DIR;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::error::{McpError, Result};
use super::hosted::HostedServer;

/// About as many bytes are written to a process at once.
const BATCH_BYTES: usize = 64 * 1024;
/// The lines of standard error that are kept with the end of a process.
const TAIL_LINES: usize = 20;
/// The time that the agent has to end processes beyond their grace period.
const SHUTDOWN_MARGIN: Duration = Duration::from_secs(8);

/// The end of a process.
#[derive(Clone, Debug)]
pub(super) enum ProcessEnd {
    Exited(ServeAnswer),
    /// It could not be started, for this reason.
    NotStarted(String),
    /// The sandbox, or the channel to it, was lost for this reason.
    SandboxLost(String),
}

impl ProcessEnd {
    /// Whether it exited with code 0.
    pub(super) fn is_success(&self) -> bool {
        matches!(self, Self::Exited(answer) if answer.exit_code == Some(0))
    }

    /// Whether it exited by itself. A process that was killed did not.
    pub(super) fn is_exit(&self) -> bool {
        matches!(self, Self::Exited(answer) if answer.exit_code.is_some())
    }

    /// The description for a person.
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Exited(answer) if answer.oom_killed => "it ran out of memory and was ended".to_owned(),
            Self::Exited(ServeAnswer { exit_code: Some(code), .. }) => {
                format!("it ended with exit code {code}")
            }
            Self::Exited(ServeAnswer { signal: Some(signal), .. }) => format!("it was ended by {signal}"),
            Self::Exited(_) => "it was ended".to_owned(),
            Self::NotStarted(reason) => format!("it can't be started: {reason}"),
            Self::SandboxLost(reason) => format!("its sandbox was lost: {reason}"),
        }
    }

    /// The end as clients see it.
    pub(super) fn exit(&self, server: &HostedServer) -> McpExit {
        let answer = match self {
            Self::Exited(answer) => answer.clone(),
            Self::NotStarted(_) | Self::SandboxLost(_) => ServeAnswer::default(),
        };
        McpExit {
            at: Utc::now(),
            exit_code: answer.exit_code,
            signal: answer.signal,
            oom_killed: answer.oom_killed,
            reason: self.reason(),
            stderr_tail: server.journal.tail(TAIL_LINES),
        }
    }
}

/// The program of a server: that of its registration, else that of its image.
pub(super) fn program(config: &McpConfig, image: ImageProgram) -> Result<ServeCall> {
    let command = match (&config.command, &config.args) {
        (command, _) if !command.is_empty() => command.clone(),
        (_, args) if !args.is_empty() => [image.entrypoint, args.clone()].concat(),
        _ => [image.entrypoint, image.arguments].concat(),
    };
    if command.is_empty() {
        return Err(McpError::NoProgram);
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
    /// The task that writes its input. None when it gets no input.
    _writer: Option<AbortOnDropHandle<()>>,
}

impl Process {
    /// Starts a process whose input is the output of a bridge.
    pub(super) async fn start(
        channel: &GuestClient,
        program: &ServeCall,
        mut outgoing: Outgoing,
    ) -> Result<Self, CallError> {
        let call = channel.start(&GuestCall::Serve(program.clone())).await?;
        let input = call.input();
        let writer = async move {
            while let Some(batch) = outgoing.next(BATCH_BYTES).await {
                if input.send(&batch).await.is_err() {
                    return;
                }
            }
            // Many servers exit at the end of their input.
            let _ = input.end().await;
        };
        let writer = AbortOnDropHandle::new(tokio::spawn(writer.in_current_span()));
        Ok(Self { call, _writer: Some(writer) })
    }

    /// Starts a process that gets no input.
    pub(super) async fn start_without_input(
        channel: &GuestClient,
        program: &ServeCall,
    ) -> Result<Self, CallError> {
        let call = channel.start(&GuestCall::Serve(program.clone())).await?;
        Ok(Self { call, _writer: None })
    }

    /// Passes its output to the bridge, and to the journal, until it ends. Without a bridge, all output goes to the journal.
    pub(super) async fn follow(mut self, server: &Arc<HostedServer>, bridge: Option<&Bridge>) -> ProcessEnd {
        loop {
            match self.call.next().await {
                Ok(Event::Stdout(bytes)) => match bridge {
                    Some(bridge) => bridge.receive(&bytes),
                    None => server.journal.write(&bytes),
                },
                Ok(Event::Stderr(bytes)) => server.journal.write(&bytes),
                Ok(Event::Answer(answer)) => {
                    return match serde_json::from_slice(&answer) {
                        Ok(answer) => ProcessEnd::Exited(answer),
                        Err(error) => ProcessEnd::SandboxLost(error.to_string()),
                    };
                }
                Err(CallError::Failed(error)) if error.code == ErrorCode::Cancelled => {
                    return ProcessEnd::Exited(ServeAnswer::default());
                }
                Err(CallError::Failed(error)) => return ProcessEnd::NotStarted(error.message),
                Err(error) => return ProcessEnd::SandboxLost(error.to_string()),
            }
        }
    }
}

/// Ends all processes of a sandbox: SIGTERM, the grace period, SIGKILL. Returns false when the agent does not answer.
pub(super) async fn end_all(channel: &GuestClient, grace: Duration) -> bool {
    let ended = async {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let call = channel.start(&GuestCall::Shutdown(ShutdownCall { grace_ms })).await.ok()?;
        call.answer::<serde_json::Value>().await.ok()
    };
    tokio::time::timeout(grace + SHUTDOWN_MARGIN, ended).await.ok().flatten().is_some()
}
