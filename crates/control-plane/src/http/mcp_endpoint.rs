//! MCP's Streamable HTTP in front of hosted servers, for clients of both eras.
//!
//! Here is the legacy era: sessions that begin with `initialize`. The modern one is in `mcp_modern`. A request whose answer
//! is the first thing that comes back is answered as JSON; anything before it makes the answer a stream of events, which
//! goes on without its client, and can be gone on with.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use emergent_mcp_bridge::envelope::{Kind, Members, Message, codes, error_code};
use emergent_mcp_bridge::{BridgeError, Exchange, Item};
use emergent_wire::ErrorCode;
use emergent_wire::error::ErrorBody;
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::mcp_modern;
use super::mcp_proxy;
use super::mcp_reply::{self as reply, SESSION_HEADER};
use super::route::{AuditPolicy, RouteRule, Target};
use super::summary::SummarySlot;
use crate::mcp::session::{STANDALONE, Session};
use crate::mcp::{Hosted, MODERN};

/// The version that is spoken.
pub(super) const VERSION_HEADER: &str = "mcp-protocol-version";
/// The versions with `initialize`, oldest first.
pub(super) const LEGACY: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];
/// From this version on clients know events without a message.
const PRIMES_FROM: &str = "2025-11-25";

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
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Refusal> {
    let (hosted, request) = admit(&app, &id, request).await?;
    let headers = request.headers().clone();
    let summary = request.extensions().get::<SummarySlot>().cloned();
    check_types(&headers)?;
    let body = Bytes::from_request(request, &()).await.map_err(|rejection| {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            let text = "the message is larger than this address takes";
            return Refusal::from(ApiError::new(ErrorCode::TooLarge, text));
        }
        Refusal::with(rejection)
    })?;
    let message = parse(&body)?;
    if let Some(slot) = summary {
        slot.set(summary_of(&message));
    }
    if mcp_modern::is_modern(&headers, &message) {
        return Ok(mcp_modern::post(&app, &hosted, &headers, &message).await);
    }
    if message.kind == Kind::Request && message.method.as_deref() == Some("initialize") {
        return Ok(initialize(&app, &hosted, &message).await);
    }
    let session = session_of(&hosted, &headers)?;
    Ok(match message.kind {
        Kind::Notification => {
            // Who notifies a server that is away does not wait for it.
            let _ = session.bridge.notify(session.client, &message).await;
            reply::accepted()
        }
        Kind::Response => {
            let _ = session.bridge.answer(&message).await;
            reply::accepted()
        }
        Kind::Request => request_in(&hosted, &session, &headers, &message).await,
    })
}

fn parse(body: &[u8]) -> Result<Message<'_>, Refusal> {
    let bad = |code, text: &str| Refusal::with(reply::error(StatusCode::BAD_REQUEST, None, code, text));
    let text = std::str::from_utf8(body).map_err(|_| bad(codes::PARSE_ERROR, "the message is not UTF-8"))?;
    Message::parse(text).map_err(|error| bad(error.code(), &error.to_string()))
}

/// Listen to what an MCP server says unasked, or go on with what a lost connection had begun.
#[utoipa::path(get, path = "/api/v1/mcp/servers/{id}/mcp", tag = "mcp",
    params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, description = "Events", content_type = "text/event-stream"), (status = "4XX", body = ErrorBody)))]
pub(super) async fn listen(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Refusal> {
    let (hosted, request) = admit(&app, &id, request).await?;
    let headers = request.headers();
    refuse_modern(headers)?;
    if !accepts(headers, "text/event-stream") {
        return Err(refuse(ErrorCode::NotAcceptable, "this address gives text/event-stream"));
    }
    let session = session_of(&hosted, headers)?;
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()).and_then(|id| {
        let (stream, event) = id.split_once('-')?;
        Some((stream.parse::<u64>().ok()?, event.parse::<u64>().ok()?))
    });
    let found = match last {
        Some((number, event)) => session.stream(number).map(|log| (number, log, Some(event))),
        None => session.stream(STANDALONE).map(|log| (STANDALONE, log, None)),
    };
    let (number, log, after) =
        found.ok_or_else(|| refuse(ErrorCode::NotFound, "what this event belonged to is no longer kept"))?;
    let primed = after.is_none() && version_of(headers) >= PRIMES_FROM;
    Ok(reply::session_events(session, number, log, after, primed))
}

