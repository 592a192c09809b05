//! Failpoints: named places in the code where a test can kill the process, as `kill -9` or a power cut would.
//!
//! `EMERGENT_FAILPOINT=create.row_written` kills the process the first time that it reaches the failpoint,
//! `create.row_written@3` the third time. Release builds have no failpoints: the macro expands to nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The environment variable that names the failpoint to kill at.
pub const VARIABLE: &str = "EMERGENT_FAILPOINT";

/// Marks a failpoint.
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(debug_assertions)]
        $crate::reach($name);
    };
}

struct Armed {
    name: String,
    /// The number of times left until the process is killed.
    left: AtomicUsize,
}

/// Called by [`failpoint!`]: kills the process if this failpoint is armed and its count is reached.
#[doc(hidden)]
pub fn reach(name: &str) {
    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
    let armed = ARMED.get_or_init(|| std::env::var(VARIABLE).ok().map(|text| parse(&text)));
    if let Some(armed) = armed
        && armed.name == name
        && armed.left.fetch_sub(1, Ordering::SeqCst) == 1
    {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal arrives in a moment. This thread must do nothing until then.
        loop {
            std::thread::park();
        }
    }
}

fn parse(text: &str) -> Armed {
    let (name, times) = text.split_once('@').unwrap_or((text, "1"));
    Armed { name: name.to_owned(), left: AtomicUsize::new(times.parse().unwrap_or(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failpoint_can_be_armed_for_a_later_pass() {
        assert_eq!(parse("a.b").left.into_inner(), 1);
        let third = parse("a.b@3");
        assert_eq!((third.name.as_str(), third.left.into_inner()), ("a.b", 3));
    }
}
