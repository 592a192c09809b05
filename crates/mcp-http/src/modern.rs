//! The modern era of the protocol: no sessions, each request describes itself, and closing its connection cancels it.
//!
//! The headers of a request must agree with its body. That is checked here, as are its version and the methods that this era
//! removed. The server answers everything else.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use emergent_mcp_protocol::envelope::{Message, MessageKind, error_code, error_line, error_with_data};
use emergent_mcp_protocol::{codes, headers as names, meta, methods, version};
use http::{HeaderMap, Response, StatusCode};
use serde_json::json;

use crate::headers::text;
use crate::peer::{Caller, Item, Peer, PeerError, Server};
use crate::refusal::Refusal;
use crate::reply::{self, ResponseBody};
use crate::session::LOST;

/// Methods of the legacy era that a server for both eras would answer.
const REMOVED: [&str; 5] = [
    methods::INITIALIZE,
    methods::PING,
    methods::LOGGING_SET_LEVEL,
    methods::RESOURCES_SUBSCRIBE,
    methods::RESOURCES_UNSUBSCRIBE,
];

/// Answers a message.
pub(crate) async fn post<C: Caller>(
    server: &dyn Server<C>,
    caller: &C,
    headers: &HeaderMap,
    message: &Message<'_>,
) -> Result<Response<ResponseBody>, Refusal> {
    if message.kind != MessageKind::Request {
        // A client cancels by closing the connection, and servers send no requests.
        return Ok(reply::empty(StatusCode::ACCEPTED));
    }
    let id = message.raw_id();
    if let Err(Invalid(code, text)) = check(headers, message) {
        return Ok(reply::error(StatusCode::BAD_REQUEST, id, code, &text));
    }
    let requested = message.meta().and_then(|own| own.string(meta::PROTOCOL_VERSION)).unwrap_or_default();
    let peer = match server.stateless().await {
        Ok(Some(peer)) => peer,
        Ok(None) => return Ok(unsupported(id, &requested, &version::LEGACY)),
        Err(PeerError::Unavailable(text)) => return Err(Refusal::Unavailable(text)),
        Err(PeerError::Failed(cause)) => return Err(Refusal::Failed(cause)),
        Err(error) => return Ok(failed(id, &error)),
    };
    if requested != version::MODERN {
        return Ok(unsupported(id, &requested, &version::ALL));
    }
    let method = message.method.as_deref().unwrap_or_default();
    if REMOVED.contains(&method) {
        return Ok(reply::error(StatusCode::NOT_FOUND, id, codes::METHOD_NOT_FOUND, method));
    }
    Ok(answer(&peer, caller, message).await)
}

/// Sends an answer that comes first as JSON, with its status. Everything else begins a stream of events: a message before the
/// answer, and a silence that proxies would end.
async fn answer<C: Caller>(
    peer: &Arc<dyn Peer<C>>,
    caller: &C,
    message: &Message<'_>,
) -> Response<ResponseBody> {
    let id = message.raw_id();
    let mut exchange = match peer.request(message, caller).await {
        Ok(exchange) => exchange,
        Err(error) => return failed(id, &error),
    };
    let first = match tokio::time::timeout(reply::KEEP_ALIVE, exchange.next()).await {
        Ok(Some(Item::Answer(line))) => return reply::json(status_of(&line), line),
        Ok(Some(Item::Cancelled)) => return reply::empty(StatusCode::ACCEPTED),
        Ok(None) => return reply::error(StatusCode::OK, id, codes::SERVER_GONE, LOST),
        Ok(Some(first)) => Some(first),
        Err(_) => None,
    };
    let lost = error_line(id.unwrap_or("null"), codes::SERVER_GONE, LOST);
    reply::exchange_events(first, exchange, lost)
}

/// A request whose parts contradict each other or are missing: code and text of the error.
#[derive(Debug, PartialEq, Eq)]
struct Invalid(i64, String);

