//! Runs programs of the host.

use std::process::{Command, Stdio};

/// Runs a program that must succeed, and returns its standard output. Its standard error is that of the test.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", output.status);
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}

/// Runs `docker` with these arguments, and returns its output without the last newline.
#[track_caller]
pub fn docker(arguments: &[&str]) -> String {
    run("docker", arguments).trim().to_owned()
}

/// Runs `pgrep` with these arguments, and returns its output. No matching process is a success with an empty output.
#[track_caller]
pub fn pgrep(arguments: &[&str]) -> String {
    let output = Command::new("pgrep").args(arguments).stdin(Stdio::null()).output().expect("pgrep starts");
    // pgrep exits with 1 when no process matches, and with more after an error.
    assert!(matches!(output.status.code(), Some(0 | 1)), "pgrep {arguments:?}: {}", output.status);
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}
