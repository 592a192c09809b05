//! A script that owns a resource for one test process, and removes it when that process ends.
//!
//! The script waits for the end of its standard input. That is a pipe which only the test process holds open, so it ends also when
//! the test is killed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running script. Dropping it waits until the script has removed the resource.
#[derive(Debug)]
pub(crate) struct Keeper {
    process: Child,
    /// Open for as long as the resource is needed.
    input: Option<ChildStdin>,
}

impl Keeper {
    /// Starts a bash script with one argument. `ps` shows it under the name. The pipe of an `output` breaks when the test ends, so
    /// a script that writes after that needs another one.
    pub(crate) fn start(name: &str, script: &str, argument: &Path, output: Stdio) -> Self {
        let mut process = Command::new("bash")
            .args(["-c", script, name])
            .arg(argument)
            .stdin(Stdio::piped())
            .stdout(output)
            // The script outlives the test process. A test runner waits until every copy of its stderr is closed.
            .stderr(Stdio::null())
            // A signal of a terminal or test runner to the test's process group must not end the script.
            .process_group(0)
            .spawn()
            .expect("bash starts");
        let input = process.stdin.take();
        Self { process, input }
    }

    /// The script's standard output, which must be a pipe.
    pub(crate) fn output(&mut self) -> ChildStdout {
        self.process.stdout.take().expect("standard output is piped")
    }

    /// Sends the script a line.
    pub(crate) fn send(&mut self, line: &str) {
        let input = self.input.as_mut().expect("the script was not released");
        writeln!(input, "{line}").expect("the script reads its input");
    }

    /// Ends the script's input, so that it removes the resource.
    pub(crate) fn release(&mut self) {
        self.input = None;
    }

    /// Waits until the script has ended.
    pub(crate) fn wait(&mut self) {
        let _ = self.process.wait();
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.release();
        self.wait();
    }
}
