//! An MCP server over stdio that misbehaves in a chosen way, for tests of the supervisor and the bridge. In its normal mode it
//! is the small server of the benchmarks.
//!
//! `mcp-chaos [MODE [NUMBER]]`, see [`mode::Mode`]. It has no async runtime and no MCP library. It reads and writes lines, and
//! each call that takes time has a thread. Parts of messages are sent back as raw JSON, so that a test sees the bytes that
//! arrived.

mod arguments;
mod flood;
mod message;
mod mode;
mod output;
mod process;
mod server;
mod tools;

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use mode::Mode;
use server::Server;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [process::SLEEPER, seconds] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        thread::sleep(Duration::from_secs(seconds.parse().unwrap_or(0)));
        return ExitCode::SUCCESS;
    }
    let mode = match Mode::parse(&arguments) {
        Ok(mode) => mode,
        Err(message) => {
            say(&message);
            return ExitCode::from(2);
        }
    };
    process::set_termination(mode != Mode::IgnoreTerm);
    match mode {
        Mode::SlowStart(wait) => thread::sleep(wait),
        Mode::ExitAfter(wait) => drop(thread::spawn(move || {
            thread::sleep(wait);
            std::process::exit(1)
        })),
        _ => {}
    }
    Server::new(mode).run_until_eof();
    if matches!(mode, Mode::IgnoreEof | Mode::IgnoreTerm) {
        loop {
            thread::park();
        }
    }
    // Ends the calls that still run.
    std::process::exit(0)
}

/// One line to standard error.
fn say(line: &str) {
    eprintln!("mcp-chaos: {line}");
}