/// End a client's session.
#[utoipa::path(delete, path = "/api/v1/mcp/servers/{id}/mcp", tag = "mcp",
    params(("id" = String, Path, description = "Id or name")),
    responses((status = 204), (status = "4XX", body = ErrorBody)))]
pub(super) async fn end(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Refusal> {
    let (hosted, request) = admit(&app, &id, request).await?;
    let headers = request.headers();
    refuse_modern(headers)?;
    match headers.get(SESSION_HEADER).and_then(|id| id.to_str().ok()) {
        None => Err(refuse(ErrorCode::BadRequest, "the header Mcp-Session-Id is missing")),
        Some(id) if hosted.sessions.end(id) => Ok(StatusCode::NO_CONTENT.into_response()),
        Some(_) => Err(refuse(ErrorCode::NotFound, "there is no such session")),
    }
}

/// The server that an address names, if this request may use it and is not answered by the server itself.
async fn admit(app: &App, id: &str, request: Request) -> Result<(Arc<Hosted>, Request), Refusal> {
    if !origin_is_allowed(request.headers(), &app.workspaces.context.settings.mcp.allowed_origins) {
        let message =
            "pages of this origin may not use MCP servers: allow it in the settings (mcp.allowed_origins)";
        return Err(ApiError::new(ErrorCode::Forbidden, message).into());
    }
    let id = app.mcp.id_of(id).await.map_err(ApiError)?;
    let hosted = app.mcp.hosted(id).await.map_err(ApiError)?;
    if hosted.config.stdio_bridge {
        return Ok((hosted, request));
    }
    let forwarded = mcp_proxy::forward(&app.mcp, &hosted, request).await;
    Err(Refusal::with(forwarded.map_err(ApiError)))
}

/// Requests of programs have no origin. Those of pages are let in from this machine, and from where the settings say: a
/// page could otherwise have the browser's user send it.
pub(super) fn origin_is_allowed(headers: &HeaderMap, allowed: &[String]) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return true;
    };
    let Ok(origin) = origin.to_str() else {
        return false;
    };
    let host = origin.split_once("://").map_or("", |(_, rest)| rest);
    let host = host.strip_prefix('[').map_or_else(
        || host.split(':').next().unwrap_or_default(),
        |rest| rest.split(']').next().unwrap_or_default(),
    );
    matches!(host, "localhost" | "127.0.0.1" | "::1")
        || allowed.iter().any(|allowed| allowed == "*" || allowed.trim_end_matches('/') == origin)
}

/// What the audit log keeps of a message: what is called, never with what.
fn summary_of(message: &Message<'_>) -> Value {
    let short = |text: String| text.chars().take(100).collect::<String>();
    let name = message.param("name").and_then(|raw| serde_json::from_str(raw).ok()).map(short);
    json!({ "method": message.method.clone().map(short), "name": name })
}

/// Begins a session.
async fn initialize(app: &App, hosted: &Arc<Hosted>, message: &Message<'_>) -> Response {
    let id = message.raw_id().unwrap_or("null");
    let down = |text: &str| reply::error(StatusCode::OK, Some(id), codes::SERVER_GONE, text);
    if let Err(error) = hosted.bridge.ready(hosted.timeout()).await {
        return down(&error.to_string());
    }
    let session = match app.mcp.open_session(hosted).await {
        Ok(session) => session,
        Err(error) if error.code == ErrorCode::LimitReached => return ApiError(error).into_response(),
        Err(error) => return down(&error.message),
    };
    let answer = if hosted.is_per_session() {
        let asked = session.bridge.request(session.client, message, hosted.timeout()).await;
        match asked {
            Ok(exchange) => answer_of(exchange).await,
            Err(error) => return down(&error.to_string()),
        }
    } else {
        shared_answer(hosted, message)
    };
    let Some(answer) = answer else {
        return down("the MCP server ended before it was initialized");
    };
    let is_error = Members::of(&answer).is_some_and(|answer| answer.get("error").is_some());
    let mut response = reply::json(StatusCode::OK, answer);
    if !is_error {
        hosted.sessions.add(&session);
        if let Ok(value) = HeaderValue::from_str(&session.id) {
            response.headers_mut().insert(SESSION_HEADER, value);
        }
    }
    response
}

