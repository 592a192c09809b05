//! What clients ask a hosted server, one call at a time.

use std::sync::Arc;
use std::time::Duration;

use emergent_mcp_bridge::envelope::{Members, Message, codes};
use emergent_mcp_bridge::{Bridge, BridgeError, Item};
use emergent_wire::{ErrorCode, ErrorDetail};
use serde_json::value::RawValue;

use super::McpHost;
use super::hosted::Hosted;

/// A call to a server that is being started waits so long for it.
pub(super) const WAIT_FOR_START: Duration = Duration::from_secs(20);

/// What a server answered, as it said it.
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
            if let Item::Answer(line) = item {
                return self.read_answer(&line);
            }
        }
        Err(ErrorDetail::new(ErrorCode::SandboxLost, "the MCP server ended before it answered"))
    }

    fn read_answer(&self, line: &str) -> Result<RawAnswer, ErrorDetail> {
        let members = Members::of(line);
        let raw = |name: &str| {
            let text = members.as_ref().and_then(|members| members.get(name));
            text.and_then(|text| RawValue::from_string(text.to_owned()).ok())
        };
        let error = raw("error");
        // What the bridge itself had to say.
        let own = error.as_ref().and_then(|error| Members::of(error.get()));
        let code = own.as_ref().and_then(|own| own.get("code")?.parse::<i64>().ok());
        let message = || own.as_ref().and_then(|own| own.text("message")).unwrap_or_default();
        match code {
            Some(codes::TIMED_OUT) if message().starts_with("the MCP server has not answered") => {
                self.doubted.notify_one();
                Err(ErrorDetail::new(ErrorCode::DeadlineExceeded, message()))
            }
            Some(codes::SERVER_GONE) if message().starts_with("the MCP server") => {
                Err(ErrorDetail::new(ErrorCode::SandboxLost, message()))
            }
            _ => Ok(RawAnswer { result: raw("result"), error }),
        }
    }
}

/// Why a request did not get to the server.
pub(crate) fn refused(error: &BridgeError) -> ErrorDetail {
    let code = match error {
        BridgeError::Down(_) | BridgeError::Refused(_) => ErrorCode::Unavailable,
        BridgeError::Busy => ErrorCode::LimitReached,
        BridgeError::DoubleId => ErrorCode::Conflict,
        BridgeError::TimedOut(_) => ErrorCode::DeadlineExceeded,
    };
    ErrorDetail::new(code, error.to_string())
}
