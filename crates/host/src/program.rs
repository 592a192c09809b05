//! Programs of the host.

use std::ffi::OsStr;
use std::io;
use std::process::{Command, Output, Stdio};

/// A command for a program of the host. The search path is fixed: the environment's `PATH` is not used.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null());
    command
}

/// Runs a program and returns its standard output.
pub fn run(program: &str, arguments: &[&OsStr]) -> io::Result<String> {
    let output = command(program).args(arguments).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(failure(program, &output))
}

/// The error of a program that failed, with its standard error.
pub fn failure(program: &str, output: &Output) -> io::Error {
    let said = String::from_utf8_lossy(&output.stderr);
    io::Error::other(format!("{program} failed ({}): {}", output.status, said.trim()))
}
