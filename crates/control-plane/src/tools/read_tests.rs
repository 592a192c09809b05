//! Raw reads of files whose agent is slow.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{AgentHello, Decoder, Frame, Kind, PROTOCOL_VERSION, Receiver};
use emergent_wire::access::TokenScope;
use emergent_wire::workspace::ProviderName;
use emergent_wire::{OperationId, TokenId, WorkspaceId};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::*;
use crate::audit::Audit;
use crate::caller::{Caller, Principal};
use crate::workspace::test_support::without_providers;
use crate::workspace::{SandboxConnection, WorkspaceError, Workspaces};

/// An agent that reads nothing after its HELLO. It sends a byte of the first call now and then, so that it does not count as silent.
async fn deaf_agent(mut stream: DuplexStream) {
    let hello =
        AgentHello { protocol: PROTOCOL_VERSION, version: "test".to_owned(), boot_id: "1".to_owned() };
    stream.write_all(&Frame::message(Kind::Hello, 0, &hello).unwrap().to_bytes()).await.unwrap();
    let piece = Frame::new(Kind::Stdout, 1, Bytes::from_static(b"x")).to_bytes();
    loop {
        tokio::time::sleep(Duration::from_secs(5)).await;
        if stream.write_all(&piece).await.is_err() {
            return;
        }
    }
}

/// An agent whose files have one byte. It sends so many bytes after it, with this pause before each of them.
async fn agent(stream: DuplexStream, more: usize, pause: Duration) {
    let hello =
        AgentHello { protocol: PROTOCOL_VERSION, version: "test".to_owned(), boot_id: "1".to_owned() };
    let (mut reader, mut writer) = tokio::io::split(stream);
    let (frames, mut written) = mpsc::unbounded_channel::<Frame>();
    tokio::spawn(async move {
        while let Some(frame) = written.recv().await {
            if writer.write_all(&frame.to_bytes()).await.is_err() {
                return;
            }
        }
    });
    let (mut decoder, mut buffer) = (Decoder::new(Receiver::Guest), [0; 1024]);
    while let Ok(read @ 1..) = reader.read(&mut buffer).await {
        let mut bytes = &buffer[..read];
        while let Some(frame) = decoder.decode(&mut bytes).unwrap() {
            let _ = match frame.kind {
                Kind::Hello => frames.send(Frame::message(Kind::Hello, 0, &hello).unwrap()),
                Kind::Ping => frames.send(Frame::new(Kind::Pong, 0, frame.payload)),
                Kind::Call => {
                    tokio::spawn(send_file(frames.clone(), frame.call, more, pause));
                    Ok(())
                }
                _ => Ok(()),
            };
        }
    }
}

/// Answers a call with the bytes of a file.
async fn send_file(frames: mpsc::UnboundedSender<Frame>, call: u32, more: usize, pause: Duration) {
    for number in 0..=more {
        if number > 0 {
            tokio::time::sleep(pause).await;
        }
        let _ = frames.send(Frame::new(Kind::Stdout, call, Bytes::from_static(b"x")));
    }
    let _ = frames.send(Frame::message(Kind::Result, call, &json!({})).unwrap());
}

fn admin() -> Caller {
    let principal =
        Principal { token_id: TokenId::generate(), name: "admin".to_owned(), scope: TokenScope::Admin };
    Caller { principal, request_id: None, counts_as_use: false }
}

struct World {
    tools: Tools,
    workspaces: Arc<Workspaces>,
    id: WorkspaceId,
    _directory: tempfile::TempDir,
}

impl World {
    async fn start(more: usize, pause: Duration) -> Self {
        let (host, guest) = tokio::io::duplex(1 << 16);
        tokio::spawn(agent(guest, more, pause));
        Self::with_agent(host).await
    }

    async fn with_agent(host: DuplexStream) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let workspaces = without_providers(directory.path()).await;
        let (reader, writer) = tokio::io::split(host);
        let channel = GuestClient::connect(reader, writer).await.unwrap();
        let id = WorkspaceId::generate();
        let connection = SandboxConnection { channel, provider: ProviderName::Docker };
        workspaces.context.live(id).set_connection(connection);
        let audit = Audit::start(workspaces.context.store.clone());
        let tools = Tools::new(standard(), Arc::clone(&workspaces), audit);
        Self { tools, workspaces, id, _directory: directory }
    }

    async fn read(&self) -> Result<Value, ToolError> {
        let arguments = json!({ "file_path": "file", "raw": true });
        let arguments = Arguments::Object(arguments.as_object().unwrap().clone());
        let read = self.tools.find("read").unwrap();
        let call = self.tools.prepare(&admin(), self.id, read, arguments).await?;
        call.run(Output::InAnswer).await?.to_value()
    }
}

#[tokio::test]
async fn a_small_file_is_read_while_large_files_have_all_places() {
    let world = World::start(0, Duration::ZERO).await;
    let other = WorkspaceId::generate();
    let mut places = Vec::new();
    for id in [world.id, world.id, other, other] {
        places.push(world.tools.large_file(id).await.unwrap());
    }
    assert_eq!(world.read().await.unwrap()["content"], "eA==");
}

#[tokio::test]
async fn a_file_that_arrives_byte_by_byte_is_given_up_after_its_time() {
    let world = World::start(20, Duration::from_secs(25)).await;
    tokio::time::pause();
    let begun = Instant::now();
    let failed = world.read().await.err().unwrap();
    assert!(matches!(failed, ToolError::Workspace(WorkspaceError::NoAnswer(_))), "{failed}");
    assert!(begun.elapsed() < Duration::from_secs(200), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_call_to_an_agent_that_does_not_read_ends_in_time() {
    let (host, guest) = tokio::io::duplex(64);
    tokio::spawn(deaf_agent(guest));
    let world = World::with_agent(host).await;
    tokio::time::pause();
    let begun = Instant::now();
    // More calls than fit into the channel's queue, and none of them has a time limit.
    for _ in 0..100 {
        let (calls, id) = (Arc::clone(&world.workspaces.calls), world.id);
        let follow = async move {
            calls.follow_operation(&admin(), id, OperationId::generate(), 0).await?.next().await
        };
        tokio::spawn(follow);
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(world.read().await.is_err());
    assert!(begun.elapsed() < Duration::from_secs(200), "{:?}", begun.elapsed());
}
