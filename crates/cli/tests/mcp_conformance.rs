//! The official conformance suites for the fixture behind the bridge, and for the MCP endpoint of a workspace.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use emergent_test_support::conformance::{self, Report, Suite};
use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::json;

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const LEGACY: Suite = Suite::Requirements("2025-11-25");
const MODERN: Suite = Suite::Requirements("2026-07-28");
const SHARED: &str = include_str!("conformance/shared.yml");
/// The suite does not score this scenario. It requires a check of tool arguments that are repeated in headers, which the server does
/// not have.
const NOT_SCORED: &str = "http-custom-header-server-validation";

async fn host(mode: &str) -> (TestServer, String) {
    let server = TestServer::start(BINARY).await;
    let request = json!({ "name": "fixture", "command": ["mcp-fixture"], "mode": mode });
    server.register(&mcp::image(BINARY), request).await;
    server.wait_for_status("fixture", "ready").await;
    (server, format!("{SERVERS}/fixture/mcp"))
}

#[track_caller]
fn assert_passed(report: &Report, passed: usize, failed: &[&str]) {
    assert!(report.is_success, "{}", report.text);
    assert_eq!(
        (report.passed.len(), &report.failed),
        (passed, &failed.iter().map(|name| (*name).to_owned()).collect()),
        "{}",
        report.text
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn per_session_server_passes_all_scenarios() {
    let (server, path) = host("per_session").await;
    assert_passed(&conformance::run(&server, &path, Suite::First, None).await, 30, &[]);
    assert_passed(&conformance::run(&server, &path, LEGACY, None).await, 33, &[]);
    server.remove_mcp("fixture").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_server_passes_all_scenarios_without_requests_to_the_client() {
    let (server, path) = host("shared").await;
    for (suite, all) in [(Suite::First, 30), (LEGACY, 33)] {
        let report = conformance::run(&server, &path, suite, Some(SHARED)).await;
        assert!(report.is_success, "{}", report.text);
        assert_eq!(report.passed.len(), all - 4, "{}", report.text);
    }
    let report = conformance::run(&server, &path, MODERN, None).await;
    assert_passed(&report, 49, &[NOT_SCORED]);
    server.remove_mcp("fixture").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn workspace_tools_pass_all_scenarios_for_tools() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "docker" })).await;
    let path = format!("{WORKSPACES}/{id}/mcp");
    for (suite, expected) in [
        (Suite::First, include_str!("../../workspace-mcp/conformance/expected-failures-0.1.16.yml")),
        (LEGACY, include_str!("../../workspace-mcp/conformance/expected-failures-2025-11-25.yml")),
        (MODERN, include_str!("../../workspace-mcp/conformance/expected-failures-2026-07-28.yml")),
    ] {
        let report = conformance::run(&server, &path, suite, Some(expected)).await;
        assert!(report.is_success, "{suite:?}: {}", report.text);
        assert!(report.passed.len() >= 5, "{suite:?}: {}", report.text);
    }
    server.destroy(&id).await;
    server.stop();
}
