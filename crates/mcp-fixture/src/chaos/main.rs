//! An MCP server over stdio that misbehaves as told, for tests of what supervises and bridges such servers; when it
//! behaves it is the tiny server of benchmarks.
//!
//! `mcp-chaos [MODE [NUMBER]]`, see [`mode::Mode`]. No runtime, no MCP library: lines in, lines out, a thread for each
//! call that takes time. Messages are passed through as raw JSON where they can be, so that a test sees what arrived.

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
    // Calls that still run are of no use to anybody.
    std::process::exit(0)
}

/// One line to standard error.
fn say(line: &str) {
    eprintln!("mcp-chaos: {line}");
}