/// The answer to a request, whatever comes before it.
async fn answer_of(mut exchange: Exchange) -> Option<String> {
    loop {
        match exchange.next().await? {
            Item::Answer(line) => return Some(line),
            Item::Cancelled => return None,
            Item::Message(_) | Item::Progress(_) => {}
        }
    }
}

/// What a server that many clients share has said of itself, for one more of them.
fn shared_answer(hosted: &Hosted, message: &Message<'_>) -> Option<String> {
    let initialized = hosted.bridge.initialized()?;
    let wanted = message.param("protocolVersion").and_then(|raw| serde_json::from_str::<String>(raw).ok());
    // What the server speaks can be called by the name of any version up to it.
    let version = wanted
        .filter(|wanted| LEGACY.contains(&wanted.as_str()) && *wanted <= initialized.protocol_version)
        .unwrap_or_else(|| initialized.protocol_version.clone());
    let version = serde_json::Value::from(version).to_string();
    let result = Members::of(initialized.result.get())?.with(&[("protocolVersion", &version)]);
    Some(emergent_mcp_bridge::envelope::result_line(message.raw_id()?, &result))
}

/// Asks something within a session.
async fn request_in(
    hosted: &Arc<Hosted>,
    session: &Arc<Session>,
    headers: &HeaderMap,
    message: &Message<'_>,
) -> Response {
    let id = message.raw_id();
    if let Err(error) = session.bridge.ready(hosted.timeout()).await {
        return reply::error(StatusCode::OK, id, codes::SERVER_GONE, &error.to_string());
    }
    let exchange = match session.bridge.request(session.client, message, hosted.timeout()).await {
        Ok(exchange) => exchange,
        Err(error) => return refused(id, &error),
    };
    let mut exchange = GoesOn(Some(exchange));
    let first = match exchange.0.as_mut() {
        Some(exchange) => exchange.next().await,
        None => None,
    };
    let Some((first, exchange)) = first.zip(exchange.0.take()) else {
        return reply::error(
            StatusCode::OK,
            id,
            codes::SERVER_GONE,
            "the MCP server ended before it answered",
        );
    };
    match first {
        Item::Answer(line) => {
            doubt_if_late(hosted, &line);
            reply::json(StatusCode::OK, line)
        }
        Item::Cancelled => reply::accepted(),
        first => {
            let (number, log) = session.pump(first, exchange);
            let primed = version_of(headers) >= PRIMES_FROM;
            reply::session_events(Arc::clone(session), number, log, Some(0), primed)
        }
    }
}

/// A call that had no answer in time is a reason to look whether the server answers at all.
pub(super) fn doubt_if_late(hosted: &Hosted, line: &str) {
    if error_code(line) == Some(codes::TIMED_OUT) {
        hosted.doubted.notify_one();
    }
}

/// Why a request did not get to the server.
pub(super) fn refused(id: Option<&str>, error: &BridgeError) -> Response {
    let (status, code) = match error {
        BridgeError::DoubleId => (StatusCode::BAD_REQUEST, codes::INVALID_REQUEST),
        BridgeError::Busy => (StatusCode::TOO_MANY_REQUESTS, codes::SERVER_GONE),
        _ => (StatusCode::OK, codes::SERVER_GONE),
    };
    reply::error(status, id, code, &error.to_string())
}

/// A request that goes on when its client is cut off: in this era that does not mean that it is cancelled.
struct GoesOn(Option<Exchange>);

impl Drop for GoesOn {
    fn drop(&mut self) {
        if let Some(mut exchange) = self.0.take() {
            tokio::spawn(async move { while exchange.next().await.is_some() {} });
        }
    }
}

