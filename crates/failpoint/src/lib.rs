//! Named places where a test can kill the process, as `kill -9` or a power cut would.
//!
//! `EMERGENT_FAILPOINT=create.row_written` kills it the first time it gets there, `create.row_written@3` the third.
//! Release builds have no such places: the macro is empty there.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Names the place to die at.
pub const VARIABLE: &str = "EMERGENT_FAILPOINT";

/// A place where a test can kill the process.
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(debug_assertions)]
        $crate::reach($name);
    };
}

struct Wanted {
    name: String,
    /// Times it is passed before it kills.
    left: AtomicUsize,
}

/// The process got to a place: ends it, without a last word, if this is the one.
#[doc(hidden)]
pub fn reach(name: &str) {
    static WANTED: OnceLock<Option<Wanted>> = OnceLock::new();
    let wanted = WANTED.get_or_init(|| std::env::var(VARIABLE).ok().map(|text| parse(&text)));
    if let Some(wanted) = wanted
        && wanted.name == name
        && wanted.left.fetch_sub(1, Ordering::SeqCst) == 1
    {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal is on its way; this thread must not do anything more.
        loop {
            std::thread::park();
        }
    }
}

fn parse(text: &str) -> Wanted {
    let (name, times) = text.split_once('@').unwrap_or((text, "1"));
    Wanted { name: name.to_owned(), left: AtomicUsize::new(times.parse().unwrap_or(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_may_be_meant_later_than_the_first_time() {
        assert_eq!(parse("a.b").left.into_inner(), 1);
        let third = parse("a.b@3");
        assert_eq!((third.name.as_str(), third.left.into_inner()), ("a.b", 3));
    }
}
