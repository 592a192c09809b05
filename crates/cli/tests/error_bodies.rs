//! Every failure has the error body of the OpenAPI document, even a failure before a handler is called.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

#[track_caller]
fn assert_error_body(body: &Value, about: &str) {
    let error = &body["error"];
    let has_code = error["code"].is_string() || error["code"].is_i64();
    assert!(has_code && error["message"].as_str().is_some_and(|text| !text.is_empty()), "{about}: {body}");
}

/// Sends bytes, which need not be a valid request, and returns the whole response.
async fn send(server: &TestServer, bytes: &[u8]) -> String {
    let address = server.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut answer)).await;
    assert!(read.is_ok(), "the connection is not closed");
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn malformed_http_requests_get_an_error_body() {
    let server = TestServer::start(BINARY).await;
    let many: String = (0..300).map(|number| format!("x-{number}: 1\r\n")).collect();
    let long = "1".repeat(100_000);
    for (request, status, code) in [
        ("GARBAGE\r\n\r\n".to_owned(), 400, "bad_request"),
        ("GET / HTTP/9.1\r\n\r\n".to_owned(), 400, "bad_request"),
        ("GET / HTTP/1.1\r\nhost: a\r\nx\0: 1\r\n\r\n".to_owned(), 400, "bad_request"),
        ("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n".to_owned(), 400, "bad_request"),
        (format!("GET / HTTP/1.1\r\nhost: a\r\n{many}\r\n"), 431, "headers_too_large"),
        (format!("GET / HTTP/1.1\r\nhost: a\r\nx: {long}\r\n\r\n"), 431, "headers_too_large"),
    ] {
        let answer = send(&server, request.as_bytes()).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{answer}");
        let body: Value = serde_json::from_str(body).unwrap();
        assert_error_body(&body, "a malformed request");
        assert_eq!(body["error"]["code"], code, "{answer}");
    }
    server.stop();
}

#[tokio::test]
async fn refusals_of_mcp_endpoints_have_an_error_body() {
    let server = TestServer::start(BINARY).await;
    let workspace = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    let body = json!({ "name": "echo", "command": ["cat"], "provider": "docker", "network": "isolated" });
    server.request("POST", "/api/v1/mcp/servers", Some(body)).await.ok();
    let both = "application/json, text/event-stream";
    let list = r#"{"jsonrpc":"2.0","method":"tools/list","id":1}"#;
    for address in [format!("agent/workspaces/{workspace}/mcp"), "mcp/servers/echo/mcp".to_owned()] {
        for (method, accept, headers, body, status) in [
            ("POST", "text/html", [("content-type", "application/json")], list, 406),
            ("POST", both, [("content-type", "text/plain")], list, 415),
            ("POST", both, [("content-type", "application/json")], "x", 400),
            ("POST", both, [("content-type", "application/json")], "[]", 400),
            ("POST", both, [("content-type", "application/json")], list, 400),
            ("GET", "text/html", [("x-unused", "")], "", 406),
            ("GET", both, [("x-unused", "")], "", 400),
            ("GET", both, [("mcp-protocol-version", "2026-07-28")], "", 405),
            ("GET", both, [("mcp-session-id", "unknown")], "", 404),
            ("DELETE", both, [("x-unused", "")], "", 400),
            ("DELETE", both, [("mcp-session-id", "unknown")], "", 404),
            ("PUT", both, [("x-unused", "")], "", 405),
        ] {
            let url = format!("{}/api/v1/{address}", server.url);
            let request = server.client().request(method.parse().unwrap(), url).bearer_auth(&server.token);
            let request =
                headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
            let answer = request.header("accept", accept).body(body).send().await.unwrap();
            let about = format!("{method} {address} {headers:?} {body}");
            assert_eq!(answer.status(), status, "{about}");
            assert_error_body(&answer.json().await.expect(&about), &about);
        }
    }
    server.destroy(&workspace).await;
    server.request("DELETE", "/api/v1/mcp/servers/echo", None).await.ok();
    server.stop();
}

#[tokio::test]
async fn request_body_is_optional_exactly_where_openapi_says_so() {
    let server = TestServer::start(BINARY).await;
    let workspace = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    let description = server.request("GET", "/api/v1/openapi.json", None).await.ok();
    let mut optional = Vec::new();
    for (path, methods) in description["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let Some(required) = operation.get("requestBody").map(|body| body["required"] == true) else {
                continue;
            };
            let address = path.replace("{id}", &workspace);
            let answer = server.request(&method.to_uppercase(), &address, None).await;
            if required {
                assert!((400..500).contains(&answer.status), "{method} {path}: {}", answer.status);
                assert_error_body(&answer.body, path);
            } else {
                optional.push((path.clone(), answer.ok()));
            }
        }
    }
    let found: Vec<&str> = optional.iter().map(|(path, _)| path.rsplit('/').next().unwrap()).collect();
    assert_eq!(found, ["workspaces", "attach", "detach", "snapshot"]);
    let created = optional[0].1["id"].as_str().unwrap();
    let snapshot = optional[3].1["id"].as_str().unwrap();
    server.request("DELETE", &format!("{WORKSPACES}/snapshots/{snapshot}"), None).await.ok();
    for id in [&workspace, created] {
        server.destroy(id).await;
    }
    server.stop();
}
