//! Serves a workspace in memory at `http://ADDRESS/mcp`, to try clients and the conformance suite on.
//!
//! `cargo run -p emergent-workspace-mcp --example serve -- 127.0.0.1:8090`; see `conformance/README.md`.

#[path = "../tests/mcp/support/mod.rs"]
mod support;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use emergent_mcp_http::OriginPolicy;
use emergent_workspace_mcp::Config;
use support::Caller;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let (_, mcp) = support::Fake::default().serve(Config::default());
    let handle = move |request: Request| {
        let mcp = mcp.clone();
        async move {
            if let Err(refusal) = OriginPolicy::default().check(request.headers()) {
                return (StatusCode::FORBIDDEN, refusal.to_string()).into_response();
            }
            let answer: Response = match mcp.handle(&Caller("nobody", 0), request).await {
                Ok(answer) => answer.map(Body::new),
                Err(refusal) => (refusal.status(), refusal.to_string()).into_response(),
            };
            answer
        }
    };
    let listener = tokio::net::TcpListener::bind(address).await?;
    eprintln!("http://{}/mcp", listener.local_addr()?);
    axum::serve(listener, Router::new().route("/mcp", any(handle))).await
}
