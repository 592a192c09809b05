//! Hosted servers whose sandboxes can't be started, because there are no providers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use emergent_store::{NewWorkspace, StoreError};
use emergent_wire::WorkspaceId;
use emergent_wire::mcp::{McpConfig, McpStatus, RegisterMcpServer};
use emergent_wire::workspace::ContainerType;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use super::hosted::HostedServer;
use super::{McpError, McpHost};
use crate::workspace::test_support::without_providers;

/// The log lines of a test.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn lines(&self) -> Vec<Value> {
        let text = String::from_utf8(self.0.lock().clone()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

async fn host() -> (tempfile::TempDir, Arc<McpHost>) {
    let directory = tempfile::tempdir().unwrap();
    let workspaces = without_providers(directory.path()).await;
    (directory, McpHost::new(workspaces))
}

/// Writes the row of a server.
async fn insert(host: &McpHost, name: &str, change: impl FnOnce(&mut McpConfig)) -> WorkspaceId {
    let request: RegisterMcpServer =
        serde_json::from_value(json!({ "name": name, "image": "image" })).unwrap();
    let mut config = McpConfig::from(&request);
    change(&mut config);
    let new = NewWorkspace {
        container_type: ContainerType::McpServer,
        name: Some(name.to_owned()),
        mcp_config: Some(config),
        ..NewWorkspace::agent(WorkspaceId::generate(), "image")
    };
    let store = &host.workspaces.context.store;
    let id = store.insert_creating(new, None).await.unwrap().id;
    store.set_ready(id, Utc::now()).await.unwrap();
    id
}

#[tokio::test]
async fn log_lines_of_a_supervisor_have_the_name_and_the_id_of_its_server() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().json().with_writer(move || writer.clone()).finish();
    let _default = tracing::subscriber::set_default(subscriber);
    let (_directory, host) = host().await;
    let id = insert(&host, "files", |_| {}).await;
    let request = tracing::info_span!("request", request = "registration");
    tracing::Instrument::instrument(host.adopt_all(), request).await;
    host.supervised(id).await.unwrap().first_start(Duration::from_secs(10)).await;
    let lines = log.lines();
    let target = |line: &&Value| line["target"].as_str().unwrap().ends_with("mcp::supervise");
    let line = lines.iter().find(target).unwrap();
    // The supervisor outlives the request that has started it.
    assert_eq!(line["spans"].as_array().unwrap().len(), 1, "{line}");
    assert_eq!(
        (&line["span"]["mcp_server"], &line["span"]["workspace"]),
        (&json!("files"), &json!(id.to_string()))
    );
    assert_eq!(host.report(id).await.unwrap().status, McpStatus::Error);
    host.shut_down().await;
}

#[tokio::test]
async fn a_row_with_damaged_warnings_is_listed_as_unreadable() {
    let (_directory, host) = host().await;
    let [whole, damaged] = [insert(&host, "whole", |_| {}).await, insert(&host, "damaged", |_| {}).await];
    let warnings = Map::from_iter([("warnings".to_owned(), json!("not a list"))]);
    host.workspaces.context.store.merge_metadata(damaged, warnings).await.unwrap();
    let reports = host.reports().await.unwrap();
    assert_eq!(reports.readable.iter().map(|report| report.record.workspace.id).collect::<Vec<_>>(), [whole]);
    assert_eq!(reports.unreadable.iter().map(|row| row.id).collect::<Vec<_>>(), [damaged.0]);
    let error = host.report(damaged).await.err().unwrap();
    assert!(matches!(error, McpError::Store(StoreError::Corrupt { column: "metadata", .. })), "{error}");
}

#[tokio::test]
async fn a_server_that_speaks_http_is_not_started_without_a_port() {
    let (_directory, host) = host().await;
    let id = insert(&host, "http", |config| config.stdio_bridge = false).await;
    let record = host.workspaces.context.store.workspace_record(id).await.unwrap();
    let error = HostedServer::new(&record).err().unwrap();
    assert!(matches!(error, StoreError::Corrupt { column: "mcp_config", .. }), "{error}");
}

#[tokio::test]
async fn an_unknown_name_is_an_error_of_its_own() {
    let (_directory, host) = host().await;
    insert(&host, "files", |_| {}).await;
    assert!(host.find("files").await.is_ok());
    for unknown in ["other", &WorkspaceId::generate().to_string()] {
        assert!(matches!(host.find(unknown).await, Err(McpError::NotFound(name)) if name == unknown));
    }
}
