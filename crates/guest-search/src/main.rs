//! Runs searches: requests on standard input, answers on standard output, one after the other.
//!
//! The guest agent starts this process for glob and grep. The search engine is most of the code in the sandbox, and its
//! memory is needed only during searches. A search that fails (a pattern that needs too much memory, for example) ends this
//! process and not the agent. A search is cancelled by a kill of the process. Starting a process is slow on gVisor, so the
//! process waits for another search for a while, unless it has grown large.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use emergent_guest_tools::procfs::own_resident_bytes;
use emergent_guest_tools::search::{
    LENGTH_BYTES, SearchReply, SearchRequest, message_content, run, to_message,
};
use emergent_wire::{ErrorCode, ErrorDetail};

/// The regex compiler and the directory walker may recurse deeply.
const STACK_BYTES: usize = 8 << 20;
/// The time for which the process waits for the next search.
const IDLE_MS: libc::c_int = 30_000;
/// A process that has grown over this ends after its answer.
const MAX_RESIDENT_BYTES: u64 = 24 << 20;

fn main() -> ExitCode {
    loop {
        let message = match next_message() {
            Ok(Some(message)) => message,
            Ok(None) => return ExitCode::SUCCESS,
            Err(_) => return ExitCode::FAILURE,
        };
        let search = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || search(&message));
        let reply = match search.map(std::thread::JoinHandle::join) {
            Ok(Ok(reply)) => reply,
            _ => failed(ErrorCode::LimitReached, "the sandbox has no room for a search"),
        };
        let reply = to_message(&reply).or_else(|error| to_message(&failed(ErrorCode::TooLarge, &error)));
        let mut output = std::io::stdout();
        let sent = reply.is_ok_and(|reply| output.write_all(&reply).and_then(|()| output.flush()).is_ok());
        if !sent {
            return ExitCode::FAILURE;
        }
        // SAFETY: gives unused memory back; no memory of ours is touched.
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::malloc_trim(0);
        }
        // A process that can't tell its memory ends, too.
        if own_resident_bytes().is_none_or(|bytes| bytes > MAX_RESIDENT_BYTES) {
            return ExitCode::SUCCESS;
        }
    }
}

fn failed(code: ErrorCode, message: &str) -> SearchReply {
    SearchReply::Err(ErrorDetail::new(code, message))
}

/// The next message; none when the agent has closed the input, or has sent nothing for [`IDLE_MS`].
fn next_message() -> std::io::Result<Option<Vec<u8>>> {
    let mut poll = libc::pollfd { fd: libc::STDIN_FILENO, events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor, on this stack.
    if unsafe { libc::poll(&raw mut poll, 1, IDLE_MS) } == 0 {
        return Ok(None);
    }
    let mut input = std::io::stdin().lock();
    let mut length = [0; LENGTH_BYTES];
    match input.read_exact(&mut length) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    message_content(&length).map_err(std::io::Error::other)?;
    let mut message = length.to_vec();
    input.by_ref().take(u32::from_le_bytes(length).into()).read_to_end(&mut message)?;
    Ok(Some(message))
}

fn search(message: &[u8]) -> SearchReply {
    let request = message_content(message).and_then(|content| {
        serde_json::from_slice::<SearchRequest>(content.unwrap_or_default())
            .map_err(|error| error.to_string())
    });
    match request {
        Ok(request) => run(&request, &AtomicBool::new(false)),
        Err(error) => failed(ErrorCode::BadRequest, &error),
    }
}

/// Replaces the C library's look-up of a user, which would load shared libraries of the image into a static program. The home
/// directory comes from `HOME` only.
///
/// # Safety
/// As for the function it replaces: `result` must be valid for a write.
#[cfg(not(test))]
#[unsafe(no_mangle)]
unsafe extern "C" fn getpwuid_r(
    _user: libc::uid_t,
    _entry: *mut libc::passwd,
    _buffer: *mut libc::c_char,
    _length: libc::size_t,
    result: *mut *mut libc::passwd,
) -> libc::c_int {
    // SAFETY: the caller promises that it can be written.
    unsafe { *result = std::ptr::null_mut() };
    0
}
