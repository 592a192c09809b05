//! Listeners in the sandbox, with the real agent over a real socket and programs that connect over TCP.
#![allow(clippy::unwrap_used, reason = "a test that fails shall say where")]

mod sandbox;

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::thread::JoinHandle;

use emergent_guest_client::{CallError, GuestListener, TunnelConnection};
use emergent_guest_protocol::{GuestCall, MAX_ACCEPTS, MAX_LISTENERS, UsageAnswer};
use emergent_wire::ErrorCode;
use sandbox::{Agent, WORKSPACE_BYTES, inside};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn connect(port: u16) -> TcpStream {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()
}

/// Runs a program in the sandbox beside the host's tasks.
fn program<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::spawn(body)
}

async fn join<T: Send + 'static>(program: JoinHandle<T>) -> T {
    tokio::task::spawn_blocking(|| program.join().unwrap()).await.unwrap()
}

/// A connection and its two ends.
async fn pair(listener: &mut GuestListener) -> (TcpStream, TunnelConnection) {
    let port = listener.port();
    let program = program(move || connect(port));
    let host = listener.accept().await.unwrap();
    (join(program).await, host)
}

#[test]
fn bytes_go_both_ways_and_each_side_ends_alone() {
    inside("bytes_go_both_ways_and_each_side_ends_alone", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        let mut listener = agent.client.listen(0).await.unwrap();
        // The program ends its side first and still gets the answer.
        let (mut guest, mut host) = pair(&mut listener).await;
        let asked = program(move || {
            guest.write_all(b"question").unwrap();
            guest.shutdown(Shutdown::Write).unwrap();
            let mut answer = String::new();
            guest.read_to_string(&mut answer).unwrap();
            answer
        });
        let mut question = String::new();
        host.read_to_string(&mut question).await.unwrap();
        assert_eq!(question, "question");
        host.write_all(b"answer").await.unwrap();
        host.shutdown().await.unwrap();
        assert_eq!(join(asked).await, "answer");

        // The host ends its side first and still gets the rest.
        let (mut guest, mut host) = pair(&mut listener).await;
        host.write_all(b"go").await.unwrap();
        host.shutdown().await.unwrap();
        let told = program(move || {
            let mut text = String::new();
            guest.read_to_string(&mut text).unwrap();
            guest.write_all(b"the rest").unwrap();
            text
        });
        let mut rest = String::new();
        host.read_to_string(&mut rest).await.unwrap();
        assert_eq!((join(told).await.as_str(), rest.as_str()), ("go", "the rest"));
    });
}

#[test]
fn the_host_can_speak_first() {
    inside("the_host_can_speak_first", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        let mut listener = agent.client.listen(0).await.unwrap();
        let (mut guest, mut host) = pair(&mut listener).await;
        host.write_all(b"220 ready\r\n").await.unwrap();
        let mut greeting = [0; 11];
        let greeting = join(program(move || {
            guest.read_exact(&mut greeting).unwrap();
            greeting
        }))
        .await;
        assert_eq!(&greeting, b"220 ready\r\n");
    });
}

#[test]
fn a_connection_without_a_parked_accept_waits_for_one() {
    inside("a_connection_without_a_parked_accept_waits_for_one", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        let mut listener = agent.client.listen(0).await.unwrap();
        // More than are parked, before the host takes the first.
        let mut guests: Vec<TcpStream> = (0..12).map(|_| connect(listener.port())).collect();
        for (number, guest) in guests.iter_mut().enumerate() {
            guest.write_all(&[u8::try_from(number).unwrap()]).unwrap();
        }
        let mut hosts = Vec::new();
        for _ in 0..guests.len() {
            let mut host = listener.accept().await.unwrap();
            let number = host.read_u8().await.unwrap();
            host.write_all(&[number + 100]).await.unwrap();
            hosts.push(host);
        }
        let answers = join(program(move || {
            let mut byte = [0];
            guests.iter_mut().map(|guest| guest.read_exact(&mut byte).map(|()| byte[0]).unwrap()).collect()
        }))
        .await;
        let answers: Vec<u8> = answers;
        assert_eq!(answers, (100..112).collect::<Vec<u8>>());
    });
}

