//! Searches: requests on standard input, answers on standard output, one after the other.
//!
//! The guest agent starts this for glob and grep. A process of its own, because the search engine is most of the code
//! and none of it is needed while nobody searches, and because a search that goes wrong (a pattern that needs too much
//! memory, say) must take nothing else with it. Cancelling a search is killing it. Who has searched will search again,
//! and starting a process is slow on gVisor: so it stays for a while, unless it has grown large.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use emergent_guest_tools::search::{
    LENGTH_BYTES, SearchReply, SearchRequest, message_content, run, to_message,
};
use emergent_wire::{ErrorCode, ErrorDetail};

/// The regex compiler and the directory walker may recurse deeply.
const STACK_BYTES: usize = 8 << 20;
/// How long the next search is waited for.
const IDLE_MS: libc::c_int = 30_000;
/// A process that has grown over this ends after its answer.
const MAX_RESIDENT_PAGES: u64 = (24 << 20) / 4096;

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
        if resident_pages() > MAX_RESIDENT_PAGES {
            return ExitCode::SUCCESS;
        }
    }
}

fn failed(code: ErrorCode, message: &str) -> SearchReply {
    SearchReply::Err(ErrorDetail::new(code, message))
}

/// The next message, whole; none when the agent wants no more, or has not for a while.
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

/// How much memory this process holds.
fn resident_pages() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(u64::MAX)
}

/// A home directory comes from `HOME` or not at all. This takes the place of the C library's look-up, which would
/// load shared libraries of the image into a static program.
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
