//! A hostile guest: on every violation the channel ends, calls fail, memory stays bounded, and no task hangs.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_guest_client::{Call, CallError, Closed, Event, GuestClient};
use emergent_guest_protocol::{
    AgentHello, Frame, GuestCall, INITIAL_CREDIT, Kind, PROTOCOL_VERSION, ProtocolError,
};
use emergent_wire::tools::GlobAnswer;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};

fn hello(protocol: u16) -> Frame {
    let hello = AgentHello { protocol, version: "test".into(), boot_id: "1".into() };
    Frame::message(Kind::Hello, 0, &hello).unwrap()
}

/// A channel whose guest is the returned stream; the host's HELLO is already read.
async fn channel() -> (GuestClient, DuplexStream) {
    channel_with_buffer(1 << 20).await
}

/// A channel whose stream holds so many unread bytes each way.
async fn channel_with_buffer(bytes: usize) -> (GuestClient, DuplexStream) {
    let (host, mut guest) = tokio::io::duplex(bytes);
    let (reader, writer) = tokio::io::split(host);
    guest.write_all(&hello(PROTOCOL_VERSION).to_bytes()).await.unwrap();
    let client = GuestClient::connect(reader, writer).await.unwrap();
    let mut greeting = [0; 32];
    guest.read_exact(&mut greeting).await.unwrap();
    (client, guest)
}

/// Starts a call, which the guest reads.
async fn start(client: &GuestClient, guest: &mut DuplexStream) -> Call {
    let call = client.start(&GuestCall::Usage(())).await.unwrap();
    guest.read_exact(&mut [0; 9 + 14]).await.unwrap();
    call
}

/// Sends `attack` while a call waits, and returns how call and channel ended.
async fn attack(attack: &[u8]) -> Closed {
    let (client, mut guest) = channel().await;
    let call = start(&client, &mut guest).await;
    let _ = guest.write_all(attack).await;
    drop(guest);
    match call.answer::<GlobAnswer>().await {
        Err(CallError::Lost(_)) => client.closed().await,
        other => panic!("{other:?}"),
    }
}

fn header(length: u32, kind: u8, call: u32) -> Vec<u8> {
    let mut header = length.to_be_bytes().to_vec();
    header.push(kind);
    header.extend_from_slice(&call.to_be_bytes());
    header
}

#[tokio::test]
async fn oversized_frames_end_the_channel() {
    for kind in 0..=20 {
        let closed = attack(&header(u32::MAX, kind, 1)).await;
        assert!(matches!(closed, Closed::Protocol(_)), "{kind}: {closed:?}");
    }
}

#[tokio::test]
async fn unknown_and_finished_calls_end_the_channel() {
    let stray = Frame::new(Kind::Result, 77, *b"{}").to_bytes();
    assert_eq!(attack(&stray).await, Closed::Protocol(ProtocolError::UnknownCall(Kind::Result, 77)));
    let (client, mut guest) = channel().await;
    let call = start(&client, &mut guest).await;
    let answer = Frame::message(Kind::Result, 1, &GlobAnswer::default()).unwrap().to_bytes();
    guest.write_all(&[answer.clone(), answer].concat()).await.unwrap();
    assert!(call.answer::<GlobAnswer>().await.is_ok());
    assert_eq!(client.closed().await, Closed::Protocol(ProtocolError::UnknownCall(Kind::Result, 1)));
}

#[tokio::test]
async fn a_stream_that_ends_in_a_frame_is_a_violation() {
    let whole = Frame::message(Kind::Result, 1, &GlobAnswer::default()).unwrap().to_bytes();
    for cut in [1, 8, 9, 12, whole.len() - 1] {
        let closed = attack(&whole[..cut]).await;
        assert_eq!(closed, Closed::Protocol(ProtocolError::Truncated), "{cut}");
    }
    assert!(matches!(attack(&[]).await, Closed::Ended(_)));
}

#[tokio::test]
async fn data_beyond_the_credit_ends_the_channel() {
    let (client, mut guest) = channel().await;
    let call = start(&client, &mut guest).await;
    let flood = tokio::spawn(async move {
        let frame = Frame::new(Kind::Stdout, 1, vec![b'x'; 60_000]).to_bytes();
        let mut sent = 0_usize;
        while guest.write_all(&frame).await.is_ok() {
            sent += frame.len();
        }
        sent
    });
    // The call's events are not read, so no credit is granted.
    assert_eq!(client.closed().await, Closed::Protocol(ProtocolError::OverCredit(1)));
    drop(call);
    let sent = flood.await.unwrap();
    assert!(sent < (INITIAL_CREDIT as usize) + (3 << 20), "{sent}");
}

#[tokio::test]
async fn tiny_frames_cost_credit_for_their_overhead() {
    let frames: Vec<u8> = (0..20_000).flat_map(|_| Frame::new(Kind::Stderr, 1, *b"x").to_bytes()).collect();
    assert_eq!(attack(&frames).await, Closed::Protocol(ProtocolError::OverCredit(1)));
}

