//! `mcp-fixture` over HTTP.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::client::Client;

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"test","version":"1"}}}"#;

#[test]
fn it_reports_its_address_and_refuses_foreign_origins() {
    let client = Client::start(env!("CARGO_BIN_EXE_mcp-fixture"), &["--http", "127.0.0.1:0"]);
    let line = client.error_line();
    let url = line.strip_prefix("mcp-fixture: listening on http://").unwrap();
    let address = url.strip_suffix("/mcp").unwrap();
    let response = post(address, "");
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert!(response.contains("\r\nmcp-session-id: "), "{response}");
    assert!(response.contains(r#""protocolVersion":"2025-11-25""#), "{response}");
    let response = post(address, "Origin: http://evil.example.com\r\n");
    assert!(response.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{response}");
}

fn post(address: &str, header: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!(
        "POST /mcp HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{header}Content-Type: application/json\r\n\
         Accept: application/json, text/event-stream\r\nContent-Length: {}\r\n\r\n{INITIALIZE}",
        INITIALIZE.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}
