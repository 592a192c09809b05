//! Agents of older versions, as bytes: the host speaks the agent's version and sends nothing that is newer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use emergent_guest_client::{CallError, Event, GuestClient};
use emergent_guest_protocol::{AgentTooOld, BashCall, Configuration, GuestCall, ListenCall};
use emergent_wire::tools::{BashAnswer, BashRequest};
use emergent_wire::{ErrorCode, OperationId};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const HELLO: u8 = 1;
const CALL: u8 = 2;
const STDOUT: u8 = 6;
const RESULT: u8 = 9;
const ERROR: u8 = 10;
/// The kinds that a host of version 1 or 2 sends.
const OLD_KINDS: std::ops::RangeInclusive<u8> = 1..=12;

/// Version 1 as its agents read it: these fields of `configure`, and no others.
const CONFIGURE_1: [&str; 6] =
    ["environment", "confined_to", "nameservers", "memory_bytes", "watched_disk_bytes", "without_shells"];
/// Version 2 has one more.
const CONFIGURE_2: [&str; 1] = ["max_tasks"];

async fn read_frame(stream: &mut UnixStream) -> Option<(u8, u32, Vec<u8>)> {
    let mut header = [0; 9];
    stream.read_exact(&mut header).await.ok()?;
    let length = u32::from_be_bytes(header[..4].try_into().unwrap());
    let mut payload = vec![0; length as usize];
    stream.read_exact(&mut payload).await.unwrap();
    Some((header[4], u32::from_be_bytes(header[5..].try_into().unwrap()), payload))
}

async fn write_frame(stream: &mut UnixStream, kind: u8, call: u32, payload: &[u8]) {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes().to_vec();
    frame.push(kind);
    frame.extend_from_slice(&call.to_be_bytes());
    frame.extend_from_slice(payload);
    stream.write_all(&frame).await.unwrap();
}

/// An agent of an older version. Returns the names of the calls that it got when the host closes the channel.
async fn agent(mut stream: UnixStream, version: u16) -> Vec<String> {
    let (kind, call, payload) = read_frame(&mut stream).await.unwrap();
    assert_eq!((kind, call), (HELLO, 0));
    let hello: Value = serde_json::from_slice(&payload).unwrap();
    assert!(hello["oldest"].as_u64().unwrap() <= u64::from(version), "{hello}");
    let hello = json!({ "protocol": version, "version": "0.0.1", "boot_id": "b" });
    write_frame(&mut stream, HELLO, 0, hello.to_string().as_bytes()).await;
    let mut names = Vec::new();
    while let Some((kind, id, payload)) = read_frame(&mut stream).await {
        assert!(OLD_KINDS.contains(&kind), "frame kind {kind}");
        if kind != CALL {
            continue;
        }
        let message: Value = serde_json::from_slice(&payload).unwrap();
        let (name, body) = message.as_object().unwrap().iter().next().unwrap();
        names.push(name.clone());
        match name.as_str() {
            "configure" => {
                let later: &[&str] = if version == 1 { &[] } else { &CONFIGURE_2 };
                for field in body.as_object().unwrap().keys().map(String::as_str) {
                    assert!(CONFIGURE_1.contains(&field) || later.contains(&field), "{field}");
                }
                write_frame(&mut stream, RESULT, id, b"{}").await;
            }
            "bash" => {
                write_frame(&mut stream, STDOUT, id, b"hello\n").await;
                let answer = json!({
                    "operation_id": body["operation_id"], "stdout": "", "stderr": "", "exit_code": 0,
                    "truncated": false, "stdout_bytes": 6, "stderr_bytes": 0, "duration_ms": 1,
                });
                write_frame(&mut stream, RESULT, id, answer.to_string().as_bytes()).await;
            }
            other => {
                let error = json!({ "code": "bad_request", "message": format!("unknown variant `{other}`") });
                write_frame(&mut stream, ERROR, id, error.to_string().as_bytes()).await;
            }
        }
    }
    names
}

async fn a_host_works_with_an_agent_of(version: u16) {
    let (host, guest) = UnixStream::pair().unwrap();
    let agent = tokio::spawn(agent(guest, version));
    let (reader, writer) = tokio::io::split(host);
    let client = GuestClient::connect(reader, writer).await.unwrap();
    assert_eq!(client.protocol(), version);

    let configuration = Configuration {
        memory_bytes: Some(1 << 30),
        max_tasks: Some(512),
        without_shells: true,
        ..Configuration::default()
    };
    client.start(&GuestCall::Configure(configuration)).await.unwrap().answer::<Value>().await.unwrap();

    let request: BashRequest = serde_json::from_value(json!({ "command": "echo hello" })).unwrap();
    let bash = BashCall {
        operation_id: OperationId(uuid::uuid!("01890000-0000-7000-8000-000000000001")),
        request,
        stream: true,
        collect: false,
    };
    let mut call = client.start(&GuestCall::Bash(bash)).await.unwrap();
    assert_eq!(call.next().await.unwrap(), Event::Stdout("hello\n".into()));
    assert_eq!(call.answer::<BashAnswer>().await.unwrap().exit_code, Some(0));

    // A call that the agent does not know is not sent, and the error gives the remedy.
    let needed = 3;
    let error = client.listen(0).await.err().unwrap();
    assert!(matches!(error, CallError::AgentTooOld(AgentTooOld { agent, needed: 3 }) if agent == version));
    let text = error.to_string();
    assert!(text.contains(&format!("protocol {version}")), "{text}");
    assert!(text.contains(&format!("protocol {needed}")), "{text}");
    assert!(text.contains("restart the workspace"), "{text}");
    let error = client.start(&GuestCall::Listen(ListenCall { port: 80 })).await.err().unwrap();
    assert!(matches!(error, CallError::AgentTooOld(_)), "{error}");

    // A call that some agents of the version know is sent, and the agent's refusal is an answer.
    let error = client.start(&GuestCall::Flush(())).await.unwrap().answer::<Value>().await.unwrap_err();
    assert!(matches!(error, CallError::Failed(error) if error.code == ErrorCode::BadRequest));
    drop(client);
    assert_eq!(agent.await.unwrap(), ["configure", "bash", "flush"]);
}

#[tokio::test]
async fn an_agent_of_version_1_gets_only_calls_and_fields_of_version_1() {
    a_host_works_with_an_agent_of(1).await;
}

#[tokio::test]
async fn an_agent_of_version_2_gets_only_calls_and_fields_of_version_2() {
    a_host_works_with_an_agent_of(2).await;
}

/// Frames that the version does not have end the channel.
#[tokio::test]
async fn an_older_agent_that_sends_newer_frames_ends_the_channel() {
    for newer in [14, 15] {
        let (host, mut guest) = UnixStream::pair().unwrap();
        let payload: &[u8] = if newer == 14 { b"{}" } else { b"" };
        write_frame(&mut guest, HELLO, 0, br#"{"protocol":2,"version":"v","boot_id":"b"}"#).await;
        let (reader, writer) = tokio::io::split(host);
        let client = GuestClient::connect(reader, writer).await.unwrap();
        let call = client.start(&GuestCall::Usage(())).await.unwrap();
        write_frame(&mut guest, newer, 1, payload).await;
        assert!(matches!(call.answer::<Value>().await, Err(CallError::Lost(_))));
        assert!(client.is_closed());
    }
}