#[tokio::test]
async fn output_over_the_callers_limit_fails_the_call() {
    let (client, mut guest) = channel().await;
    let call = start(&client, &mut guest).await;
    tokio::spawn(async move {
        let frame = Frame::new(Kind::Stdout, 1, vec![b'x'; 1000]).to_bytes();
        while guest.write_all(&frame).await.is_ok() {
            // Within the granted credit: the host reads and grants more.
            tokio::time::sleep(Duration::from_micros(10)).await;
        }
    });
    let error = call.answer_with_output::<GlobAnswer>(100_000).await.unwrap_err();
    assert!(matches!(error, CallError::Garbled(_)), "{error}");
}

#[tokio::test]
async fn credit_floods_and_wrong_kinds_end_the_channel() {
    let credit: Vec<u8> = (0..10).flat_map(|_| Frame::credit(1, 8 << 20).to_bytes()).collect();
    assert_eq!(attack(&credit).await, Closed::Protocol(ProtocolError::OverCredit(1)));
    let pong = Frame::new(Kind::Pong, 0, [0; 8]).to_bytes();
    assert_eq!(attack(&pong).await, Closed::Protocol(ProtocolError::UnexpectedKind(12)));
    assert!(matches!(attack(&hello(1).to_bytes()).await, Closed::Protocol(_)));
    let garbled = Frame::new(Kind::Error, 1, *b"not json").to_bytes();
    assert!(matches!(attack(&garbled).await, Closed::Protocol(ProtocolError::BadMessage { .. })));
}

