//! The log: a search for a request's id finds every line of its call, and no line has a secret (docs/logging.md). The same for
//! exported traces.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use emergent_test_support::collector::{Collector, ReceivedSpan};
use emergent_test_support::server::{TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// The JSON lines of the log whose span has this request id.
fn lines_of(server: &TestServer, request: &str) -> Vec<Value> {
    let log = server.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let has_request = |line: &Value| {
        line["spans"].as_array().is_some_and(|spans| spans.iter().any(|span| span["request"] == request))
    };
    lines.filter(has_request).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn log_lines_of_a_call_have_its_request_id_and_no_secret() {
    let environment =
        [("EMERGENT_ALLOW_DOCKER", "true"), ("EMERGENT_LOG", "debug"), ("EMERGENT_LOG_FORMAT", "json")];
    let server = TestServer::start_with(BINARY, &environment).await;
    let id = server
        .create(json!({
            "provider": "docker",
            "network": "isolated",
            "environment": { "API_KEY": "value-of-a-variable" },
        }))
        .await;
    let response = reqwest::Client::new()
        .post(format!("{}{WORKSPACES}/{id}/bash", server.url))
        .bearer_auth(&server.token)
        .header("x-request-id", "the-call-to-find")
        .json(&json!({ "command": "echo text-of-a-command $API_KEY" }))
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["x-request-id"], "the-call-to-find");
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["stdout"], "text-of-a-command value-of-a-variable\n");

    let lines = lines_of(&server, "the-call-to-find");
    let targets: Vec<&str> = lines.iter().filter_map(|line| line["target"].as_str()).collect();
    // The lines are from the domain and from the front.
    for module in ["workspace::calls", "http::record"] {
        assert!(targets.iter().any(|target| target.ends_with(module)), "{module}: {lines:#?}");
    }
    let span = lines
        .iter()
        .find(|line| line["target"].as_str().is_some_and(|target| target.ends_with("workspace::calls")))
        .and_then(|line| line["spans"].as_array()?.iter().find(|span| span["name"] == "request"))
        .unwrap();
    assert_eq!(span["workspace"], id.as_str());
    assert_eq!(span["principal"], "first-start");

    server.destroy(&id).await;
    let log = server.log();
    for secret in ["value-of-a-variable", "text-of-a-command", server.token.as_str()] {
        assert!(!log.contains(secret), "'{secret}' is in the log");
    }
    server.stop();
}