#[test]
fn a_thousand_connections_cost_no_thread_and_leave_nothing() {
    inside("a_thousand_connections_cost_no_thread_and_leave_nothing", WORKSPACE_BYTES, async || {
        const CONNECTIONS: usize = 1000;
        let agent = Agent::start().await;
        let mut listener = agent.client.listen(0).await.unwrap();
        let (descriptors, port) = (agent.descriptors(), listener.port());
        // All connect first: the agent and the kernel hold a part of them.
        let programs = program(move || {
            let programs: Vec<_> = (0..CONNECTIONS)
                .map(|number| {
                    let body = move || {
                        let mut guest = connect(port);
                        let sent = number.to_be_bytes();
                        guest.write_all(&sent).unwrap();
                        guest.shutdown(Shutdown::Write).unwrap();
                        let mut answer = Vec::new();
                        guest.read_to_end(&mut answer).unwrap();
                        assert_eq!(answer, sent);
                    };
                    std::thread::Builder::new().stack_size(64 << 10).spawn(body).unwrap()
                })
                .collect();
            programs.into_iter().for_each(|program| program.join().unwrap());
        });
        let mut threads = 0;
        let mut echoes = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut host = listener.accept().await.unwrap();
            threads = threads.max(agent.threads());
            echoes.push(tokio::spawn(async move {
                let mut bytes = Vec::new();
                host.read_to_end(&mut bytes).await.unwrap();
                host.write_all(&bytes).await.unwrap();
                host.shutdown().await.unwrap();
                // The last frame of the call.
                assert_eq!(host.read(&mut [0]).await.unwrap(), 0);
            }));
        }
        for echo in echoes {
            echo.await.unwrap();
        }
        join(programs).await;
        assert!(threads < 20, "{threads} threads");
        // Other calls still work, and the descriptors of ended connections are closed.
        while agent.descriptors() > descriptors {
            let usage: UsageAnswer =
                agent.client.start(&GuestCall::Usage(())).await.unwrap().answer().await.unwrap();
            assert!(usage.agent_rss_bytes > 0);
        }
    });
}

#[test]
fn connections_over_the_limit_wait_and_other_calls_go_on() {
    inside("connections_over_the_limit_wait_and_other_calls_go_on", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        let mut listener = agent.client.listen(0).await.unwrap();
        let port = listener.port();
        let mut held = Vec::new();
        for _ in 0..MAX_ACCEPTS {
            held.push(pair(&mut listener).await);
        }
        let waiting = program(move || {
            let mut guest = connect(port);
            let mut byte = [0];
            guest.read_exact(&mut byte).map(|()| byte)
        });
        let usage = agent.client.start(&GuestCall::Usage(())).await.unwrap();
        usage.answer::<UsageAnswer>().await.unwrap();
        // A place is free when a connection has ended.
        let accepted = tokio::spawn(async move {
            let mut host = listener.accept().await.unwrap();
            host.write_all(b"x").await.unwrap();
            (listener, host)
        });
        drop(held.pop());
        let _open = accepted.await.unwrap();
        assert_eq!(join(waiting).await.unwrap(), *b"x");
    });
}

#[test]
fn a_connection_that_the_host_drops_is_reset_and_one_that_it_ends_is_delivered() {
    inside(
        "a_connection_that_the_host_drops_is_reset_and_one_that_it_ends_is_delivered",
        WORKSPACE_BYTES,
        async || {
            let agent = Agent::start().await;
            let mut listener = agent.client.listen(0).await.unwrap();
            let (mut guest, host) = pair(&mut listener).await;
            drop(host);
            let end = join(program(move || guest.read(&mut [0]).unwrap_err().kind())).await;
            assert_eq!(end, ErrorKind::ConnectionReset);

            // As much as a call's first credit allows, and more than the socket takes at once.
            let (mut guest, mut host) = pair(&mut listener).await;
            let answer = vec![7; 200 << 10];
            host.write_all(&answer).await.unwrap();
            host.shutdown().await.unwrap();
            drop(host);
            let received = join(program(move || {
                guest.write_all(b"nobody reads this").unwrap();
                let mut received = Vec::new();
                guest.read_to_end(&mut received).map(|_| received)
            }))
            .await;
            assert!(received.unwrap() == answer);
        },
    );
}

