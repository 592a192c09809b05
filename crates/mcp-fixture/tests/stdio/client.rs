//! A client that reads and writes plain lines, so that a test sees each byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The time limit for each line, and for the end of the process.
const LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: Receiver<String>,
    errors: Receiver<String>,
}

impl Client {
    pub(crate) fn start(program: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(program)
            .args(arguments)
            .env("CHAOS_GREETING", "hello")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        Self { child, input, output: lines(output.unwrap()), errors: lines(errors.unwrap()) }
    }

    pub(crate) fn fixture() -> Self {
        Self::start(env!("CARGO_BIN_EXE_mcp-fixture"), &[])
    }

    /// The chaos server in a mode, initialized.
    pub(crate) fn chaos(mode: &[&str]) -> Self {
        let mut client = Self::start(env!("CARGO_BIN_EXE_mcp-chaos"), mode);
        client.initialize(json!({}));
        client
    }

    pub(crate) fn send_line(&mut self, line: &str) {
        let input = self.input.as_mut().unwrap();
        input.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub(crate) fn send(&mut self, id: impl Into<Value>, method: &str, params: Value) {
        let request = json!({"jsonrpc": "2.0", "id": id.into(), "method": method, "params": params});
        self.send_line(&request.to_string());
    }

    pub(crate) fn notify(&mut self, method: &str, params: Value) {
        self.send_line(&json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string());
    }

    pub(crate) fn call(&mut self, id: impl Into<Value>, tool: &str, arguments: Value) {
        self.send(id, "tools/call", json!({"name": tool, "arguments": arguments}));
    }

    pub(crate) fn initialize(&mut self, capabilities: Value) -> Value {
        let client = json!({"name": "test", "version": "1"});
        let params =
            json!({"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": client});
        self.send("initialize", "initialize", params);
        let result = self.response("initialize");
        self.notify("notifications/initialized", json!({}));
        result
    }

    /// The next line.
    pub(crate) fn line(&self) -> String {
        self.output.recv_timeout(LIMIT).expect("a line")
    }

    /// The next message.
    pub(crate) fn message(&self) -> Value {
        serde_json::from_str(&self.line()).unwrap()
    }

    /// The response to a request, skipping everything else.
    pub(crate) fn response(&self, id: impl Into<Value>) -> Value {
        let id = id.into();
        loop {
            if let Ok(message) = serde_json::from_str::<Value>(&self.line())
                && message["id"] == id
            {
                return message;
            }
        }
    }

    /// The text of a tool's answer.
    pub(crate) fn text(&self, id: impl Into<Value>) -> String {
        let response = self.response(id);
        response["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{response}")).to_owned()
    }

    pub(crate) fn error_line(&self) -> String {
        self.errors.recv_timeout(LIMIT).expect("a line on standard error")
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: the child was not waited for, so its id is still its own.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    pub(crate) fn close_input(&mut self) {
        self.input = None;
    }

    /// The remaining lines, after the end of the process.
    pub(crate) fn rest(&self) -> Vec<String> {
        self.output.iter().collect()
    }

    pub(crate) fn exit(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < LIMIT, "the server does not end");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        // Not `lines`, which would remove the CR of CRLF.
        for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8(line).unwrap()).is_err() {
                break;
            }
        }
    });
    receiver
}
