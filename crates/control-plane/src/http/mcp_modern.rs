//! The modern era of MCP: no sessions, every request says everything about itself, and closing its connection cancels it.
//!
//! What a request says of itself in headers must be what its body says. That is checked here, as are its version and the
//! methods that this era no longer has; everything else is the server's to answer.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use emergent_mcp_bridge::Item;
use emergent_mcp_bridge::envelope::{Kind, Members, Message, codes, error_code};
use serde_json::json;

use super::App;
use super::error::ApiError;
use super::mcp_endpoint::{LEGACY, VERSION_HEADER, doubt_if_late, refused};
use super::mcp_reply as reply;
use crate::mcp::{Hosted, MODERN};

const VERSION_META: &str = "io.modelcontextprotocol/protocolVersion";
const CAPABILITIES_META: &str = "io.modelcontextprotocol/clientCapabilities";
/// Headers and body disagree.
const HEADER_MISMATCH: i64 = -32020;
/// The client lacks something that the server needs.
const MISSING_CAPABILITY: i64 = -32021;
/// A version that is not spoken.
const UNSUPPORTED_VERSION: i64 = -32022;
const INVALID_PARAMS: i64 = -32602;
/// Methods of the legacy era, which a server that speaks both would answer.
const REMOVED: [&str; 5] =
    ["initialize", "ping", "logging/setLevel", "resources/subscribe", "resources/unsubscribe"];
/// A subscription lasts as long as its connection.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Whether a request's header says that it is of this era.
pub(super) fn header_is_modern(headers: &HeaderMap) -> bool {
    text(headers, VERSION_HEADER).is_some_and(|version| version >= MODERN)
}

/// Whether a message is of this era.
pub(super) fn is_modern(headers: &HeaderMap, message: &Message<'_>) -> bool {
    header_is_modern(headers) || meta(message).is_some_and(|meta| meta.get(VERSION_META).is_some())
}

/// Why a request is refused.
struct Refusal(StatusCode, i64, String);

/// Answers a message.
pub(super) async fn post(
    app: &App,
    hosted: &Arc<Hosted>,
    headers: &HeaderMap,
    message: &Message<'_>,
) -> Response {
    if message.kind != Kind::Request {
        // Cancelling is closing the connection, and servers ask nothing.
        return reply::accepted();
    }
    let id = message.raw_id();
    if let Err(Refusal(status, code, text)) = check(headers, message) {
        return reply::error(status, id, code, &text);
    }
    let version = meta(message).and_then(|meta| meta.text(VERSION_META)).unwrap_or_default();
    let modern = match app.mcp.modern(hosted).await {
        Ok(modern) => modern,
        Err(error) => return ApiError(error).into_response(),
    };
    let Some(bridge) = modern.bridge() else {
        return unsupported(id, &version, &LEGACY);
    };
    if version != MODERN {
        return unsupported(id, &version, &[MODERN]);
    }
    let method = message.method.as_deref().unwrap_or_default();
    if REMOVED.contains(&method) {
        return reply::error(StatusCode::NOT_FOUND, id, codes::METHOD_NOT_FOUND, method);
    }
    let within = if method == "subscriptions/listen" { FOR_EVER } else { hosted.timeout() };
    let mut exchange = match bridge.request(bridge.visitor(), message, within).await {
        Ok(exchange) => exchange,
        Err(error) => return refused(id, &error),
    };
    match exchange.next().await {
        Some(Item::Answer(line)) => {
            doubt_if_late(hosted, &line);
            reply::json(status_of(&line), line)
        }
        Some(Item::Cancelled) => reply::accepted(),
        Some(first) => reply::exchange_events(first, exchange),
        None => {
            reply::error(StatusCode::OK, id, codes::SERVER_GONE, "the MCP server ended before it answered")
        }
    }
}

/// Whether headers and body say the same, and enough.
fn check(headers: &HeaderMap, message: &Message<'_>) -> Result<(), Refusal> {
    let mismatch = |text: String| Err(Refusal(StatusCode::BAD_REQUEST, HEADER_MISMATCH, text));
    let meta = meta(message);
    let version = meta.as_ref().and_then(|meta| meta.text(VERSION_META));
    let header = text(headers, VERSION_HEADER);
    if let Some(version) = &version
        && header != Some(version)
    {
        let header = header.unwrap_or("missing");
        return mismatch(format!(
            "the header MCP-Protocol-Version ({header}) and _meta ({version}) do not agree"
        ));
    }
    let method = message.method.as_deref().unwrap_or_default();
    same(headers, "mcp-method", method).or_else(mismatch)?;
    let named = match method {
        "tools/call" | "prompts/get" => "name",
        "resources/read" => "uri",
        "tasks/get" | "tasks/update" | "tasks/cancel" => "taskId",
        _ => "",
    };
    let name = message.param(named).and_then(|raw| serde_json::from_str::<String>(raw).ok());
    if let Some(name) = name.filter(|_| !named.is_empty()) {
        same(headers, "mcp-name", &name).or_else(mismatch)?;
    }
    let has_capabilities =
        meta.as_ref().and_then(|meta| meta.get(CAPABILITIES_META)).is_some_and(|raw| raw.starts_with('{'));
    if version.is_none() || !has_capabilities {
        let text = format!("params._meta must have {VERSION_META} and {CAPABILITIES_META}");
        return Err(Refusal(StatusCode::BAD_REQUEST, INVALID_PARAMS, text));
    }
    Ok(())
}

/// Whether a header is there once and says this.
fn same(headers: &HeaderMap, name: &str, wanted: &str) -> Result<(), String> {
    let mut all = headers.get_all(name).iter();
    let (first, more) = (all.next(), all.next());
    let Some(first) =
        first.and_then(|value| std::str::from_utf8(value.as_bytes()).ok()).filter(|_| more.is_none())
    else {
        return Err(format!("the header {name} must be there once"));
    };
    if first.trim() == wanted {
        return Ok(());
    }
    Err(format!("the header {name} ({}) and the body do not agree", first.trim()))
}

fn unsupported(id: Option<&str>, requested: &str, supported: &[&str]) -> Response {
    let data = json!({ "supported": supported, "requested": requested });
    let id = id.unwrap_or("null");
    let line = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{{\"code\":{UNSUPPORTED_VERSION},\
         \"message\":\"Unsupported protocol version\",\"data\":{data}}}}}"
    );
    reply::json(StatusCode::BAD_REQUEST, line)
}

/// The HTTP status of an answer.
fn status_of(line: &str) -> StatusCode {
    match error_code(line) {
        Some(codes::METHOD_NOT_FOUND) => StatusCode::NOT_FOUND,
        Some(HEADER_MISMATCH | MISSING_CAPABILITY | UNSUPPORTED_VERSION) => StatusCode::BAD_REQUEST,
        _ => StatusCode::OK,
    }
}

fn meta<'a>(message: &Message<'a>) -> Option<Members<'a>> {
    Members::of(message.param("_meta")?)
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim)
}
