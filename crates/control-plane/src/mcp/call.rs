//! Single calls to a hosted server, without a session.

use std::sync::Arc;
use std::time::Duration;

use emergent_mcp_bridge::{Bridge, BridgeError, Item};
use emergent_mcp_protocol::envelope::{Members, Message};
use serde_json::value::RawValue;
use tokio::sync::Notify;

use super::McpHost;
use super::error::{McpError, Result};
use super::hosted::{HostedServer, Transport};

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
        server: &Arc<HostedServer>,
        method: &str,
        params: Option<&RawValue>,
        time_limit: Option<Duration>,
    ) -> Result<RawAnswer> {
        let time_limit = time_limit.unwrap_or_else(|| server.timeout());
        if server.transport != Transport::Stdio {
            return Err(McpError::SpeaksHttp(server.id));
        }
        if server.is_per_session() {
            // Each session has a process of its own, and so has each call without a session.
            let (bridge, _process) = self.start_for_call(server).await?;
            return server.call_on(&bridge, method, params, time_limit).await;
        }
        server.call_on(&server.bridge, method, params, time_limit).await
    }
}

impl HostedServer {
    /// Calls a method through a bridge.
    async fn call_on(
        &self,
        bridge: &Bridge,
        method: &str,
        params: Option<&RawValue>,
        time_limit: Duration,
    ) -> Result<RawAnswer> {
        bridge.ready(time_limit.min(WAIT_FOR_START)).await.map_err(McpError::NotSent)?;
        let method = serde_json::Value::from(method);
        let params = params.map(|params| format!(",\"params\":{}", params.get())).unwrap_or_default();
        let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":{method}{params}}}");
        let message = Message::parse(&text)?;
        let sent = bridge.request(bridge.visitor(), &message, time_limit).await;
        let mut exchange = sent.map_err(McpError::NotSent)?;
        tracing::debug!("the MCP server has the request");
        while let Some(item) = exchange.next().await {
            match item {
                Item::Answer(line) => return Ok(read_answer(&line)),
                Item::Failed { error: BridgeError::AnswerTooLong(_), line } => return Ok(read_answer(&line)),
                Item::Failed { error, .. } => {
                    request_check_after_timeout(&self.check_requested, &error);
                    return Err(McpError::NotAnswered(error));
                }
                Item::Message(_) | Item::Progress(_) | Item::Cancelled => {}
            }
        }
        Err(McpError::EndedBeforeAnswer)
    }
}

/// Has the supervisor check whether the process answers at all, after a call without an answer.
pub(super) fn request_check_after_timeout(check_requested: &Notify, error: &BridgeError) {
    if matches!(error, BridgeError::TimedOut(_)) {
        check_requested.notify_one();
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
