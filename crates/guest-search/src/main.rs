//! One search: a request on standard input, its answer on standard output.
//!
//! The guest agent starts this for every glob and grep. A process of its own, because the search engine is most of
//! the code and none of it is needed while nobody searches, and because a search that goes wrong (a pattern that
//! needs too much memory, say) must take nothing else with it. Cancelling a search is killing it.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use emergent_guest_tools::search::{SearchReply, SearchRequest, run};
use emergent_wire::{ErrorCode, ErrorDetail};

/// The regex compiler and the directory walker may recurse deeply.
const STACK_BYTES: usize = 8 << 20;

fn main() -> ExitCode {
    let search = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(search);
    let reply = match search.map(std::thread::JoinHandle::join) {
        Ok(Ok(reply)) => reply,
        _ => SearchReply::Err(ErrorDetail::new(
            ErrorCode::LimitReached,
            "the sandbox has no room for a search",
        )),
    };
    let written = serde_json::to_vec(&reply).is_ok_and(|json| std::io::stdout().write_all(&json).is_ok());
    if written { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn search() -> SearchReply {
    let mut text = Vec::new();
    let request = std::io::stdin().read_to_end(&mut text).map_err(|error| error.to_string());
    let request = request
        .and_then(|_| serde_json::from_slice::<SearchRequest>(&text).map_err(|error| error.to_string()));
    match request {
        Ok(request) => run(&request, &AtomicBool::new(false)),
        Err(error) => SearchReply::Err(ErrorDetail::new(ErrorCode::BadRequest, error)),
    }
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
