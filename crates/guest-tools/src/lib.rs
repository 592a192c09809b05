//! The five file tools (read, write, edit, glob, grep) as a plain synchronous library, and the parsers for `/proc`.
//!
//! The guest agent runs inside every sandbox and calls these functions, one thread a call. They work on the
//! real file system, so a tool and a command see the same files.
//!
//! Invariants:
//! - A failure is an [`ErrorDetail`](emergent_wire::ErrorDetail) that says what to do next; never an empty answer.
//! - Memory is bounded: by a fixed buffer (read, write), by the largest file that may be edited (edit), or by the
//!   number and size of the matches an answer holds (glob, grep).
//! - A file is replaced as a whole or not at all, and only where it was meant to be changed.
//! - The same tree and the same request give the same answer for any number of threads.
//! - Nothing blocks for ever: special files are refused, and every long loop looks at its `cancel` flag.

mod confined_walk;
mod context;
mod error;
mod flush;
mod glob_pattern;
mod location;
mod text;
mod walk;

pub mod edit;
pub mod glob;
pub mod grep;
pub mod procfs;
pub mod read;
pub mod search;
pub mod write;

pub use context::Context;
