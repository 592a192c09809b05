//! Forwards requests to hosted servers that speak HTTP themselves, and their answers to the clients.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, Version, header};
use emergent_wire::ErrorCode;
use hyper_util::rt::TokioIo;
use tracing::Instrument as _;

use super::error::ApiError;
use crate::mcp::{HostedServer, McpHost};

/// Headers of one connection, and the credentials for this server.
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

/// Forwards a request to this port and path of the server's sandbox.
pub(super) async fn forward(
    host: &McpHost,
    server: &HostedServer,
    port: u16,
    path: &str,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let no_answer = |error: hyper::Error| {
        ApiError::new(ErrorCode::ProviderFailed, format!("the MCP server did not answer: {error}"))
    };
    let stream = TokioIo::new(host.connect(server, port).await?);
    let handshake = hyper::client::conn::http1::handshake(stream).await;
    let (mut sender, connection) = handshake.map_err(no_answer)?;
    tokio::spawn(connection.in_current_span());
    let request = forwarded(port, path, request)?;
    let mut response = sender.send_request(request).await.map_err(no_answer)?.map(Body::new);
    NOT_FORWARDED.iter().for_each(|name| {
        response.headers_mut().remove(name);
    });
    Ok(response)
}

/// The request as it is sent to the server.
fn forwarded(port: u16, path: &str, request: Request<Body>) -> Result<Request<Body>, ApiError> {
    let (mut parts, body) = request.into_parts();
    let query = parts.uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    parts.uri = format!("{path}{query}")
        .parse::<Uri>()
        .map_err(|error| ApiError::new(ErrorCode::BadRequest, error.to_string()))?;
    let mut headers: HeaderMap = std::mem::take(&mut parts.headers);
    NOT_FORWARDED.iter().for_each(|name| {
        headers.remove(name);
    });
    // This server has applied the Origin policy. The server in the sandbox would compare the origin with its own address.
    headers.remove(header::ORIGIN);
    if let Ok(host) = HeaderValue::from_str(&format!("localhost:{port}")) {
        headers.insert(header::HOST, host);
    }
    parts.headers = headers;
    parts.extensions.clear();
    parts.version = Version::HTTP_11;
    Ok(Request::from_parts(parts, body))
}
