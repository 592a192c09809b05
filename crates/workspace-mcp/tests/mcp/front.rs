//! What does not get to the tools: foreign pages, bodies that are too large or can't be read.

use crate::support::Fake;
use crate::support::client::{Client, ERAS, MODERN, message, only};
use bytes::Bytes;
use emergent_workspace_mcp::{Config, WorkspaceMcp};
use http::{Request, StatusCode};
use http_body_util::Full;
use serde_json::json;

async fn status(
    mcp: &WorkspaceMcp,
    mut request: Request<Full<Bytes>>,
    headers: &[(&'static str, &str)],
) -> StatusCode {
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    mcp.handle(request).await.status()
}

#[tokio::test]
async fn foreign_pages_are_refused_in_every_way() {
    let config = Config { origins: vec!["https://app.example".parse().unwrap()], ..Config::default() };
    let (_, mcp) = Fake::default().serve(config);
    for era in ERAS {
        let client = Client::connect(&mcp, era).await;
        let ask = || client.request(1, "tools/list", json!({}));
        for (origin, expected) in [
            ("https://work.example", StatusCode::OK),
            ("http://localhost:6274", StatusCode::OK),
            ("https://app.example", StatusCode::OK),
            ("https://evil.example", StatusCode::FORBIDDEN),
            ("null", StatusCode::FORBIDDEN),
        ] {
            assert_eq!(status(&mcp, ask(), &[("origin", origin)]).await, expected, "{origin}");
        }
        assert_eq!(status(&mcp, ask(), &[]).await, StatusCode::OK);
        for method in ["GET", "DELETE", "OPTIONS", "PUT"] {
            let request = message(method).body(Full::default()).unwrap();
            assert_eq!(
                status(&mcp, request, &[("origin", "https://evil.example")]).await,
                StatusCode::FORBIDDEN
            );
        }
    }
}

#[tokio::test]
async fn a_list_of_hosts_is_kept() {
    let config = Config { hosts: vec!["work.example".to_owned()], ..Config::default() };
    let (_, mcp) = Fake::default().serve(config);
    let client = Client::connect(&mcp, MODERN).await;
    let ask = || client.request(1, "tools/list", json!({}));
    assert_eq!(status(&mcp, ask(), &[]).await, StatusCode::OK);
    assert_eq!(status(&mcp, ask(), &[("host", "127.0.0.1:8080")]).await, StatusCode::OK);
    let rebound = [("host", "evil.example"), ("origin", "http://evil.example")];
    assert_eq!(status(&mcp, ask(), &rebound).await, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn bodies_are_bounded_and_must_be_messages() {
    let (_, mcp) = Fake::default().serve(Config::default());
    for (body, status, code) in [
        (" ".repeat((5 << 20) + 1), StatusCode::PAYLOAD_TOO_LARGE, -32600),
        ("not JSON".to_owned(), StatusCode::BAD_REQUEST, -32700),
        (String::new(), StatusCode::BAD_REQUEST, -32700),
        ("[]".to_owned(), StatusCode::BAD_REQUEST, -32600),
        ("{}".to_owned(), StatusCode::BAD_REQUEST, -32600),
    ] {
        let response = mcp.handle(message("POST").body(Full::<Bytes>::from(body.clone())).unwrap()).await;
        assert_eq!(response.status(), status, "{body:.20}");
        assert_eq!(only(response).await["error"]["code"], code, "{body:.20}");
    }
    let mut request = message("POST").body(Full::<Bytes>::from("{}")).unwrap();
    request.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    assert_eq!(mcp.handle(request).await.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(mcp.is_idle());
}

#[tokio::test]
async fn the_modern_era_has_no_sessions() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let client = Client::connect(&mcp, MODERN).await;
    for method in ["GET", "DELETE"] {
        let request = message(method).header("mcp-protocol-version", MODERN).body(Full::default()).unwrap();
        assert_eq!(status(&mcp, request, &[]).await, StatusCode::METHOD_NOT_ALLOWED);
    }
    let wrong = client.request(1, "tools/list", json!({}));
    assert_eq!(status(&mcp, wrong, &[("mcp-method", "tools/call")]).await, StatusCode::BAD_REQUEST);
    let response = client.send(1, "tools/list", json!({})).await;
    assert!(!response.is_stream);
    assert!(mcp.is_idle());
}
