//! The protocol as bytes. A change of this snapshot is a change of the protocol: running sandboxes have the old agent, so
//! it needs a new version and a host that still speaks the old one.

use std::collections::BTreeMap;

use emergent_guest_protocol::*;
use emergent_wire::OperationId;
use emergent_wire::git::{GitAction, GitRequest};
use emergent_wire::tools::{BashRequest, EditRequest, GlobRequest, GrepRequest, ReadRequest};
use emergent_wire::{ErrorCode, ErrorDetail};

#[test]
fn messages_and_frames_are_frozen() {
    let operation_id = OperationId(uuid::uuid!("01890000-0000-7000-8000-000000000001"));
    let bash = BashRequest {
        command: "make".into(),
        workdir: Some("/workspace/a".into()),
        timeout_ms: Some(5),
        environment: BTreeMap::from([("A".into(), "b".into())]),
        background: false,
    };
    let git = GitRequest {
        repository_url: Some("https://host.example/r".into()),
        branch: Some("main".into()),
        limit: Some(1),
        ..GitRequest::new(GitAction::Clone)
    };
    let calls = [
        GuestCall::Configure(Configuration {
            environment: BTreeMap::from([("KEY".into(), "value".into())]),
            confined_to: vec!["/workspace".into()],
            nameservers: vec!["192.0.2.53".into()],
            memory_bytes: Some(1),
            watched_disk_bytes: Some(2),
            max_tasks: Some(512),
            without_shells: true,
        }),
        GuestCall::Bash(BashCall { operation_id, request: bash, stream: true, collect: false }),
        GuestCall::Attach(AttachCall { operation_id, offset: 7, follow: true }),
        GuestCall::KillOperation(OperationCall { operation_id }),
        GuestCall::Read(ReadRequest { file_path: "a".into(), offset: Some(1), limit: Some(2), raw: false }),
        GuestCall::Write(WriteCall { file_path: "a".into() }),
        GuestCall::Edit(EditRequest {
            file_path: "a".into(),
            old_string: "b".into(),
            new_string: "c".into(),
            replace_all: true,
            expected_sha256: None,
        }),
        GuestCall::Glob(GlobRequest { pattern: "**/*.rs".into(), path: None, limit: None }),
        GuestCall::Grep(GrepRequest { pattern: "x".into(), ..Default::default() }),
        GuestCall::Git(git),
        GuestCall::Usage(()),
        GuestCall::Serve(ServeCall {
            command: vec!["node".into(), "index.js".into()],
            environment: BTreeMap::from([("KEY".into(), "value".into())]),
            directory: Some("/srv".into()),
            user: Some("1000:1000".into()),
            owned: vec!["/data".into()],
        }),
        GuestCall::Connect(ConnectCall { port: 8080, wait_ms: 1000, probe: true }),
        GuestCall::Listen(ListenCall { port: 8080 }),
        GuestCall::Shutdown(ShutdownCall { grace_ms: 10_000 }),
        // Only for virtual machines. Their agent is of the same version as the manager that starts them.
        GuestCall::Machine(MachineCall {
            hostname: "0123456789ab".into(),
            machine_id: "0123456789abcdef0123456789abcdef".into(),
            unix_time_ms: 1_700_000_000_000,
            entropy: vec![1, 2, 3],
            mac: Some("06:00:0a:00:00:02".into()),
            address: Some([10, 0, 0, 2].into()),
            prefix: 30,
            gateway: Some([10, 0, 0, 1].into()),
            nameservers: vec!["192.0.2.53".into()],
            environment: BTreeMap::from([("LANG".into(), "C.UTF-8".into())]),
        }),
        GuestCall::Flush(()),
        GuestCall::PowerOff(ShutdownCall { grace_ms: 8_000 }),
    ];
    let error = ErrorDetail::new(ErrorCode::FileNotFound, "no such file");
    let frames = [
        Frame::message(Kind::Hello, 0, &HostHello::default()).unwrap(),
        Frame::message(Kind::Hello, 0, &AgentHello { protocol: 1, version: "v".into(), boot_id: "b".into() })
            .unwrap(),
        Frame::message(Kind::Call, 1, &calls[10]).unwrap(),
        Frame::new(Kind::Input, 2, *b"bytes"),
        Frame::new(Kind::InputEnd, 2, []),
        Frame::new(Kind::Cancel, 3, []),
        Frame::new(Kind::Stdout, 4, *b"out"),
        Frame::new(Kind::Stderr, 4, *b"err"),
        Frame::credit(4, 65536),
        Frame::message(Kind::Result, 5, &UsageAnswer::default()).unwrap(),
        Frame::message(Kind::Error, 6, &error).unwrap(),
        Frame::new(Kind::Ping, 0, 9_u64.to_be_bytes()),
        Frame::new(Kind::Pong, 0, 9_u64.to_be_bytes()),
        Frame::accept(8, 7),
        Frame::message(Kind::Started, 7, &Listening { port: 8080 }).unwrap(),
        Frame::new(Kind::OutputEnd, 8, []),
    ];
    let mut text = format!("protocol {PROTOCOL_VERSION}\n\n");
    for call in &calls {
        let json = serde_json::to_string(call).unwrap();
        assert!(json.starts_with(&format!("{{\"{}\":", call.name())), "{} names {json}", call.name());
        text += &json;
        text.push('\n');
    }
    for frame in &frames {
        text += &format!("\n{frame:?}\n{}", hex::encode(&frame.to_bytes()[..HEADER_BYTES]));
        text += &format!(" {}\n", String::from_utf8_lossy(&frame.payload).escape_debug());
    }
    insta::assert_snapshot!(text);
}
