//! Frames and their decoder.
//!
//! The decoder takes bytes in pieces of any size and returns whole frames. It holds at most one frame's payload. It
//! refuses a frame at its header when the length is over the limit of its kind, or when the peer may not send the kind.

use std::fmt;

use crate::error::ProtocolError;

/// Length of a frame's header: payload length (u32), kind (u8), call id (u32), all big endian.
pub const HEADER_BYTES: usize = 9;
/// The largest payload of a data frame (INPUT, STDOUT, STDERR).
pub const MAX_DATA_BYTES: usize = 64 * 1024;
/// The largest message to the guest: two strings of edit at their limit, escaped.
const MAX_CALL_BYTES: usize = 16 << 20;
/// The largest message to the host.
const MAX_ANSWER_BYTES: usize = 4 << 20;
/// The largest HELLO.
const MAX_HELLO_BYTES: usize = 4096;

/// The largest STARTED.
const MAX_STARTED_BYTES: usize = 4096;

/// The kind of a frame: the byte after the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The first frame each way.
    Hello = 1,
    /// Opens a call.
    Call = 2,
    /// Bytes for a call (the content of a file to write).
    Input = 3,
    /// No more bytes for a call.
    InputEnd = 4,
    /// Ends a call early.
    Cancel = 5,
    /// Bytes of a call's first output stream.
    Stdout = 6,
    /// Bytes of a call's second output stream.
    Stderr = 7,
    /// Allows the peer to send more data for a call.
    Credit = 8,
    /// A call's last frame: it succeeded.
    Result = 9,
    /// A call's last frame: it failed.
    Error = 10,
    /// Asks the guest for a PONG.
    Ping = 11,
    /// Answers a PING.
    Pong = 12,
    /// Opens a call that waits for a connection to a listener and then carries it. Since version 3.
    Accept = 13,
    /// A LISTEN call's port is open, or an ACCEPT call has its connection. Sent once, before any data. Since version 3.
    Started = 14,
    /// No more bytes from an ACCEPT call's connection. Since version 3.
    OutputEnd = 15,
}

/// The side that decodes. Each side takes only the kinds that the other may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receiver {
    /// The server.
    Host,
    /// The guest agent.
    Guest,
}

/// One frame.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    /// Its kind.
    pub kind: Kind,
    /// The call it belongs to; 0 for HELLO, PING, PONG.
    pub call: u32,
    /// JSON or raw bytes, as the kind says.
    pub payload: Vec<u8>,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Kind::Hello,
            2 => Kind::Call,
            3 => Kind::Input,
            4 => Kind::InputEnd,
            5 => Kind::Cancel,
            6 => Kind::Stdout,
            7 => Kind::Stderr,
            8 => Kind::Credit,
            9 => Kind::Result,
            10 => Kind::Error,
            11 => Kind::Ping,
            12 => Kind::Pong,
            13 => Kind::Accept,
            14 => Kind::Started,
            15 => Kind::OutputEnd,
            _ => return None,
        })
    }

    fn is_taken_by(self, receiver: Receiver) -> bool {
        match self {
            Kind::Hello | Kind::Credit => true,
            Kind::Call | Kind::Accept | Kind::Input | Kind::InputEnd | Kind::Cancel | Kind::Ping => {
                receiver == Receiver::Guest
            }
            Kind::Started
            | Kind::Stdout
            | Kind::Stderr
            | Kind::OutputEnd
            | Kind::Result
            | Kind::Error
            | Kind::Pong => receiver == Receiver::Host,
        }
    }

    fn has_call_id(self) -> bool {
        !matches!(self, Kind::Hello | Kind::Ping | Kind::Pong)
    }

    fn check_length(self, length: usize) -> Result<(), ProtocolError> {
        let (least, most, allowed) = match self {
            Kind::Hello => (2, MAX_HELLO_BYTES, "2 to 4096"),
            Kind::Call => (2, MAX_CALL_BYTES, "2 to 16 Mi"),
            Kind::Input | Kind::Stdout | Kind::Stderr => (1, MAX_DATA_BYTES, "1 to 64 Ki"),
            Kind::InputEnd | Kind::OutputEnd | Kind::Cancel => (0, 0, "0"),
            Kind::Credit | Kind::Accept => (4, 4, "4"),
            Kind::Started => (2, MAX_STARTED_BYTES, "2 to 4096"),
            Kind::Result | Kind::Error => (2, MAX_ANSWER_BYTES, "2 to 4 Mi"),
            Kind::Ping | Kind::Pong => (8, 8, "8"),
        };
        if (least..=most).contains(&length) {
            Ok(())
        } else {
            Err(ProtocolError::BadLength { kind: self, length, allowed })
        }
    }
}

impl Frame {
    /// A frame with these bytes.
    pub fn new(kind: Kind, call: u32, payload: impl Into<Vec<u8>>) -> Self {
        Self { kind, call, payload: payload.into() }
    }

    /// A frame with these bytes, if its kind can hold them.
    pub fn checked(kind: Kind, call: u32, payload: Vec<u8>) -> Result<Self, ProtocolError> {
        kind.check_length(payload.len())?;
        Ok(Self { kind, call, payload })
    }

