//! A real connection and another implementation's client, in both eras.

use std::sync::Arc;

use crate::support::client::handle;
use crate::support::{Caller, Fake, Mcp, TOOLS};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::any;
use bytes::Bytes;
use emergent_workspace_mcp::Config;
use rmcp::model::{CallToolRequestParams, ProtocolVersion};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::{ClientLifecycleMode, ClientServiceExt as _};
use serde_json::json;

async fn listen(mcp: Arc<Mcp>) -> String {
    let handle = move |request: Request| {
        let mcp = mcp.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body: Bytes = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let request = http::Request::from_parts(parts, body.into());
            handle(&mcp, &Caller("nobody", 0), request).await.map(Body::new)
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/mcp", any(handle))).await });
    format!("http://{address}/mcp")
}

#[tokio::test]
async fn a_client_finds_and_uses_the_tools() {
    let (fake, mcp) = Fake::default().serve(Config::default());
    let url = listen(mcp).await;
    let discover = ClientLifecycleMode::Discover { preferred_versions: vec![ProtocolVersion::V_2026_07_28] };
    for mode in [ClientLifecycleMode::Initialize, discover] {
        let transport = StreamableHttpClientTransport::from_uri(url.clone());
        let client = ().serve_with_lifecycle(transport, mode).await.unwrap();
        assert_eq!(client.list_all_tools().await.unwrap().len(), TOOLS.len());
        let arguments = json!({"command": "echo hello"}).as_object().unwrap().clone();
        let result =
            client.call_tool(CallToolRequestParams::new("bash").with_arguments(arguments)).await.unwrap();
        assert_eq!(result.structured_content.unwrap()["stdout"], "hello\n");
        client.cancel().await.unwrap();
    }
    assert_eq!(*fake.running.borrow(), 0);
}
