//! The protocol between the server (host) and the guest agent (guest), over any byte stream.
//!
//! ```text
//!   host                                     guest
//!    │ HELLO {protocol range, version} ──────▶ │
//!    │ ◀────── HELLO {protocol, version, boot} │      one exchange, first thing on a connection
//!    │ CALL 1 {"bash": …} ───────────────────▶ │
//!    │ CALL 2 {"write": …} ──────────────────▶ │      many calls at once, ids chosen by the host,
//!    │ INPUT 2 bytes… / INPUT_END 2 ─────────▶ │      never used twice on one connection
//!    │ ◀───────────────────── STDOUT 1 bytes…  │
//!    │ CREDIT 1 n ───────────────────────────▶ │      data is sent only against credit
//!    │ ◀──────────────────── RESULT 2 {…}      │
//!    │ CANCEL 1 ─────────────────────────────▶ │      a cancelled call still gets its last frame
//!    │ ◀───────────────────── ERROR 1 {…}      │
//! ```
//!
//! A frame is a 9-byte header (payload length, kind, call id; big endian) and its payload: JSON for messages,
//! raw bytes for data. Every call ends with exactly one RESULT or ERROR.
//!
//! Invariants, kept by both decoders:
//! - the length is checked against the limit of its kind before a byte of payload is stored;
//! - data flows only against credit, so no peer can make the other buffer more than it granted;
//! - what a peer may not send is an error that ends the connection, never a guess.
//!
//! Versions: an agent speaks one version for its whole life, and sandboxes outlive servers. The host adapts to
//! the agent it meets ([`HostHello::agree`]); an old agent never has to learn anything new.

mod credit;
mod frame;
mod message;

pub use credit::{Credit, CreditError, INITIAL_CREDIT, MAX_CREDIT, data_cost};
pub use frame::{Decoder, Frame, HEADER_BYTES, Kind, MAX_DATA_BYTES, ProtocolError, Receiver, encode_header};
pub use message::{
    AgentHello, AttachCall, BashCall, CHANNEL_PORT, Configuration, ConnectCall, GuestCall, HostHello,
    MachineCall, OperationCall, PROTOCOL_VERSION, READY_PORT, ServeAnswer, ServeCall, ShutdownCall,
    UsageAnswer, VersionMismatch, WriteCall,
};