/// The session that a request belongs to.
fn session_of(hosted: &Hosted, headers: &HeaderMap) -> Result<Arc<Session>, Refusal> {
    let version = headers.get(VERSION_HEADER).map(|version| version.to_str().unwrap_or_default());
    if let Some(version) = version
        && !LEGACY.contains(&version)
    {
        let text = format!("this protocol version is not known here: {} or {MODERN} are", LEGACY.join(", "));
        return Err(refuse(ErrorCode::BadRequest, &text));
    }
    let Some(id) = headers.get(SESSION_HEADER).and_then(|id| id.to_str().ok()) else {
        let text = "the header Mcp-Session-Id is missing: begin with initialize";
        return Err(refuse(ErrorCode::BadRequest, text));
    };
    let missing = || refuse(ErrorCode::NotFound, "there is no such session: begin anew with initialize");
    hosted.sessions.get(id).ok_or_else(missing)
}

fn version_of(headers: &HeaderMap) -> &str {
    headers.get(VERSION_HEADER).and_then(|version| version.to_str().ok()).unwrap_or_default()
}

/// A client must take both kinds of answers, and send JSON.
fn check_types(headers: &HeaderMap) -> Result<(), Refusal> {
    if !accepts(headers, "application/json") || !accepts(headers, "text/event-stream") {
        let text = "a client must accept application/json and text/event-stream";
        return Err(refuse(ErrorCode::NotAcceptable, text));
    }
    let content = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let content = content.split(';').next().unwrap_or_default().trim();
    if !content.eq_ignore_ascii_case("application/json") {
        return Err(refuse(ErrorCode::UnsupportedMediaType, "messages are application/json"));
    }
    Ok(())
}

/// Whether a client takes this kind of answer.
fn accepts(headers: &HeaderMap, wanted: &str) -> bool {
    let group = wanted.split('/').next().unwrap_or_default();
    headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|kind| {
            let kind = kind.split(';').next().unwrap_or_default().trim();
            kind.eq_ignore_ascii_case(wanted) || kind == "*/*" || kind.strip_suffix("/*") == Some(group)
        })
}

/// An answer that goes no further.
pub(super) struct Refusal(Box<Response>);

impl Refusal {
    fn with(answer: impl IntoResponse) -> Self {
        Self(Box::new(answer.into_response()))
    }
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self::with(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        *self.0
    }
}

fn refuse(code: ErrorCode, text: &str) -> Refusal {
    ApiError::new(code, text).into()
}

/// Clients of the modern era have no sessions to listen to or to end.
fn refuse_modern(headers: &HeaderMap) -> Result<(), Refusal> {
    if !mcp_modern::header_is_modern(headers) {
        return Ok(());
    }
    let error = ApiError::new(ErrorCode::MethodNotAllowed, format!("clients of {MODERN} only POST"));
    Err(Refusal::with(([(header::ALLOW, "POST")], error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn only_known_origins_are_let_in() {
        let allowed = ["https://app.example".to_owned()];
        let check = |origin: &str| origin_is_allowed(&headers(&[("origin", origin)]), &allowed);
        assert!(origin_is_allowed(&HeaderMap::new(), &[]));
        for origin in
            ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8080", "https://app.example"]
        {
            assert!(check(origin), "{origin}");
        }
        for origin in
            ["http://evil.example", "null", "", "http://localhost.evil.example", "https://app.example.evil"]
        {
            assert!(!check(origin), "{origin}");
        }
    }

    #[test]
    fn what_a_client_accepts_is_read_as_it_may_be_written() {
        let check = |accept: &str, wanted: &str| accepts(&headers(&[("accept", accept)]), wanted);
        assert!(check("application/json, text/event-stream", "text/event-stream"));
        assert!(check("Text/Event-Stream;q=0.5", "text/event-stream"));
        assert!(check("*/*", "application/json") && check("text/*", "text/event-stream"));
        assert!(!check("text/html", "application/json") && !accepts(&HeaderMap::new(), "application/json"));
    }
}
