//! Channels that processes open through the agent's socket, with the real agent as the first process of a sandbox.
#![allow(clippy::unwrap_used, reason = "a test that fails shall say where")]

mod sandbox;

use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{GuestCall, UsageAnswer};
use sandbox::{Agent, WORKSPACE_BYTES, inside};

/// A copy of the agent that every user can run.
const PROGRAM: &str = "/workspace/agent";

fn copy_program() {
    std::fs::copy(env!("CARGO_BIN_EXE_emergent-guest"), PROGRAM).unwrap();
    std::fs::set_permissions(PROGRAM, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions("/workspace", std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A channel of `emergent-guest connect`; none when the agent refuses it.
async fn open(command: &mut Command) -> Option<(Connect, GuestClient)> {
    let (host, guest) = UnixStream::pair().unwrap();
    let input = OwnedFd::from(guest.try_clone().unwrap());
    let child = Connect(command.stdin(input).stdout(OwnedFd::from(guest)).spawn().unwrap());
    // The command keeps its ends, but the channel shall end with the agent's.
    command.stdin(Stdio::null()).stdout(Stdio::null());
    host.set_nonblocking(true).unwrap();
    let (reader, writer) = tokio::io::split(tokio::net::UnixStream::from_std(host).unwrap());
    let client = GuestClient::connect(reader, writer).await.ok()?;
    let usage: UsageAnswer = client.start(&GuestCall::Usage(())).await.unwrap().answer().await.unwrap();
    assert!(usage.agent_rss_bytes > 0);
    Some((child, client))
}

/// A process that holds a channel open.
struct Connect(Child);

impl Drop for Connect {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn only_root_can_open_a_channel() {
    inside("only_root_can_open_a_channel", WORKSPACE_BYTES, async || {
        let _agent = Agent::start().await;
        copy_program();
        assert!(open(Command::new(PROGRAM).arg("connect")).await.is_some());
        if std::fs::read_to_string("/proc/self/uid_map").unwrap().trim().ends_with(" 1") {
            eprintln!("run the tests as root: there is no other user here");
            return;
        }
        assert!(open(Command::new(PROGRAM).arg("connect").uid(1000).gid(1000)).await.is_none());
        assert!(open(Command::new(PROGRAM).arg("connect")).await.is_some());
    });
}

#[test]
fn the_server_can_open_a_channel_when_processes_of_the_sandbox_hold_theirs() {
    inside(
        "the_server_can_open_a_channel_when_processes_of_the_sandbox_hold_theirs",
        WORKSPACE_BYTES,
        async || {
            let agent = Agent::start_as_first_process().await;
            copy_program();
            let parent = agent.child.id();
            let pid = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
            let enter = |script: &str| {
                let mut command = Command::new("nsenter");
                command.args(["--target", pid.trim(), "--pid", "sh", "-c", script]);
                command
            };
            // The shell comes from outside, its child does not.
            let mut held = Vec::new();
            while let Some(channel) = open(&mut enter("/workspace/agent connect; exit")).await {
                held.push(channel);
            }
            assert!(!held.is_empty());
            let servers = open(&mut enter("exec /workspace/agent connect")).await;
            assert!(servers.is_some(), "the sandbox holds {} channels", held.len());
        },
    );
}
