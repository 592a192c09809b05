//! A tool that is added by one entry of the table is available on each front.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, header};
use chrono::Utc;
use emergent_providers::Providers;
use emergent_store::{AuditFilter, AuditOutcome, NewToken, NewWorkspace, SealingKey, Store, StoreConfig};
use emergent_wire::access::TokenScope;
use emergent_wire::tools::ToolRequest;
use emergent_wire::{ErrorCode, ErrorDetail, Validate, WorkspaceId};
use metrics_exporter_prometheus::PrometheusBuilder;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tower::ServiceExt as _;
use utoipa::ToSchema;

use super::{App, describe, router, routes};
use crate::audit::Audit;
use crate::config::Settings;
use crate::summary::Summarize;
use crate::tools::{
    AnswerTypes, Effect, Shown, Tool, ToolContext, ToolEntry, ToolError, TypeSchema, standard,
};
use crate::workspace::Workspaces;

/// Notified when the tool starts to wait for ever.
static WAITING: Notify = Notify::const_new();

/// The request of a tool that counts words.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct CountRequest {
    text: String,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
struct CountAnswer {
    words: usize,
}

impl ToolRequest for CountRequest {
    const NAME: &'static str = "count";
    type Answer = CountAnswer;
}

impl Validate for CountRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        if self.text.is_empty() {
            return Err(ErrorDetail::new(ErrorCode::BadRequest, "text is empty"));
        }
        Ok(())
    }
}

impl Summarize for CountRequest {
    fn summary(&self) -> Value {
        json!({ "text_bytes": self.text.len() })
    }
}

impl Tool for CountRequest {
    const TITLE: &'static str = "Count words";
    const INSTRUCTIONS: &'static str = "Count the words of a text.";
    const EFFECT: Effect = Effect::ReadsFiles;

    async fn run(&self, _: &ToolContext<'_>) -> Result<CountAnswer, ToolError> {
        if self.text == "wait" {
            WAITING.notify_one();
            std::future::pending::<()>().await;
        }
        Ok(CountAnswer { words: self.text.split_whitespace().count() })
    }

    fn show(&self, answer: &CountAnswer) -> Shown {
        Shown::Text(format!("{} words", answer.words))
    }

    fn answers() -> AnswerTypes {
        AnswerTypes { finished: TypeSchema::of::<CountAnswer>(), started: None }
    }
}

/// A server without providers, whose table has one more tool.
struct Server {
    app: App,
    router: Router,
    workspace: WorkspaceId,
    admin: String,
    /// The tokens of this workspace and of another one.
    tokens: [String; 2],
    _directory: tempfile::TempDir,
}

impl Server {
    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(StoreConfig::Sqlite(directory.path().join("emergent.db"))).await.unwrap();
        let key = SealingKey::load_or_create(&directory.path().join("key")).unwrap();
        let mut ids = Vec::new();
        for _ in 0..2 {
            let new = NewWorkspace::agent(WorkspaceId::generate(), "image".to_owned());
            ids.push(store.insert_creating(new, None).await.unwrap().id);
        }
        let mut secrets = Vec::new();
        let bound = ids.iter().map(|id| TokenScope::Workspace { workspace_id: *id });
        for scope in std::iter::once(TokenScope::Admin).chain(bound) {
            let new = NewToken { scope, name: format!("token {}", secrets.len()), ttl_seconds: None };
            secrets.push(store.create_token(&new, Utc::now()).await.unwrap().secret);
        }
        let [admin, own, other] = secrets.try_into().unwrap();
        let audit = Audit::start(store.clone());
        let workspaces = Workspaces::new(store, key, Settings::default(), Providers::none());
        let metrics = PrometheusBuilder::new().build_recorder().handle();
        let mut table = standard();
        table.push(ToolEntry::of::<CountRequest>());
        let app = App::with_tools(table, workspaces, audit, metrics);
        let router = router(&app);
        Self { app, router, workspace: ids[0], admin, tokens: [own, other], _directory: directory }
    }

    fn request(&self, token: &str, path: &str, body: &Value) -> Request<Body> {
        Request::post(format!("/api/v1/agent/workspaces/{}/{path}", self.workspace))
            .header(header::AUTHORIZATION, format!("Bearer {token}"))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, text/event-stream")
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", body["method"].as_str().unwrap_or_default())
            .header("mcp-name", body["params"]["name"].as_str().unwrap_or_default())
            .header(header::HOST, "localhost")
            .body(Body::from(body.to_string()))
            .unwrap()
    }

    async fn post(&self, token: &str, path: &str, body: Value) -> (StatusCode, Value) {
        let response = self.router.clone().oneshot(self.request(token, path, &body)).await.unwrap();
        let status = response.status();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap())
    }

    /// Sends a request to the workspace's MCP server.
    async fn mcp(&self, method: &str, mut params: Value) -> Value {
        params["_meta"] = json!({
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
        });
        let message = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let (status, body) = self.post(&self.tokens[0], "mcp", message).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        body["result"].clone()
    }

    /// The outcomes, error codes and summaries of the tool's calls in the audit log, oldest first.
    async fn audited(&self) -> Vec<(AuditOutcome, Option<String>, Value)> {
        self.app.audit.flush().await;
        let filter = AuditFilter { tool: Some("count".to_owned()), ..AuditFilter::default() };
        let page = self.app.workspaces.context.store.audit_page(&filter, None, 100).await.unwrap();
        let entries = page.records.into_iter().rev().map(|record| record.entry);
        entries.map(|entry| (entry.outcome, entry.error_code, entry.request)).collect()
    }
}