    /// A frame with this message as JSON.
    pub fn message<T: serde::Serialize>(kind: Kind, call: u32, message: &T) -> Result<Self, ProtocolError> {
        let payload = serde_json::to_vec(message)
            .map_err(|error| ProtocolError::BadMessage { kind, reason: error.to_string() })?;
        Self::checked(kind, call, payload)
    }

    /// The message in this frame.
    pub fn parse<'de, T: serde::Deserialize<'de>>(&'de self) -> Result<T, ProtocolError> {
        serde_json::from_slice(&self.payload)
            .map_err(|error| ProtocolError::BadMessage { kind: self.kind, reason: error.to_string() })
    }

    /// A CREDIT frame.
    pub fn credit(call: u32, amount: u32) -> Self {
        Self::new(Kind::Credit, call, amount.to_be_bytes())
    }

    /// An ACCEPT frame. `listener` is the id of a LISTEN call.
    pub fn accept(call: u32, listener: u32) -> Self {
        Self::new(Kind::Accept, call, listener.to_be_bytes())
    }

    /// The amount in a CREDIT frame.
    pub fn credit_amount(&self) -> u32 {
        self.number()
    }

    /// The id of the LISTEN call in an ACCEPT frame.
    pub fn listener(&self) -> u32 {
        self.number()
    }

    /// The payload of a CREDIT or an ACCEPT frame.
    fn number(&self) -> u32 {
        let mut bytes = [0; 4];
        let length = self.payload.len().min(4);
        bytes[..length].copy_from_slice(&self.payload[..length]);
        u32::from_be_bytes(bytes)
    }

    /// Header and payload in one piece.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.payload.len());
        bytes.extend_from_slice(&encode_header(self.kind, self.call, self.payload.len()));
        bytes.extend_from_slice(&self.payload);
        bytes
    }
}

impl fmt::Debug for Frame {
    /// Names the frame without its content, which may be a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}#{}[{} bytes]", self.kind, self.call, self.payload.len())
    }
}

/// Encodes the header of a frame whose payload is written separately.
///
/// # Panics
/// If the payload is longer than its kind allows: the sender must have checked.
pub fn encode_header(kind: Kind, call: u32, length: usize) -> [u8; HEADER_BYTES] {
    assert!(kind.check_length(length).is_ok(), "a {kind:?} frame of {length} bytes");
    let mut header = [0; HEADER_BYTES];
    #[allow(clippy::cast_possible_truncation, reason = "check_length bounds it far below 4 GiB")]
    header[..4].copy_from_slice(&(length as u32).to_be_bytes());
    header[4] = kind as u8;
    header[5..].copy_from_slice(&call.to_be_bytes());
    header
}

/// Turns bytes into frames.
pub struct Decoder {
    receiver: Receiver,
    header: [u8; HEADER_BYTES],
    header_length: usize,
    /// The frame whose payload is being read, and how long it will be.
    pending: Option<(Frame, usize)>,
}

impl Decoder {
    /// A decoder for the frames that `receiver` takes.
    pub fn new(receiver: Receiver) -> Self {
        Self { receiver, header: [0; HEADER_BYTES], header_length: 0, pending: None }
    }

    /// Takes bytes from the front of `input` until a frame is complete, and returns it.
    ///
    /// Returns `None` when all of `input` was taken and the frame is not complete. After an error the decoder must not
    /// be used again.
    pub fn decode(&mut self, input: &mut &[u8]) -> Result<Option<Frame>, ProtocolError> {
        loop {
            if let Some((frame, length)) = &mut self.pending {
                let missing = *length - frame.payload.len();
                let taken = missing.min(input.len());
                frame.payload.extend_from_slice(&input[..taken]);
                *input = &input[taken..];
                if taken < missing {
                    return Ok(None);
                }
                return Ok(self.pending.take().map(|(frame, _)| frame));
            }
            let taken = (HEADER_BYTES - self.header_length).min(input.len());
            self.header[self.header_length..self.header_length + taken].copy_from_slice(&input[..taken]);
            self.header_length += taken;
            *input = &input[taken..];
            if self.header_length < HEADER_BYTES {
                return Ok(None);
            }
            self.header_length = 0;
            self.pending = Some(self.open_frame()?);
        }
    }

    /// Fails when the stream ends inside a frame.
    pub fn finish(&self) -> Result<(), ProtocolError> {
        if self.header_length == 0 && self.pending.is_none() { Ok(()) } else { Err(ProtocolError::Truncated) }
    }

