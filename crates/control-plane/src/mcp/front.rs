//! Single calls to a hosted server, without a session.

use std::sync::Arc;
use std::time::Duration;

use emergent_mcp_bridge::{Bridge, BridgeError, Item};
use emergent_mcp_protocol::envelope::{Members, Message};
use emergent_wire::{ErrorCode, ErrorDetail};
use serde_json::value::RawValue;
use tokio::sync::Notify;

use super::McpHost;
use super::hosted::Hosted;

/// The time that a call waits for a server that is being started.
pub(super) const WAIT_FOR_START: Duration = Duration::from_secs(20);

/// The answer of a server, as the server wrote it.
pub(crate) struct RawAnswer {
    pub(crate) result: Option<Box<RawValue>>,
    pub(crate) error: Option<Box<RawValue>>,
}

impl McpHost {
    /// Calls a method of a server on stdio.
    pub(crate) async fn call(
        &self,
        hosted: &Arc<Hosted>,
        method: &str,
        params: Option<&RawValue>,
        within: Option<Duration>,
    ) -> Result<RawAnswer, ErrorDetail> {
        let within = within.unwrap_or_else(|| hosted.timeout());
        if !hosted.config.stdio_bridge {
            let message = "this server speaks HTTP by itself: use its endpoint …/mcp";
            return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
        }
        if hosted.is_per_session() {
            // Every session has a process of its own, and so has a call that belongs to none.
            let (bridge, _process) = self.side_for_call(hosted).await?;
            return hosted.call_on(&bridge, method, params, within).await;
        }
        hosted.call_on(&hosted.bridge, method, params, within).await
    }
}

impl Hosted {
    /// Calls a method through a bridge.
    async fn call_on(
        &self,
        bridge: &Bridge,
        method: &str,
        params: Option<&RawValue>,
        within: Duration,
    ) -> Result<RawAnswer, ErrorDetail> {
        bridge.ready(within.min(WAIT_FOR_START)).await.map_err(|error| refused(&error))?;
        let method = serde_json::Value::from(method);
        let params = params.map(|params| format!(",\"params\":{}", params.get())).unwrap_or_default();
        let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":{method}{params}}}");
        let message = Message::parse(&text)
            .map_err(|error| ErrorDetail::new(ErrorCode::BadRequest, error.to_string()))?;
        let mut exchange =
            bridge.request(bridge.visitor(), &message, within).await.map_err(|error| refused(&error))?;
        while let Some(item) = exchange.next().await {
            match item {
                Item::Answer(line) => return Ok(read_answer(&line)),
                Item::Failed { error: BridgeError::AnswerTooLong(_), line } => return Ok(read_answer(&line)),
                Item::Failed { error, .. } => {
                    note_failure(&self.doubted, &error);
                    return Err(failed(&error));
                }
                Item::Message(_) | Item::Progress(_) | Item::Cancelled => {}
            }
        }
        Err(ErrorDetail::new(ErrorCode::SandboxLost, "the MCP server ended before it answered"))
    }
}

/// Has the supervisor check whether the process answers at all, after a call that had no answer in time.
pub(super) fn note_failure(doubted: &Notify, error: &BridgeError) {
    if matches!(error, BridgeError::TimedOut(_)) {
        doubted.notify_one();
    }
}

fn read_answer(line: &str) -> RawAnswer {
    let members = Members::of(line);
    let raw = |name: &str| {
        let text = members.as_ref().and_then(|members| members.get(name));
        text.and_then(|text| RawValue::from_string(text.to_owned()).ok())
    };
    RawAnswer { result: raw("result"), error: raw("error") }
}

/// The error of a call that reached the server and has no answer of it.
fn failed(error: &BridgeError) -> ErrorDetail {
    let code = match error {
        // The call may have had effects.
        BridgeError::Down(_) => ErrorCode::SandboxLost,
        _ => return refused(error),
    };
    ErrorDetail::new(code, error.to_string())
}

/// The error of a call that did not reach the server.
pub(crate) fn refused(error: &BridgeError) -> ErrorDetail {
    let code = match error {
        BridgeError::Down(_) | BridgeError::Refused(_) => ErrorCode::Unavailable,
        BridgeError::Busy => ErrorCode::LimitReached,
        BridgeError::DuplicateId => ErrorCode::Conflict,
        BridgeError::TimedOut(_) => ErrorCode::DeadlineExceeded,
        BridgeError::AnswerTooLong(_) => ErrorCode::ProviderFailed,
    };
    ErrorDetail::new(code, error.to_string())
}
