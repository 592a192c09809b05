//! A script that keeps something for one test process, and removes it when that process is gone.
//!
//! The script waits for the end of its standard input, a pipe which only the test process holds open: it comes also when
//! the test is killed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running script. Dropping it waits until the script has removed what it kept.
#[derive(Debug)]
pub(crate) struct Keeper {
    process: Child,
    /// Open for as long as there is something to keep.
    leash: Option<ChildStdin>,
}

impl Keeper {
    /// Starts a script of bash with one argument. The name is what `ps` shows. A script that goes on to write when the
    /// test is gone needs an `output` that stays.
    pub(crate) fn start(name: &str, script: &str, argument: &Path, output: Stdio) -> Self {
        let mut process = Command::new("bash")
            .args(["-c", script, name])
            .arg(argument)
            .stdin(Stdio::piped())
            .stdout(output)
            // It outlives the test process for a moment; test runners wait for all who hold their end.
            .stderr(Stdio::null())
            // A terminal's or test runner's signal to the test's group must not stop the cleaning.
            .process_group(0)
            .spawn()
            .expect("bash starts");
        let leash = process.stdin.take();
        Self { process, leash }
    }

    /// What the script says, if its output was to be a pipe.
    pub(crate) fn answers(&mut self) -> ChildStdout {
        self.process.stdout.take().expect("standard output is piped")
    }

    /// Sends the script a line.
    pub(crate) fn tell(&mut self, line: &str) {
        let leash = self.leash.as_mut().expect("the script was not let go");
        writeln!(leash, "{line}").expect("the script reads its input");
    }

    /// Lets it remove what it kept.
    pub(crate) fn let_go(&mut self) {
        self.leash = None;
    }

    /// Waits until it is done.
    pub(crate) fn wait(&mut self) {
        let _ = self.process.wait();
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.let_go();
        self.wait();
    }
}
