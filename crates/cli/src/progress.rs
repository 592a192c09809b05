//! The progress line on a terminal while the server works.

use std::future::Future;
use std::time::{Duration, Instant};

use crate::output;

/// Work that ends sooner shows no progress.
const DELAY: Duration = Duration::from_millis(300);
const FRAMES: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];

/// Awaits the work. If stderr is a terminal, it shows `what` and the elapsed time meanwhile.
pub(crate) async fn during<T>(what: &str, work: impl Future<Output = T>) -> T {
    if !output::stderr_is_terminal() {
        return work.await;
    }
    let started = Instant::now();
    let mut work = std::pin::pin!(work);
    let mut shown = false;
    for frame in FRAMES.iter().cycle() {
        let pause = if shown { Duration::from_millis(100) } else { DELAY };
        match tokio::time::timeout(pause, &mut work).await {
            Ok(result) => {
                if shown {
                    output::error_bytes(b"\r\x1b[K");
                }
                return result;
            }
            Err(_) => {
                let seconds = started.elapsed().as_secs();
                output::error_bytes(format!("\r\x1b[K{frame} {what} … {seconds} s").as_bytes());
                shown = true;
            }
        }
    }
    work.await
}