/// The span with this name and this value of a field.
fn span_of<'a>(spans: &'a [ReceivedSpan], name: &str, field: &str, value: &str) -> &'a ReceivedSpan {
    let is_it =
        |span: &&ReceivedSpan| span.name == name && span.fields.get(field).is_some_and(|is| is == value);
    spans.iter().find(is_it).unwrap_or_else(|| panic!("no {name} with {field}={value}: {spans:#?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_exported_as_one_trace_without_secrets() {
    let collector = Collector::start();
    // With the default filter, which logs none of these spans.
    let environment = [
        ("EMERGENT_ALLOW_DOCKER", "true"),
        ("EMERGENT_LOG_OTLP_ENDPOINT", collector.url.as_str()),
        ("EMERGENT_LOG_FORMAT", "json"),
    ];
    let server = TestServer::start_with(BINARY, &environment).await;
    let id = server
        .create(json!({
            "provider": "docker",
            "network": "isolated",
            "environment": { "API_KEY": "value-of-a-variable" },
        }))
        .await;
    let call = |path: &str, request: &'static str, token: &str| {
        reqwest::Client::new()
            .post(format!("{}{WORKSPACES}/{id}/{path}", server.url))
            .bearer_auth(token)
            .header("x-request-id", request)
            .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    };
    let command = json!({ "command": "echo text-of-a-command $API_KEY" });
    let answer = call("bash", "the-call-to-find", &server.token).json(&command).send().await.unwrap();
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer["stdout"], "text-of-a-command value-of-a-variable\n");
    let failing = json!({ "file_path": "name-of-a-file" });
    call("read", "the-call-that-fails", &server.token).json(&failing).send().await.unwrap();
    call("bash", "the-refused-call", "not-a-token").json(&command).send().await.unwrap();
    server.destroy(&id).await;
    let (installation, token, log) =
        (server.installation(), server.token.clone(), server.data_dir().join("test.log"));
    let log = std::fs::read_to_string(log).unwrap();
    // The last spans are exported at the end of the server.
    server.stop();

    let spans = collector.spans();
    let request = span_of(&spans, "request", "request", "the-call-to-find");
    assert_eq!(request.trace, "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(request.parent, "b7ad6b7169203331");
    assert_eq!(request.fields["workspace"], id);
    assert_eq!(request.fields["principal"], "first-start");
    assert_eq!(request.fields["action"], "bash");
    let agent_call = span_of(&spans, "agent_call", "call", "bash");
    assert_eq!((&agent_call.trace, &agent_call.parent), (&request.trace, &request.id));
    assert!((1..=request.nanos).contains(&agent_call.nanos), "{agent_call:#?} {request:#?}");
    assert!(!request.failed && !agent_call.failed);

    let failed = span_of(&spans, "request", "request", "the-call-that-fails");
    let failed_call = span_of(&spans, "agent_call", "call", "read");
    assert_eq!(failed_call.parent, failed.id);
    for span in [failed, failed_call] {
        assert!(span.failed && span.fields["error_code"] == "file_not_found", "{span:#?}");
    }
    // Only a caller with a token can add to a trace.
    let refused = span_of(&spans, "request", "request", "the-refused-call");
    assert!(refused.parent.is_empty() && refused.trace != request.trace, "{refused:#?}");
    assert_eq!(refused.fields["error_code"], "unauthorized");

    let creation = span_of(&spans, "request", "action", "workspace.create");
    let provider_call = span_of(&spans, "provider_call", "call", "create");
    assert_eq!((&provider_call.trace, &provider_call.parent), (&creation.trace, &creation.id));
    assert_eq!(
        (provider_call.fields["provider"].as_str(), &provider_call.fields["workspace"]),
        ("docker", &id)
    );
    let configured = span_of(&spans, "agent_call", "call", "configure");
    assert_eq!((&configured.trace, &configured.parent), (&creation.trace, &provider_call.id));
    span_of(&spans, "background", "task", "recovery");

    let services = collector.services();
    let [service] = services.as_slice() else { panic!("{services:#?}") };
    assert_eq!(service["service.name"], "emergent");
    assert_eq!(service["service.version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(service["emergent.installation"], installation);
    for secret in
        ["value-of-a-variable", "text-of-a-command", "name-of-a-file", "not-a-token", token.as_str()]
    {
        assert!(!collector.received(secret), "'{secret}' is in a trace");
    }
    // The filter is for lines, and the export adds none.
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    for line in lines {
        assert_ne!(line["level"], "DEBUG", "{line}");
        assert!(!line["spans"].to_string().contains("provider_call"), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn traces_go_to_a_collector_with_tls_and_past_proxies() {
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) = (directory.path().join("certificate.pem"), directory.path().join("key.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"])
        .args(["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let collector = Collector::start_with_tls(&certificate, &key);
    let environment = [
        ("EMERGENT_LOG_OTLP_ENDPOINT", collector.url.as_str()),
        // The certificates that the host trusts.
        ("SSL_CERT_FILE", certificate.to_str().unwrap()),
        ("HTTPS_PROXY", "http://127.0.0.1:1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a-key-for-the-collector"),
    ];
    let server = TestServer::start_with(BINARY, &environment).await;
    server.request("GET", WORKSPACES, None).await.ok();
    server.stop();
    span_of(&collector.spans(), "request", "action", "workspace.list");
    assert_eq!(collector.header("api-key")[0], "a-key-for-the-collector");

    // A certificate that the host does not trust: one warning, and the cause.
    let environment = [("EMERGENT_LOG_OTLP_ENDPOINT", collector.url.as_str())];
    let before = collector.spans().len();
    let mut server = TestServer::start_with(BINARY, &environment).await;
    server.terminate();
    let log = server.log();
    assert_eq!(collector.spans().len(), before);
    assert!(log.contains("traces can't be exported") && log.contains("certificate"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_collector_costs_one_warning() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let mut server = TestServer::start_with(BINARY, &[("EMERGENT_LOG_OTLP_ENDPOINT", url.as_str())]).await;
    let warning = "traces can't be exported";
    wait_until("the warning", Duration::from_secs(30), async || server.log().contains(warning)).await;
    // The server works, and its end exports again.
    server.request("GET", WORKSPACES, None).await.ok();
    server.terminate();
    assert_eq!(server.log().matches(warning).count(), 1, "{}", server.log());
}
