//! Connections of the host to programs in the sandbox, with the real agent and programs that listen on TCP.
#![allow(clippy::unwrap_used, reason = "a test that fails shall say where")]

mod sandbox;

use std::net::{Ipv4Addr, TcpListener};

use emergent_guest_protocol::{ConnectCall, GuestCall, INITIAL_CREDIT, UsageAnswer};
use sandbox::{Agent, WORKSPACE_BYTES, inside};

#[test]
fn a_cancelled_connection_ends_although_its_program_does_not_read() {
    inside("a_cancelled_connection_ends_although_its_program_does_not_read", WORKSPACE_BYTES, async || {
        // Small buffers: the input of one call does not fit into them.
        for file in ["tcp_rmem", "tcp_wmem"] {
            std::fs::write(format!("/proc/sys/net/ipv4/{file}"), "4096 8192 8192").unwrap();
        }
        let agent = Agent::start().await;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let message = ConnectCall { port, wait_ms: 0, probe: false };
        let call = agent.client.start(&GuestCall::Connect(message)).await.unwrap();
        call.send_input(&vec![7; INITIAL_CREDIT as usize / 2]).await.unwrap();
        // The first byte is there, so the agent writes the first piece, which does not fit.
        let (program, _) = tokio::task::spawn_blocking(move || listener.accept()).await.unwrap().unwrap();
        assert_eq!(program.peek(&mut [0]).unwrap(), 1);
        assert!(agent.thread_names().iter().any(|name| name == "tunnel"));
        drop(call);
        // Nothing but its threads shows that the agent has ended the call.
        while agent.thread_names().iter().any(|name| name == "tunnel") {
            let usage = agent.client.start(&GuestCall::Usage(())).await.unwrap();
            usage.answer::<UsageAnswer>().await.unwrap();
        }
    });
}