/// Checks that headers and body agree and are complete.
fn check(headers: &HeaderMap, message: &Message<'_>) -> Result<(), Invalid> {
    let mismatch = |text: String| Invalid(codes::HEADER_MISMATCH, text);
    let own = message.meta();
    let version = own.as_ref().and_then(|own| own.string(meta::PROTOCOL_VERSION));
    let header = text(headers, names::PROTOCOL_VERSION);
    if let Some(version) = &version
        && header != Some(version)
    {
        let header = header.unwrap_or("missing");
        let text = format!("the header MCP-Protocol-Version ({header}) and _meta ({version}) do not agree");
        return Err(mismatch(text));
    }
    let method = message.method.as_deref().unwrap_or_default();
    check_header(headers, names::METHOD, method).map_err(mismatch)?;
    let named = match method {
        methods::TOOLS_CALL | methods::PROMPTS_GET => Some("name"),
        methods::RESOURCES_READ => Some("uri"),
        methods::TASKS_GET | methods::TASKS_UPDATE | methods::TASKS_CANCEL => Some("taskId"),
        _ => None,
    };
    let name = named.and_then(|member| serde_json::from_str::<String>(message.param(member)?).ok());
    if let Some(name) = name {
        check_header(headers, names::NAME, &name).map_err(mismatch)?;
    }
    let capabilities = own.as_ref().and_then(|own| own.get(meta::CLIENT_CAPABILITIES));
    if version.is_none() || !capabilities.is_some_and(|raw| raw.starts_with('{')) {
        let (version, capabilities) = (meta::PROTOCOL_VERSION, meta::CLIENT_CAPABILITIES);
        let text = format!("params._meta must have {version} and {capabilities}");
        return Err(Invalid(codes::INVALID_PARAMS, text));
    }
    Ok(())
}

/// Checks that a header is there once and has this value.
fn check_header(headers: &HeaderMap, name: &str, wanted: &str) -> Result<(), String> {
    let mut all = headers.get_all(name).iter();
    let (Some(value), None) = (all.next(), all.next()) else {
        return Err(format!("the header {name} must be there once"));
    };
    let Some(value) = std::str::from_utf8(value.as_bytes()).ok().map(str::trim) else {
        return Err(format!("the header {name} is not UTF-8"));
    };
    if value == wanted || decoded(value).as_deref() == Some(wanted) {
        return Ok(());
    }
    Err(format!("the header {name} ({value}) and the body do not agree"))
}

/// The value of a header that is written as `=?base64?…?=`, the form for characters that no header can hold.
fn decoded(value: &str) -> Option<String> {
    let encoded = value.strip_prefix("=?base64?")?.strip_suffix("?=")?;
    String::from_utf8(STANDARD.decode(encoded).ok()?).ok()
}

fn failed(id: Option<&str>, error: &PeerError) -> Response<ResponseBody> {
    let (status, code) = error.status_and_code();
    reply::error(status, id, code, &error.to_string())
}

fn unsupported(id: Option<&str>, requested: &str, supported: &[&str]) -> Response<ResponseBody> {
    let data = json!({ "supported": supported, "requested": requested });
    let text = "Unsupported protocol version";
    let line = error_with_data(id.unwrap_or("null"), codes::UNSUPPORTED_VERSION, text, &data);
    reply::json(StatusCode::BAD_REQUEST, line)
}

/// The HTTP status of an answer.
fn status_of(line: &str) -> StatusCode {
    match error_code(line) {
        Some(codes::METHOD_NOT_FOUND) => StatusCode::NOT_FOUND,
        Some(codes::HEADER_MISMATCH | codes::MISSING_CAPABILITY | codes::UNSUPPORTED_VERSION) => {
            StatusCode::BAD_REQUEST
        }
        _ => StatusCode::OK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_is(value: &str, wanted: &str) -> bool {
        let headers = HeaderMap::from_iter([(names::NAME.parse().unwrap(), value.parse().unwrap())]);
        check_header(&headers, names::NAME, wanted).is_ok()
    }

    #[test]
    fn a_header_agrees_as_it_is_or_in_base64() {
        assert!(name_is("bash", "bash") && name_is(" bash ", "bash"));
        assert!(name_is("=?base64?YmFzaA==?=", "bash") && name_is("=?base64?w6k=?=", "é"));
        for value in ["Bash", "", "=?base64?YmFzaA==", "=?base64?###?=", "=?base64?Zm9v?="] {
            assert!(!name_is(value, "bash"), "{value}");
        }
        // A name that looks encoded is compared as it is, too.
        assert!(name_is("=?base64?YmFzaA==?=", "=?base64?YmFzaA==?="));
    }

    #[test]
    fn a_header_that_is_missing_or_repeated_is_refused() {
        let mut headers = HeaderMap::new();
        assert!(check_header(&headers, names::METHOD, "ping").is_err());
        headers.append(names::METHOD, "ping".parse().unwrap());
        assert!(check_header(&headers, names::METHOD, "ping").is_ok());
        headers.append(names::METHOD, "ping".parse().unwrap());
        assert!(check_header(&headers, names::METHOD, "ping").is_err());
    }
}
