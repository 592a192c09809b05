//! Serves a workspace in memory at `http://ADDRESS/mcp`, to try clients and the conformance suite on.
//!
//! `cargo run -p emergent-workspace-mcp --example serve -- 127.0.0.1:8090`; see `conformance/README.md`.

#[path = "../tests/mcp/support/mod.rs"]
mod support;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::any;
use emergent_workspace_mcp::Config;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    // A server on this machine alone: pages can't reach it under a name of their own.
    let config = Config { hosts: vec!["localhost".to_owned()], ..Config::default() };
    let (_, mcp) = support::Fake::default().serve(config);
    let handle = move |request: Request| {
        let mcp = mcp.clone();
        async move { mcp.handle(request).await.map(Body::new) }
    };
    let listener = tokio::net::TcpListener::bind(address).await?;
    eprintln!("http://{}/mcp", listener.local_addr()?);
    axum::serve(listener, Router::new().route("/mcp", any(handle))).await
}
