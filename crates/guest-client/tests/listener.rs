//! The host's side of listeners, with a guest as bytes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::future::poll_fn;
use std::task::Poll;

use emergent_guest_client::{CallError, Closed, GuestClient, GuestListener};
use emergent_guest_protocol::{
    AgentHello, Decoder, Frame, GuestCall, Kind, Listening, MAX_ACCEPTS, PROTOCOL_VERSION, ProtocolError,
    Receiver, UsageAnswer,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

/// A guest whose answers the test decides.
struct Guest {
    stream: DuplexStream,
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl Guest {
    /// The next frame from the host.
    async fn next(&mut self) -> Frame {
        loop {
            let mut bytes = self.buffer.as_slice();
            let frame = self.decoder.decode(&mut bytes).unwrap();
            self.buffer = bytes.to_vec();
            if let Some(frame) = frame {
                return frame;
            }
            assert_ne!(self.stream.read_buf(&mut self.buffer).await.unwrap(), 0);
        }
    }

    /// The next frame, which must be of this kind.
    async fn expect(&mut self, kind: Kind) -> Frame {
        let frame = self.next().await;
        assert_eq!(frame.kind, kind, "{frame:?}");
        frame
    }

    async fn send(&mut self, frame: Frame) {
        self.stream.write_all(&frame.to_bytes()).await.unwrap();
    }

    async fn start(&mut self, call: u32) {
        self.send(Frame::new(Kind::Started, call, *b"{}")).await;
    }
}

/// A channel on a stream that holds so many unread bytes each way.
async fn channel(bytes: usize) -> (GuestClient, Guest) {
    let (host, stream) = tokio::io::duplex(bytes);
    let mut guest = Guest { stream, decoder: Decoder::new(Receiver::Guest), buffer: Vec::new() };
    let hello = AgentHello { protocol: PROTOCOL_VERSION, version: "test".into(), boot_id: "1".into() };
    guest.send(Frame::message(Kind::Hello, 0, &hello).unwrap()).await;
    let (reader, writer) = tokio::io::split(host);
    let client = GuestClient::connect(reader, writer).await.unwrap();
    guest.expect(Kind::Hello).await;
    (client, guest)
}

/// A listener, and the ids of its call and of the calls that it has parked.
async fn listener() -> (GuestClient, GuestListener, Guest, Vec<u32>) {
    listener_with_buffer(1 << 20).await
}

/// The same, on a stream with a small buffer.
async fn listener_with_buffer(bytes: usize) -> (GuestClient, GuestListener, Guest, Vec<u32>) {
    let (client, mut guest) = channel(bytes).await;
    let opening = tokio::spawn({
        let client = client.clone();
        async move { client.listen(0).await }
    });
    let call = guest.expect(Kind::Call).await.call;
    guest.send(Frame::message(Kind::Started, call, &Listening { port: 40_404 }).unwrap()).await;
    let listener = opening.await.unwrap().unwrap();
    assert_eq!(listener.port(), 40_404);
    let mut parked = Vec::new();
    for _ in 0..4 {
        let accept = guest.expect(Kind::Accept).await;
        assert_eq!(accept.listener(), call);
        parked.push(accept.call);
    }
    (client, listener, guest, parked)
}

#[tokio::test]
async fn a_connection_is_not_lost_when_accept_is_dropped() {
    let (client, mut listener, mut guest, parked) = listener().await;
    // One poll that finds nothing, and is dropped.
    let nothing = poll_fn(|context| Poll::Ready(listener.poll_accept(context).is_pending())).await;
    assert!(nothing);
    guest.start(parked[2]).await;
    guest.send(Frame::new(Kind::Stdout, parked[2], *b"hello")).await;
    let mut connection = listener.accept().await.unwrap();
    let mut text = [0; 5];
    connection.read_exact(&mut text).await.unwrap();
    assert_eq!(&text, b"hello");
    // Its place is taken by another parked call.
    guest.expect(Kind::Accept).await;
    assert!(!client.is_closed());
}

#[tokio::test]
async fn connections_are_limited_and_a_place_is_free_after_the_last_frame() {
    let (_client, mut listener, mut guest, parked) = listener().await;
    let mut ids = std::collections::VecDeque::from(parked);
    let mut connections = Vec::new();
    for number in 0..MAX_ACCEPTS {
        let id = ids.pop_front().unwrap();
        guest.start(id).await;
        connections.push((id, listener.accept().await.unwrap()));
        if number + 4 < MAX_ACCEPTS {
            ids.push_back(guest.expect(Kind::Accept).await.call);
        }
    }
    let pending = poll_fn(|context| Poll::Ready(listener.poll_accept(context).is_pending())).await;
    assert!(pending);
    // Dropped: the guest is notified, and the place is not free yet.
    let (id, connection) = connections.pop().unwrap();
    drop(connection);
    assert_eq!(guest.expect(Kind::Cancel).await.call, id);
    guest.send(Frame::new(Kind::Result, id, *b"{}")).await;
    let accepting = tokio::spawn(async move { listener.accept().await.map(|_| listener) });
    let next = guest.expect(Kind::Accept).await.call;
    guest.start(next).await;
    assert!(accepting.await.unwrap().is_ok());
}

#[tokio::test]
async fn a_dropped_listener_cancels_its_call_and_the_parked_ones() {
    let (client, listener, mut guest, parked) = listener().await;
    drop(listener);
    let mut cancelled = Vec::new();
    for _ in 0..=parked.len() {
        cancelled.push(guest.expect(Kind::Cancel).await.call);
    }
    assert!(parked.iter().all(|id| cancelled.contains(id)), "{cancelled:?}");
    assert!(!client.is_closed());
}

#[tokio::test]
async fn writes_wait_for_credit_and_fail_when_the_connection_has_ended() {
    let (_client, mut listener, mut guest, parked) = listener().await;
    guest.start(parked[0]).await;
    let mut connection = listener.accept().await.unwrap();
    guest.expect(Kind::Accept).await;
    let writing = tokio::spawn(async move {
        let written = connection.write_all(&vec![1; 1 << 20]).await;
        (connection, written)
    });
    let mut received = 0;
    while received < 200 << 10 {
        received += guest.expect(Kind::Input).await.payload.len();
    }
    assert!(!writing.is_finished());
    let error = emergent_wire::ErrorDetail::new(emergent_wire::ErrorCode::Unavailable, "reset");
    guest.send(Frame::message(Kind::Error, parked[0], &error).unwrap()).await;
    let (mut connection, written) = writing.await.unwrap();
    assert_eq!(written.unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    assert!(connection.read(&mut [0]).await.is_err());
}

#[tokio::test]
async fn a_guest_that_sends_data_before_the_connection_ends_the_channel() {
    let (client, mut listener, mut guest, parked) = listener().await;
    guest.send(Frame::new(Kind::Stdout, parked[0], *b"early")).await;
    assert_eq!(client.closed().await, Closed::Protocol(ProtocolError::UnexpectedKind(6)));
    assert!(matches!(listener.accept().await, Err(CallError::Lost(_))));
}

#[tokio::test(start_paused = true)]
async fn a_silent_guest_is_not_asked_while_accepts_are_only_parked() {
    let (client, _listener, mut guest, _parked) = listener().await;
    // The paused clock advances when all tasks wait, here for a ping that does not come.
    let ping = tokio::time::timeout(std::time::Duration::from_secs(600), guest.next()).await;
    assert!(ping.is_err(), "{ping:?}");
    assert!(!client.is_closed());
}

#[tokio::test]
async fn a_guest_that_answers_accepts_without_reading_them_ends_the_channel() {
    let (client, mut listener, mut guest, parked) = listener_with_buffer(128).await;
    let accepting = tokio::spawn(async move {
        let mut accepted = 0;
        while listener.accept().await.is_ok() {
            accepted += 1;
        }
        accepted
    });
    for id in parked[0]..parked[0] + 2000 {
        let connection = [Frame::new(Kind::Started, id, *b"{}"), Frame::new(Kind::Result, id, *b"{}")];
        let bytes: Vec<u8> = connection.iter().flat_map(Frame::to_bytes).collect();
        if guest.stream.write_all(&bytes).await.is_err() {
            break;
        }
        // The host takes the connection and parks another call.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
    drop(guest);
    let closed = client.closed().await;
    assert!(matches!(closed, Closed::Protocol(ProtocolError::UnknownCall(Kind::Started, _))), "{closed:?}");
    let accepted = accepting.await.unwrap();
    assert!(accepted < 100, "{accepted}");
}

/// A JSON string of 1.8 MB.
fn long_text() -> Vec<u8> {
    serde_json::to_vec(&"\u{1f}".repeat(300_000)).unwrap()
}

#[tokio::test]
async fn the_error_for_a_wrong_answer_to_listen_does_not_contain_the_answer() {
    let (client, mut guest) = channel(1 << 20).await;
    let (error, ()) = tokio::join!(client.listen(0), async {
        let call = guest.expect(Kind::Call).await.call;
        guest.send(Frame::new(Kind::Result, call, long_text())).await;
    });
    let error = error.err().unwrap().to_string();
    assert!(error.contains("Result") && error.len() < 300, "{} bytes", error.len());
}

#[tokio::test]
async fn the_error_for_json_that_can_not_be_parsed_is_short() {
    let (client, mut guest) = channel(1 << 20).await;
    let call = client.start(&GuestCall::Usage(())).await.unwrap();
    let (error, ()) = tokio::join!(call.answer::<UsageAnswer>(), async {
        let call = guest.expect(Kind::Call).await.call;
        guest.send(Frame::new(Kind::Result, call, long_text())).await;
    });
    let error = error.err().unwrap().to_string();
    assert!(error.contains("invalid type") && error.len() < 400, "{} bytes", error.len());

    let call = client.start(&GuestCall::Usage(())).await.unwrap();
    let (error, ()) = tokio::join!(call.answer::<UsageAnswer>(), async {
        let call = guest.expect(Kind::Call).await.call;
        guest.send(Frame::new(Kind::Error, call, long_text())).await;
    });
    let error = error.err().unwrap().to_string();
    assert!(error.contains("Error frame is invalid") && error.len() < 400, "{} bytes", error.len());
}