    /// Checks the header that was read.
    fn open_frame(&self) -> Result<(Frame, usize), ProtocolError> {
        let [l0, l1, l2, l3, kind, c0, c1, c2, c3] = self.header;
        let length = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
        let call = u32::from_be_bytes([c0, c1, c2, c3]);
        let kind = Kind::from_byte(kind)
            .filter(|kind| kind.is_taken_by(self.receiver))
            .ok_or(ProtocolError::UnexpectedKind(kind))?;
        kind.check_length(length)?;
        if kind.has_call_id() != (call != 0) {
            return Err(ProtocolError::BadCallId(kind, call));
        }
        // Memory is taken as bytes arrive: a header alone must not cost the receiver megabytes.
        Ok((Frame::new(kind, call, Vec::with_capacity(length.min(MAX_DATA_BYTES))), length))
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn any_frame(receiver: Receiver) -> impl Strategy<Value = Frame> {
        (1_u8..=15, 1_u32.., vec(any::<u8>(), 0..300)).prop_filter_map(
            "kind",
            move |(kind, call, mut payload)| {
                let kind = Kind::from_byte(kind)?;
                match kind {
                    Kind::InputEnd | Kind::OutputEnd | Kind::Cancel => payload.clear(),
                    Kind::Credit | Kind::Accept => payload.resize(4, 1),
                    Kind::Ping | Kind::Pong => payload.resize(8, 0),
                    _ => payload.resize(payload.len().max(2), 7),
                }
                kind.is_taken_by(receiver)
                    .then(|| Frame::new(kind, if kind.has_call_id() { call } else { 0 }, payload))
            },
        )
    }

    fn decode_all(receiver: Receiver, pieces: &[&[u8]]) -> Result<Vec<Frame>, ProtocolError> {
        let mut decoder = Decoder::new(receiver);
        let mut frames = Vec::new();
        for mut piece in pieces.iter().copied() {
            while let Some(frame) = decoder.decode(&mut piece)? {
                frames.push(frame);
            }
        }
        decoder.finish()?;
        Ok(frames)
    }

    proptest! {
        #[test]
        fn frames_survive_any_split(
            frames in vec(any_frame(Receiver::Host), 0..8),
            cuts in vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::to_bytes).collect();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(decode_all(Receiver::Host, &pieces).unwrap(), frames);
        }

        #[test]
        fn any_bytes_give_frames_or_an_error(bytes in vec(any::<u8>(), 0..4096), guest in any::<bool>()) {
            let receiver = if guest { Receiver::Guest } else { Receiver::Host };
            if let Ok(frames) = decode_all(receiver, &[&bytes]) {
                let again: Vec<u8> = frames.iter().flat_map(Frame::to_bytes).collect();
                prop_assert_eq!(again, bytes);
            }
        }

        #[test]
        fn damaged_frames_never_panic(
            frames in vec(any_frame(Receiver::Guest), 1..5),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes: Vec<u8> = frames.iter().flat_map(Frame::to_bytes).collect();
            let index = at.index(bytes.len());
            bytes[index] = byte;
            let _ = decode_all(Receiver::Guest, &[&bytes]);
        }
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_at_its_header() {
        for (kind, length) in [
            (6_u8, MAX_DATA_BYTES + 1),
            (9, MAX_ANSWER_BYTES + 1),
            (1, 4097),
            (6, 0),
            (12, 9),
            (14, 4097),
            (15, 1),
        ] {
            let mut header = u32::try_from(length).unwrap().to_be_bytes().to_vec();
            header.push(kind);
            header.extend_from_slice(&u32::from(kind != 1 && kind != 12).to_be_bytes());
            let error = Decoder::new(Receiver::Host).decode(&mut header.as_slice()).unwrap_err();
            assert!(matches!(error, ProtocolError::BadLength { .. }), "{error}");
        }
    }

    #[test]
    fn each_side_takes_only_what_the_other_may_send() {
        let call = Frame::new(Kind::Call, 1, *b"{}").to_bytes();
        assert_eq!(decode_all(Receiver::Host, &[&call]), Err(ProtocolError::UnexpectedKind(2)));
        let result = Frame::new(Kind::Result, 1, *b"{}").to_bytes();
        assert_eq!(decode_all(Receiver::Guest, &[&result]), Err(ProtocolError::UnexpectedKind(9)));
        let accept = Frame::accept(1, 7).to_bytes();
        assert_eq!(decode_all(Receiver::Guest, &[&accept]).unwrap()[0].listener(), 7);
        assert_eq!(decode_all(Receiver::Host, &[&accept]), Err(ProtocolError::UnexpectedKind(13)));
        for kind in [Kind::Started, Kind::OutputEnd] {
            let payload = if kind == Kind::Started { b"{}".to_vec() } else { Vec::new() };
            let frame = Frame::new(kind, 1, payload).to_bytes();
            assert_eq!(
                decode_all(Receiver::Guest, &[&frame]),
                Err(ProtocolError::UnexpectedKind(kind as u8))
            );
        }
        let no_call = Frame::new(Kind::Call, 0, *b"{}").to_bytes();
        assert_eq!(decode_all(Receiver::Guest, &[&no_call]), Err(ProtocolError::BadCallId(Kind::Call, 0)));
    }

    #[test]
    fn a_stream_that_ends_in_a_frame_is_noticed() {
        let bytes = Frame::new(Kind::Call, 1, *b"{\"usage\":null}").to_bytes();
        for cut in 1..bytes.len() {
            assert_eq!(decode_all(Receiver::Guest, &[&bytes[..cut]]), Err(ProtocolError::Truncated), "{cut}");
        }
    }
}
