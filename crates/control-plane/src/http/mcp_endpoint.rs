//! The address of a hosted MCP server for MCP clients (Streamable HTTP).

use std::sync::Arc;

use async_trait::async_trait;
use axum::extract::{Extension, Path, Request, State};
use axum::response::{IntoResponse, Response};
use emergent_mcp_http::{Initialized, Peer, PeerError, Server};
use emergent_mcp_protocol::envelope::Message;
use emergent_wire::error::ErrorBody;
use serde_json::{Value, json};

use super::error::ApiError;
use super::route::{AuditPolicy, RouteRule, Target};
use super::summary::SummarySlot;
use super::{App, mcp_front, mcp_proxy};
use crate::caller::Caller;
use crate::mcp::{StdioServer, Transport};

/// All methods.
pub(super) const MESSAGE: RouteRule =
    RouteRule::admin("mcp.message").on(Target::McpServer).for_bound_tokens().audited(AuditPolicy::Soon);

/// Send a message to an MCP server (Streamable HTTP).
///
/// For MCP clients: point them at this address, with `Authorization: Bearer …`.
#[utoipa::path(post, path = "/api/v1/mcp/servers/{id}/mcp", tag = "mcp",
    params(("id" = String, Path, description = "Id or name")), request_body = Object,
    responses((status = 200, description = "A JSON-RPC message, or events with several"), (status = 202),
        (status = "4XX", body = ErrorBody)))]
pub(super) async fn post(
    app: State<App>,
    id: Path<String>,
    caller: Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    handle(app, id, caller, request).await
}

/// Receive the messages that an MCP server sends by itself, or the rest of a stream whose connection was lost.
#[utoipa::path(get, path = "/api/v1/mcp/servers/{id}/mcp", tag = "mcp",
    params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, description = "Events", content_type = "text/event-stream"), (status = "4XX", body = ErrorBody)))]
pub(super) async fn listen(
    app: State<App>,
    id: Path<String>,
    caller: Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    handle(app, id, caller, request).await
}

/// End a client's session.
#[utoipa::path(delete, path = "/api/v1/mcp/servers/{id}/mcp", tag = "mcp",
    params(("id" = String, Path, description = "Id or name")),
    responses((status = 204), (status = "4XX", body = ErrorBody)))]
pub(super) async fn end(
    app: State<App>,
    id: Path<String>,
    caller: Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    handle(app, id, caller, request).await
}

async fn handle(
    State(app): State<App>,
    Path(id): Path<String>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    mcp_front::check_origin(&app, request.headers())?;
    let id = app.mcp.id_of(&id).await?;
    let server = app.mcp.supervised(id).await?;
    if let Transport::Http { port, path } = &server.transport {
        return Ok(mcp_proxy::forward(&app.mcp, &server, *port, path, request).await?.into_response());
    }
    let summary = request.extensions().get::<SummarySlot>().cloned();
    let stdio = Summarized { server: StdioServer { host: &app.mcp, server: &server }, summary };
    Ok(mcp_front::answer(server.endpoint.handle(&stdio, &caller, request).await))
}

/// A server whose messages are summarised for the audit log.
struct Summarized<'a> {
    server: StdioServer<'a>,
    summary: Option<SummarySlot>,
}

#[async_trait]
impl Server<Caller> for Summarized<'_> {
    fn on_message(&self, message: &Message<'_>) {
        if let Some(slot) = &self.summary {
            slot.set(summary_of(message));
        }
    }

    async fn initialize(
        &self,
        message: &Message<'_>,
        caller: &Caller,
    ) -> Result<Initialized<Caller>, PeerError> {
        self.server.initialize(message, caller).await
    }

    async fn stateless(&self) -> Result<Option<Arc<dyn Peer<Caller>>>, PeerError> {
        self.server.stateless().await
    }
}

/// The method and the name of the tool, without its arguments.
fn summary_of(message: &Message<'_>) -> Value {
    let short = |text: String| text.chars().take(100).collect::<String>();
    let name = message.param("name").and_then(|raw| serde_json::from_str(raw).ok()).map(short);
    json!({ "method": message.method.clone().map(short), "name": name })
}
