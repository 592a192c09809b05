//! Servers that speak HTTP themselves: forwards requests to their port, and answers back.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, Version, header};
use emergent_wire::{ErrorCode, ErrorDetail};
use hyper_util::rt::TokioIo;

use crate::mcp::{Hosted, McpHost};

/// Headers that belong to one connection, or to this server.
const NOT_FORWARDED: [HeaderName; 9] = [
    header::AUTHORIZATION,
    header::COOKIE,
    header::CONNECTION,
    header::HOST,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Forwards a request, and its answer.
pub(super) async fn forward(
    host: &McpHost,
    hosted: &Hosted,
    request: Request<Body>,
) -> Result<Response<Body>, ErrorDetail> {
    let gone = |error: &dyn std::fmt::Display| {
        ErrorDetail::new(ErrorCode::ProviderFailed, format!("the MCP server did not answer: {error}"))
    };
    let stream = TokioIo::new(host.connect(hosted).await?);
    let handshake = hyper::client::conn::http1::handshake(stream).await;
    let (mut sender, connection) = handshake.map_err(|error| gone(&error))?;
    tokio::spawn(connection);
    let request = forwarded(hosted, request)?;
    let mut response = sender.send_request(request).await.map_err(|error| gone(&error))?.map(Body::new);
    NOT_FORWARDED.iter().for_each(|name| {
        response.headers_mut().remove(name);
    });
    Ok(response)
}

/// The request for the server.
fn forwarded(hosted: &Hosted, request: Request<Body>) -> Result<Request<Body>, ErrorDetail> {
    let (mut parts, body) = request.into_parts();
    let path = hosted.config.path.as_deref().unwrap_or(emergent_wire::mcp::DEFAULT_PATH);
    let query = parts.uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    parts.uri = format!("{path}{query}")
        .parse::<Uri>()
        .map_err(|error| ErrorDetail::new(ErrorCode::BadRequest, error.to_string()))?;
    let mut headers: HeaderMap = std::mem::take(&mut parts.headers);
    NOT_FORWARDED.iter().for_each(|name| {
        headers.remove(name);
    });
    // The Origin policy was applied. The server's own check would compare with its address in the sandbox.
    headers.remove(header::ORIGIN);
    let port = hosted.config.port.unwrap_or_default();
    if let Ok(host) = HeaderValue::from_str(&format!("localhost:{port}")) {
        headers.insert(header::HOST, host);
    }
    parts.headers = headers;
    parts.extensions.clear();
    parts.version = Version::HTTP_11;
    Ok(Request::from_parts(parts, body))
}