#[tokio::test]
async fn a_guest_of_an_unknown_version_is_refused_with_advice() {
    let (host, mut guest) = tokio::io::duplex(1000);
    let (reader, writer) = tokio::io::split(host);
    guest.write_all(&hello(999).to_bytes()).await.unwrap();
    let error = GuestClient::connect(reader, writer).await.err().unwrap().to_string();
    assert!(error.contains("restart the workspace"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_pong_may_come_after_frames_that_were_sent_before_it() {
    let (client, mut guest) = channel().await;
    let long = client.start(&GuestCall::Usage(())).await.unwrap();
    let short = client.start(&GuestCall::Usage(())).await.unwrap();
    guest.read_exact(&mut [0; 2 * (9 + 14)]).await.unwrap();
    for _ in 0..3 {
        // The host sends a ping, and the answer to another call arrives before the pong.
        let mut ping = [0; 9 + 8];
        guest.read_exact(&mut ping).await.unwrap();
        assert_eq!(ping[4], Kind::Ping as u8);
        let output = Frame::new(Kind::Stdout, 2, *b"x").to_bytes();
        let pong = Frame::new(Kind::Pong, 0, [0; 8]).to_bytes();
        guest.write_all(&[output, pong].concat()).await.unwrap();
    }
    let answer = |id| Frame::message(Kind::Result, id, &GlobAnswer::default()).unwrap().to_bytes();
    guest.write_all(&[answer(2), answer(1)].concat()).await.unwrap();
    assert!(short.answer_with_output::<GlobAnswer>(100).await.is_ok());
    assert!(long.answer::<GlobAnswer>().await.is_ok());
    // One more than was asked for is still too many.
    guest.write_all(&Frame::new(Kind::Pong, 0, [0; 8]).to_bytes()).await.unwrap();
    assert_eq!(client.closed().await, Closed::Protocol(ProtocolError::UnexpectedKind(12)));
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_answers_no_ping_ends_the_channel() {
    let (client, guest) = channel().await;
    let call = client.start(&GuestCall::Usage(())).await.unwrap();
    assert!(matches!(call.answer::<GlobAnswer>().await, Err(CallError::Lost(Closed::Silent))));
    drop(guest);
}

#[tokio::test(start_paused = true)]
async fn an_idle_guest_gets_no_ping_after_calls_that_overlapped() {
    let (client, mut guest) = channel().await;
    let calls = [start(&client, &mut guest).await, start(&client, &mut guest).await];
    for (id, call) in (1..).zip(calls) {
        let answer = Frame::message(Kind::Result, id, &GlobAnswer::default()).unwrap();
        guest.write_all(&answer.to_bytes()).await.unwrap();
        assert!(call.answer::<GlobAnswer>().await.is_ok());
    }
    // The paused clock advances when all tasks wait, here for a ping that does not come.
    let ping = tokio::time::timeout(Duration::from_secs(600), guest.read_u8()).await;
    assert!(ping.is_err(), "{ping:?}");
    assert!(!client.is_closed());
    // The time without a call does not count.
    let late = start(&client, &mut guest).await;
    let ping = tokio::time::timeout(Duration::from_secs(9), guest.read_u8()).await;
    assert!(ping.is_err(), "{ping:?}");
    assert!(matches!(late.answer::<GlobAnswer>().await, Err(CallError::Lost(Closed::Silent))));
}

/// Starts calls until one fails, within ten minutes.
async fn start_until_error(client: &GuestClient) -> CallError {
    let start = async {
        let mut started = Vec::new();
        loop {
            match client.start(&GuestCall::Usage(())).await {
                Ok(call) => started.push(call),
                Err(error) => return error,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(600), start).await.unwrap()
}

/// Sends a byte of output of call 1 every five seconds, so that the guest is never silent.
async fn send_output(mut guest: impl AsyncWrite + Unpin) {
    let output = Frame::new(Kind::Stdout, 1, *b"x").to_bytes();
    while guest.write_all(&output).await.is_ok() {
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_sends_and_does_not_read_ends_the_channel() {
    let (client, mut guest) = channel_with_buffer(100).await;
    let _first = start(&client, &mut guest).await;
    tokio::spawn(send_output(guest));
    let error = start_until_error(&client).await;
    assert!(matches!(error, CallError::Lost(Closed::Stalled)), "{error}");
    assert_eq!(client.closed().await, Closed::Stalled);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_reads_a_byte_now_and_then_keeps_no_call_waiting() {
    let (client, mut guest) = channel_with_buffer(100).await;
    let _first = start(&client, &mut guest).await;
    let (mut reader, writer) = tokio::io::split(guest);
    tokio::spawn(send_output(writer));
    tokio::spawn(async move {
        while reader.read_u8().await.is_ok() {
            tokio::time::sleep(Duration::from_secs(20)).await;
        }
    });
    let error = start_until_error(&client).await;
    assert!(matches!(error, CallError::Lost(Closed::Stalled)), "{error}");
}

#[tokio::test]
async fn credit_counts_when_its_frame_is_written() {
    let (client, mut guest) = channel_with_buffer(100).await;
    let mut call = start(&client, &mut guest).await;
    // Far more than the host grants with the few CREDIT frames that the stream can hold.
    let flood = async {
        let frame = Frame::new(Kind::Stdout, 1, vec![b'x'; 1000]).to_bytes();
        for _ in 0..5000 {
            if guest.write_all(&frame).await.is_err() {
                break;
            }
        }
        drop(guest);
    };
    let consume = async {
        let mut consumed = 0;
        while let Ok(Event::Stdout(bytes)) = call.next().await {
            consumed += bytes.len();
        }
        consumed
    };
    let ((), consumed) = tokio::join!(flood, consume);
    assert_eq!(client.closed().await, Closed::Protocol(ProtocolError::OverCredit(1)));
    assert!(consumed < 1 << 20, "{consumed}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_to_a_call_that_was_not_sent_ends_the_channel() {
    let (client, mut guest) = channel_with_buffer(100).await;
    let mut calls = Vec::new();
    for _ in 0..30 {
        calls.push(client.start(&GuestCall::Usage(())).await.unwrap());
    }
    // The guest has read none of them, and the stream holds the first few.
    guest.write_all(&Frame::new(Kind::Result, 30, *b"{}").to_bytes()).await.unwrap();
    assert_eq!(client.closed().await, Closed::Protocol(ProtocolError::UnknownCall(Kind::Result, 30)));
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_sends_and_answers_no_ping_ends_the_channel() {
    let (client, mut guest) = channel().await;
    let _call = start(&client, &mut guest).await;
    tokio::spawn(async move {
        let output = Frame::new(Kind::Stdout, 1, *b"x").to_bytes();
        // After each PING, so that the guest is never silent for long.
        while guest.read_exact(&mut [0; 9 + 8]).await.is_ok() && guest.write_all(&output).await.is_ok() {}
    });
    let closed = tokio::time::timeout(Duration::from_secs(600), client.closed()).await;
    assert_eq!(closed, Ok(Closed::Silent));
}

#[tokio::test]
async fn a_dropped_call_is_cancelled_and_the_channel_continues() {
    let (client, mut guest) = channel().await;
    drop(client.start(&GuestCall::Usage(())).await.unwrap());
    let mut seen = vec![0; 9 + 14 + 9];
    guest.read_exact(&mut seen).await.unwrap();
    assert_eq!(seen[9 + 14 + 4], Kind::Cancel as u8);
    let late = [Frame::new(Kind::Stdout, 1, *b"late"), Frame::new(Kind::Result, 1, *b"{}")];
    guest.write_all(&late.iter().flat_map(Frame::to_bytes).collect::<Vec<_>>()).await.unwrap();
    let second = start(&client, &mut guest).await;
    let answer = Frame::message(Kind::Result, 2, &GlobAnswer::default()).unwrap();
    guest.write_all(&answer.to_bytes()).await.unwrap();
    assert!(second.answer::<GlobAnswer>().await.is_ok());
    assert_eq!(client.open_calls(), 0);
}
