//! The official conformance suites for MCP servers. `scripts/setup test` downloads them.
//!
//! The suites can't send a token, so they connect to a proxy that adds it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Request, Response, header};
use tokio::net::TcpListener;

use crate::server::TestServer;

/// A conformance suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// Version 0.1.16.
    First,
    /// Version 0.2, with the requirements of this version of the protocol.
    Requirements(&'static str),
}

/// The result of a suite.
#[derive(Clone, Debug)]
pub struct Report {
    /// Whether the suite succeeded: no scenario failed but the expected ones.
    pub is_success: bool,
    /// The scenarios that passed.
    pub passed: Vec<String>,
    /// The scenarios that failed.
    pub failed: Vec<String>,
    /// The whole output.
    pub text: String,
}

/// The directory with the downloads of `scripts/setup`.
pub(crate) fn cache_dir() -> PathBuf {
    std::env::var_os("EMERGENT_CACHE_DIR").map(PathBuf::from).unwrap_or_else(|| {
        let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache");
        std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from).join("emergent")
    })
}

fn directory() -> PathBuf {
    let directory = cache_dir().join("conformance");
    assert!(directory.join("recipe").exists(), "the conformance suites are missing: run scripts/setup test");
    directory
}

/// Runs a suite against an endpoint of a server. `expected` is the suite's list of expected failures.
pub async fn run(server: &TestServer, path: &str, suite: Suite, expected: Option<&str>) -> Report {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("http://{}/mcp", listener.local_addr().expect("the listener has an address"));
    let target = Target {
        client: server.client().clone(),
        url: format!("{}{path}", server.url),
        token: server.token.clone(),
    };
    let router = Router::new().fallback(forward).with_state(Arc::new(target));
    let proxy = tokio::spawn(async move { axum::serve(listener, router).await });
    let (directory, output) = (directory(), tempfile::tempdir().expect("a directory can be made"));
    let mut arguments = vec!["server".to_owned(), "--url".to_owned(), url];
    let package = match suite {
        Suite::First => "conformance-legacy",
        Suite::Requirements(version) => {
            arguments.extend(["--requirements".to_owned(), version.to_owned()]);
            "conformance"
        }
    };
    arguments.extend(["-o".to_owned(), output.path().to_string_lossy().into_owned()]);
    if let Some(list) = expected {
        let file = output.path().join("expected.yml");
        std::fs::write(&file, list).expect("the list can be written");
        arguments.extend(["--expected-failures".to_owned(), file.to_string_lossy().into_owned()]);
    }
    let script = directory.join("node_modules").join(package).join("dist/index.js");
    let ran = tokio::task::spawn_blocking(move || {
        Command::new(directory.join("node")).arg(script).args(arguments).output().expect("node starts")
    });
    let ran = ran.await.expect("the suite ends");
    proxy.abort();
    let text = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    let with = |mark: &str| -> Vec<String> {
        let names = text.lines().filter_map(|line| line.strip_prefix(mark)?.trim().split_once(':'));
        names.map(|(name, _)| name.to_owned()).collect()
    };
    Report { is_success: ran.status.success(), passed: with("✓ "), failed: with("✗ "), text }
}

struct Target {
    client: reqwest::Client,
    url: String,
    token: String,
}

/// Forwards a request with the token, and streams the response back.
async fn forward(State(target): State<Arc<Target>>, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let body: Bytes = axum::body::to_bytes(body, 8 << 20).await.expect("the body is complete");
    let mut headers = parts.headers;
    headers.remove(header::HOST);
    headers.remove(header::CONTENT_LENGTH);
    let request =
        target.client.request(parts.method, &target.url).headers(headers).bearer_auth(&target.token);
    let answer = match request.body(body).send().await {
        Ok(answer) => answer,
        Err(error) => {
            let failed = Response::builder().status(502).body(Body::from(error.to_string()));
            return failed.expect("the response is valid");
        }
    };
    let mut response = Response::builder().status(answer.status());
    for (name, value) in answer.headers() {
        if name != header::TRANSFER_ENCODING && name != header::CONTENT_LENGTH && name != header::CONNECTION {
            response = response.header(name, value);
        }
    }
    response.body(Body::from_stream(answer.bytes_stream())).expect("the response is valid")
}
