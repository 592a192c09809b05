//! Requests that do not reach the tools: bodies over the limit or unreadable, wrong types and headers.

use crate::support::client::{Client, LEGACY, MODERN, handle, message, only};
use crate::support::{Caller, Fake};
use bytes::Bytes;
use emergent_workspace_mcp::Config;
use http::{Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

const NOBODY: Caller = Caller("nobody", 0);

fn post(body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    message("POST").body(Full::new(body.into())).unwrap()
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let response = handle(&mcp, &NOBODY, post(" ".repeat((5 << 20) + 1))).await;
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert!(mcp.is_idle());
}

#[tokio::test]
async fn a_body_that_is_not_one_message_is_refused() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let not_utf8 = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\xff\"}".to_vec();
    for (body, code) in [
        (b"not JSON".to_vec(), -32700),
        (Vec::new(), -32700),
        (not_utf8, -32700),
        (format!("{ping}{ping}").into_bytes(), -32700),
        (b"[]".to_vec(), -32600),
        (format!("[{ping},{ping}]").into_bytes(), -32600),
        (b"{}".to_vec(), -32600),
        (br#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#.to_vec(), -32600),
        (br#"{"jsonrpc":"2.0","id":{},"method":"ping"}"#.to_vec(), -32600),
    ] {
        let about = String::from_utf8_lossy(&body).into_owned();
        let response = handle(&mcp, &NOBODY, post(body)).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{about}");
        let answer = only(response).await;
        assert_eq!(answer["error"]["code"], code, "{about}");
        assert_eq!(answer.get("id"), None, "{about}");
    }
    assert!(mcp.is_idle());
}

#[tokio::test]
async fn types_and_versions_are_checked() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let client = Client::connect(&mcp, LEGACY).await;
    for (header, value, status) in [
        ("content-type", "text/plain", StatusCode::UNSUPPORTED_MEDIA_TYPE),
        ("content-type", "application/jsonp", StatusCode::UNSUPPORTED_MEDIA_TYPE),
        ("content-type", "Application/JSON; charset=utf-8", StatusCode::OK),
        ("accept", "application/json", StatusCode::NOT_ACCEPTABLE),
        ("accept", "*/*", StatusCode::OK),
        ("mcp-protocol-version", "1999-01-01", StatusCode::BAD_REQUEST),
        ("mcp-protocol-version", "2025-06-18", StatusCode::OK),
    ] {
        let mut request = client.request(1, "ping", json!({}));
        request.headers_mut().insert(header, value.parse().unwrap());
        assert_eq!(client.handle(request).await.status(), status, "{header}: {value}");
    }
    let request = message("PUT").body(Full::default()).unwrap();
    assert_eq!(client.handle(request).await.status(), StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn the_modern_era_has_no_sessions() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let client = Client::connect(&mcp, MODERN).await;
    for method in ["GET", "DELETE"] {
        let request = message(method).header("mcp-protocol-version", MODERN).body(Full::default()).unwrap();
        assert_eq!(client.handle(request).await.status(), StatusCode::METHOD_NOT_ALLOWED);
    }
    let response = client.send(1, "tools/list", json!({})).await;
    assert!(!response.is_stream);
    assert!(mcp.is_idle());
}

#[tokio::test]
async fn headers_of_the_modern_era_must_agree_with_the_body() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let client = Client::connect(&mcp, MODERN).await;
    let call = || client.request(1, "tools/call", json!({"name": "grep", "arguments": {}}));
    for (header, value, expected) in [
        ("mcp-name", Some("grep"), None),
        ("mcp-name", Some("=?base64?Z3JlcA==?="), None),
        ("mcp-name", Some("read"), Some(-32020)),
        ("mcp-name", None, Some(-32020)),
        ("mcp-method", Some("tools/list"), Some(-32020)),
        ("mcp-method", None, Some(-32020)),
        ("mcp-protocol-version", Some(LEGACY), Some(-32020)),
        ("mcp-protocol-version", None, Some(-32020)),
    ] {
        let mut request = call();
        request.headers_mut().remove(header);
        if let Some(value) = value {
            request.headers_mut().insert(header, value.parse().unwrap());
        }
        let response = client.handle(request).await;
        let status = response.status();
        let code = only(response).await["error"]["code"].as_i64();
        assert_eq!(code, expected, "{header}: {value:?}");
        assert_eq!(status == StatusCode::OK, expected.is_none(), "{header}: {value:?}");
    }
}

#[tokio::test]
async fn requests_of_the_modern_era_must_describe_themselves() {
    const VERSION: &str = "io.modelcontextprotocol/protocolVersion";
    let (_, mcp) = Fake::default().serve(Config::default());
    let send = async |version: &str, meta: Value| {
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": meta}});
        let request =
            message("POST").header("mcp-protocol-version", version).header("mcp-method", "tools/list");
        only(handle(&mcp, &NOBODY, request.body(Full::from(body.to_string())).unwrap()).await).await
    };
    let capabilities = "io.modelcontextprotocol/clientCapabilities";
    assert_eq!(send(MODERN, json!({capabilities: {}})).await["error"]["code"], -32602);
    assert_eq!(send(MODERN, json!({VERSION: MODERN})).await["error"]["code"], -32602);
    assert!(send(MODERN, json!({VERSION: MODERN, capabilities: {}})).await["result"]["tools"].is_array());
    let future = send("2030-01-01", json!({VERSION: "2030-01-01", capabilities: {}})).await;
    assert_eq!(future["error"]["code"], -32022);
    let versions = ["2024-11-05", "2025-03-26", "2025-06-18", LEGACY, MODERN];
    assert_eq!(future["error"]["data"], json!({"requested": "2030-01-01", "supported": versions}));
}