#[tokio::test]
async fn an_added_tool_is_available_on_each_front() {
    let server = Server::start().await;
    let text = json!({ "text": "one two" });
    assert_eq!(
        server.post(&server.admin, "count", text.clone()).await,
        (StatusCode::OK, json!({ "words": 2 }))
    );
    let over_mcp = server.mcp("tools/call", json!({ "name": "count", "arguments": text })).await;
    assert_eq!(over_mcp["structuredContent"], json!({ "words": 2 }));
    assert_eq!(over_mcp["content"][0]["text"], "2 words");
    let listed = server.mcp("tools/list", json!({})).await;
    let listed = listed["tools"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&listed["name"], &listed["title"]), (&json!("count"), &json!("Count words")));
    assert_eq!(listed["annotations"]["readOnlyHint"], true);
    assert_eq!(listed["inputSchema"]["required"], json!(["text"]));
    let description = serde_json::to_value(describe(routes(Some(&server.app)))).unwrap();
    let operation = &description["paths"]["/api/v1/agent/workspaces/{id}/count"]["post"];
    assert_eq!(operation["summary"], "Count words.");
    assert_eq!(description["components"]["schemas"]["CountAnswer"]["required"], json!(["words"]));
    let success = (AuditOutcome::Success, None, json!({ "text_bytes": 7 }));
    assert_eq!(server.audited().await, [success.clone(), success]);
}

#[tokio::test]
async fn a_refused_call_is_audited_once() {
    let server = Server::start().await;
    let [own, other] = &server.tokens;
    for (token, body, status) in [
        (own, json!({ "text": "" }), StatusCode::BAD_REQUEST),
        (own, json!({ "texts": "a" }), StatusCode::BAD_REQUEST),
        (other, json!({ "text": "a" }), StatusCode::FORBIDDEN),
        (own, json!({ "text": "a" }), StatusCode::OK),
    ] {
        assert_eq!(server.post(token, "count", body.clone()).await.0, status, "{body}");
    }
    let bad = Some("bad_request".to_owned());
    assert_eq!(
        server.audited().await,
        [
            (AuditOutcome::Failure, bad.clone(), json!({ "text_bytes": 0 })),
            (AuditOutcome::Failure, bad, Value::Null),
            (AuditOutcome::Denied, Some("forbidden".to_owned()), Value::Null),
            (AuditOutcome::Success, None, json!({ "text_bytes": 1 })),
        ]
    );
}

#[tokio::test]
async fn a_call_whose_client_disconnects_is_audited_as_cancelled() {
    let server = Server::start().await;
    let request = server.request(&server.admin, "count", &json!({ "text": "wait" }));
    let call = tokio::spawn(server.router.clone().oneshot(request));
    WAITING.notified().await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    while server.audited().await.is_empty() {
        tokio::task::yield_now().await;
    }
    let cancelled = (AuditOutcome::Failure, Some("cancelled".to_owned()), json!({ "text_bytes": 4 }));
    assert_eq!(server.audited().await, [cancelled]);
}

#[tokio::test]
async fn a_call_whose_token_is_revoked_is_audited_once() {
    let server = Server::start().await;
    let store = &server.app.workspaces.context.store;
    let request = server.request(&server.tokens[0], "count", &json!({ "text": "wait" }));
    let call = tokio::spawn(server.router.clone().oneshot(request));
    WAITING.notified().await;
    let tokens = store.tokens().await.unwrap().readable;
    let own = tokens.iter().find(|token| token.name == "token 1").unwrap();
    store.revoke_token(own.id, Utc::now()).await.unwrap();
    assert_eq!(call.await.unwrap().unwrap().status(), StatusCode::UNAUTHORIZED);
    while server.audited().await.is_empty() {
        tokio::task::yield_now().await;
    }
    let cancelled = (AuditOutcome::Failure, Some("cancelled".to_owned()), json!({ "text_bytes": 4 }));
    assert_eq!(server.audited().await, [cancelled]);
}