#[test]
fn the_end_of_a_listener_or_of_its_channel_closes_port_and_connections() {
    inside(
        "the_end_of_a_listener_or_of_its_channel_closes_port_and_connections",
        WORKSPACE_BYTES,
        async || {
            let mut agent = Agent::start().await;
            let is_refused = |port| match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                Err(error) => error.kind() == ErrorKind::ConnectionRefused,
                Ok(_) => false,
            };
            let mut listener = agent.client.listen(0).await.unwrap();
            let port = listener.port();
            let (mut guest, mut host) = pair(&mut listener).await;
            drop(listener);
            assert!(join(program(move || guest.read(&mut [0]))).await.is_err());
            assert!(host.read(&mut [0]).await.is_err());
            assert!(is_refused(port));
            // The port is free again.
            let mut listener = agent.client.listen(port).await.unwrap();
            assert_eq!(listener.port(), port);

            let (mut guest, mut host) = pair(&mut listener).await;
            agent.client.close();
            assert!(join(program(move || guest.read(&mut [0]))).await.is_err());
            assert!(host.read(&mut [0]).await.is_err());
            assert!(matches!(listener.accept().await, Err(CallError::Lost(_))));
            // The agent keeps running until it gets SIGTERM.
            assert!(agent.child.try_wait().unwrap().is_none());
        },
    );
}

#[test]
fn an_agent_that_dies_fails_its_connections() {
    inside("an_agent_that_dies_fails_its_connections", WORKSPACE_BYTES, async || {
        let mut agent = Agent::start().await;
        let mut listener = agent.client.listen(0).await.unwrap();
        let (_guest, mut host) = pair(&mut listener).await;
        agent.child.kill().unwrap();
        assert!(host.read(&mut [0]).await.is_err());
        assert!(matches!(listener.accept().await, Err(CallError::Lost(_))));
    });
}

#[test]
fn a_port_in_use_and_too_many_listeners_are_refused() {
    inside("a_port_in_use_and_too_many_listeners_are_refused", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        let first = agent.client.listen(0).await.unwrap();
        let code = |result: Result<GuestListener, CallError>| match result {
            Err(CallError::Failed(error)) => error.code,
            other => panic!("{:?}", other.map(|listener| listener.port()).err()),
        };
        assert_eq!(code(agent.client.listen(first.port()).await), ErrorCode::Conflict);
        let mut more = Vec::new();
        for _ in 1..MAX_LISTENERS {
            more.push(agent.client.listen(0).await.unwrap());
        }
        assert_eq!(code(agent.client.listen(0).await), ErrorCode::LimitReached);
    });
}

#[test]
fn fifty_megabytes_go_each_way_intact_though_each_reader_is_slow() {
    inside("fifty_megabytes_go_each_way_intact_though_each_reader_is_slow", WORKSPACE_BYTES, async || {
        const BYTES: usize = 50 << 20;
        const PIECE: usize = 48 << 10;
        /// The byte at an offset; the period shares no factor with any buffer's size.
        fn byte_at(offset: usize) -> u8 {
            u8::try_from(offset % 251).unwrap()
        }
        fn piece(offset: usize) -> Vec<u8> {
            (offset..(offset + PIECE).min(BYTES)).map(byte_at).collect()
        }
        fn check(offset: usize, bytes: &[u8]) {
            assert!(bytes.iter().enumerate().all(|(index, byte)| *byte == byte_at(offset + index)));
        }
        let agent = Agent::start().await;
        let mut listener = agent.client.listen(0).await.unwrap();
        let (mut guest, host) = pair(&mut listener).await;
        let mut writing = guest.try_clone().unwrap();
        // Neither side reads until both writers block or the buffers of the channel are full.
        let writer = program(move || {
            for offset in (0..BYTES).step_by(PIECE) {
                writing.write_all(&piece(offset)).unwrap();
            }
            writing.shutdown(Shutdown::Write).unwrap();
        });
        let (mut host_reader, mut host_writer) = tokio::io::split(host);
        let sender = tokio::spawn(async move {
            for offset in (0..BYTES).step_by(PIECE) {
                host_writer.write_all(&piece(offset)).await.unwrap();
            }
            host_writer.shutdown().await.unwrap();
            host_writer
        });
        let reader = program(move || {
            let (mut offset, mut buffer) = (0, vec![0; 10_007]);
            loop {
                let length = guest.read(&mut buffer).unwrap();
                if length == 0 {
                    return offset;
                }
                check(offset, &buffer[..length]);
                offset += length;
            }
        });
        let (mut offset, mut buffer) = (0, vec![0; 9_001]);
        loop {
            let length = host_reader.read(&mut buffer).await.unwrap();
            if length == 0 {
                break;
            }
            check(offset, &buffer[..length]);
            offset += length;
            // Another task gets its turn between two reads.
            tokio::task::yield_now().await;
        }
        assert_eq!(offset, BYTES);
        let _writer = sender.await.unwrap();
        join(writer).await;
        assert_eq!(join(reader).await, BYTES);
        // Neither direction was collected in the agent.
        assert!(agent.resident_kib() < 32 << 10, "{} KiB", agent.resident_kib());
    });
}
