//! Hosted servers whose sandboxes can't be started, because there are no providers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{AgentHello, Decoder, Frame, Kind, PROTOCOL_VERSION, Receiver};
use emergent_store::{NewWorkspace, StoreError};
use emergent_wire::WorkspaceId;
use emergent_wire::mcp::{McpConfig, McpStatus, RegisterMcpServer};
use emergent_wire::workspace::{ContainerType, ProviderName};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;

use super::hosted::HostedServer;
use super::{McpError, McpHost};
use crate::workspace::SandboxConnection;
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

/// An agent that answers no call. Reports the kinds of the frames that it gets for calls.
async fn silent_agent(mut stream: DuplexStream, frames: mpsc::UnboundedSender<Kind>) {
    let hello =
        AgentHello { protocol: PROTOCOL_VERSION, version: "test".to_owned(), boot_id: "1".to_owned() };
    let (mut decoder, mut buffer) = (Decoder::new(Receiver::Guest), [0; 1024]);
    while let Ok(read @ 1..) = stream.read(&mut buffer).await {
        let mut bytes = &buffer[..read];
        while let Some(frame) = decoder.decode(&mut bytes).unwrap() {
            if frame.kind == Kind::Hello {
                let hello = Frame::message(Kind::Hello, 0, &hello).unwrap();
                stream.write_all(&hello.to_bytes()).await.unwrap();
            } else {
                frames.send(frame.kind).unwrap();
            }
        }
    }
}

#[tokio::test]
async fn a_connection_to_a_server_that_speaks_http_ends_with_its_client() {
    let (_directory, host) = host().await;
    let id = insert(&host, "http", |config| {
        config.stdio_bridge = false;
        config.port = Some(80);
    });
    let record = host.workspaces.context.store.workspace_record(id.await).await.unwrap();
    let (server, _commands) = HostedServer::new(&record).unwrap();
    server.bridge.let_in();
    let (near, far) = tokio::io::duplex(1 << 16);
    let (frames, mut received) = mpsc::unbounded_channel();
    tokio::spawn(silent_agent(far, frames));
    let (reader, writer) = tokio::io::split(near);
    let channel = GuestClient::connect(reader, writer).await.unwrap();
    let connection = SandboxConnection { channel, provider: ProviderName::Docker };
    host.workspaces.context.live(server.id).set_connection(connection);
    let mut client = host.connect(&server, 80).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    for expected in [Kind::Call, Kind::Input] {
        assert_eq!(received.recv().await, Some(expected));
    }
    drop(client);
    let cancelled = async { while received.recv().await.unwrap() != Kind::Cancel {} };
    tokio::time::timeout(Duration::from_secs(10), cancelled).await.unwrap();
}
