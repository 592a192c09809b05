//! The protocol between the server (host) and the guest agent (guest), over any byte stream.
//!
//! ```text
//!   host                                     guest
//!    │ HELLO {oldest, newest} ───────────────▶ │
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
//! # Listeners
//!
//! Programs in the sandbox connect to the host through a port that the agent opens in the sandbox. The protocol has no
//! calls from the guest to the host. Instead the host parks ACCEPT calls, and each becomes one connection:
//!
//! ```text
//!   host                                     guest                           a program in the sandbox
//!    │ CALL 3 {"listen": {"port": 0}} ───────▶ │ listen on 127.0.0.1:40404
//!    │ ◀────────── STARTED 3 {"port": 40404}   │
//!    │ ACCEPT 4 (listener 3) ────────────────▶ │ parked
//!    │ ACCEPT 5 (listener 3) ────────────────▶ │ parked
//!    │ ◀─────────────────── STARTED 4 {}       │ ◀──────────────────────────── connect
//!    │ INPUT 4 bytes… ───────────────────────▶ │ bytes… ─────────────────────▶
//!    │ ◀───────────────────── STDOUT 4 bytes…  │ ◀───────────────────────────── bytes…
//!    │ ◀───────────────────── OUTPUT_END 4     │ ◀───────────────────────────── end of its sending side
//!    │ INPUT_END 4 ──────────────────────────▶ │ end of our sending side ────▶
//!    │ ◀──────────────────── RESULT 4 {}       │ close
//!    │ CANCEL 3 ─────────────────────────────▶ │ close the port and the connections of calls 4, 5, …
//! ```
//!
//! - STARTED comes before the first data byte, so that a protocol works in which the server speaks first.
//! - CANCEL of an ACCEPT call resets its connection. After INPUT_END the agent first delivers the input, for a limited time.
//! - A connection without a parked ACCEPT call waits for a limited time, then the agent closes it. The number of those that
//!   wait is limited by the agent and by the backlog of the port.
//! - ACCEPT calls have a limit of their own ([`MAX_ACCEPTS`]): connections can't keep the host from other calls.
//!
//! # Invariants
//!
//! Both sides keep them:
//! - the length is checked against the limit of its kind before a byte of payload is stored;
//! - data flows only against credit, so no peer can make the other buffer more than it granted;
//! - a frame that the peer may not send ends the connection.
//!
//! # Versions
//!
//! An agent speaks one version for its whole life, and sandboxes outlive servers. The host adapts to the agent's version
//! ([`HostHello::agree`], [`GuestCall::adapt`]): an older agent gets no call and no field that its version lacks.

mod credit;
mod error;
mod frame;
mod git_failure;
mod limits;
mod message;
mod program;
mod version;

pub use credit::{Credit, CreditError, INITIAL_CREDIT, MAX_CREDIT, data_cost};
pub use error::ProtocolError;
pub use frame::{Decoder, Frame, HEADER_BYTES, Kind, MAX_DATA_BYTES, Receiver, encode_header};
pub use git_failure::GitFailureReason;
pub use limits::{CHANNEL_PORT, MAX_ACCEPTS, MAX_CALLS, MAX_LISTENERS, READY_PORT};
pub use message::{
    AttachCall, BashCall, Configuration, ConnectCall, GuestCall, ListenCall, Listening, MachineCall,
    OperationCall, ServeAnswer, ServeCall, ShutdownCall, UsageAnswer, WriteCall,
};
pub use program::{AGENT_PATH, CONNECT_COMMAND, INIT_COMMAND};
pub use version::{AgentHello, AgentTooOld, HostHello, PROTOCOL_VERSION, VersionMismatch};
