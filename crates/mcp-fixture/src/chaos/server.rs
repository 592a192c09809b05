//! Reads lines and answers them.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;

use crate::message::{Initialize, Message, answer, error, outgoing};
use crate::mode::Mode;
use crate::output::Output;
use crate::{flood, say, tools};

/// The most notifications that are kept for `received`.
const REMEMBERED: usize = 10_000;
const NOT_FOUND: i32 = -32601;
const REFUSED: i32 = -32000;

/// The server. Clones share its state.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) mode: Mode,
    output: Arc<Output>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Half a line was written. The next output ends it first.
    half_line: AtomicBool,
    /// Notifications from the client, as lines.
    received: Mutex<Vec<String>>,
    /// Requests to the client that have no answer yet, by their id.
    asked: Mutex<HashMap<String, Sender<String>>>,
    next_id: AtomicU64,
}

impl Server {
    pub(crate) fn new(mode: Mode) -> Self {
        Self { mode, output: Arc::new(Output::new()), state: Arc::default() }
    }

    /// Serves until the end of the input.
    pub(crate) fn run_until_eof(&self) {
        let mut input = BufReader::with_capacity(64 * 1024, std::io::stdin());
        let mut line = Vec::with_capacity(4096);
        while matches!(input.read_until(b'\n', &mut line), Ok(1..)) {
            if self.mode != Mode::Silent {
                self.take(&line);
            }
            line.clear();
        }
    }

    fn take(&self, line: &[u8]) {
        let Ok(message) = serde_json::from_slice::<Message>(line) else {
            return say("received a line that is not a message");
        };
        match (message.id, &message.method) {
            (Some(id), Some(method)) => self.take_request(id.get(), method, &message),
            (None, Some(_)) => self.take_notification(line),
            (Some(id), None) => self.take_response(id.get(), line),
            (None, None) => say("received a message without id and method"),
        }
    }

    fn take_request(&self, id: &str, method: &str, message: &Message) {
        match method {
            "initialize" => self.initialize(id, message),
            _ if self.mode == Mode::SilentAfterInit => {}
            "ping" => self.answer(id, "{}"),
            "tools/list" => self.answer(id, &tools::list(self.mode)),
            "tools/call" => tools::call(self, id, message.params),
            _ => self.send(error(id, NOT_FOUND, method)),
        }
    }

    fn initialize(&self, id: &str, message: &Message) {
        if self.mode == Mode::DieInInitialize {
            eprintln!("boom");
            std::process::exit(3);
        }
        if self.mode == Mode::RefuseInitialize {
            return self.send(error(id, REFUSED, "not today"));
        }
        let params = message.params.and_then(|params| serde_json::from_str::<Initialize>(params.get()).ok());
        let version = params.map_or(r#""2025-11-25""#, |params| params.protocol_version.get());
        let padding = match self.mode {
            Mode::LongInitialize(bytes) => "x".repeat(bytes),
            _ => String::new(),
        };
        let result = format!(
            r#"{{"protocolVersion":{version},"capabilities":{{"tools":{{"listChanged":true}}}},"serverInfo":{{"name":"mcp-chaos{padding}","version":"{}"}}}}"#,
            env!("CARGO_PKG_VERSION")
        );
        self.answer(id, &result);
        if self.mode == Mode::HalfLine {
            self.output.write(br#"{"jsonrpc":"2.0","method":"notifications/mess"#);
            self.state.half_line.store(true, Ordering::SeqCst);
        }
        flood::start(self.mode, &self.output);
    }

    fn take_notification(&self, line: &[u8]) {
        let mut received = self.state.received.lock();
        if received.len() < REMEMBERED {
            received.push(String::from_utf8_lossy(line).trim_end().to_owned());
        }
    }

    fn take_response(&self, id: &str, line: &[u8]) {
        let asked = self.state.asked.lock().remove(id);
        match asked {
            Some(asked) => drop(asked.send(String::from_utf8_lossy(line).trim_end().to_owned())),
            None => say(&format!("received a response to an unknown request: {id}")),
        }
    }

    /// The notifications so far, as a JSON array.
    pub(crate) fn received(&self) -> String {
        format!("[{}]", self.state.received.lock().join(","))
    }

    /// Answers a request.
    pub(crate) fn answer(&self, id: &str, result: &str) {
        self.send(answer(id, result));
    }

    /// Sends a notification.
    pub(crate) fn notify(&self, method: &str, params: Option<&str>) {
        self.write(outgoing(None, method, params));
    }

    /// Sends a request. The receiver gets the response as it arrived.
    pub(crate) fn ask(&self, method: &str, params: Option<&str>) -> Receiver<String> {
        let id = format!("\"chaos-{}\"", self.state.next_id.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = channel();
        self.state.asked.lock().insert(id.clone(), sender);
        self.write(outgoing(Some(&id), method, params));
        receiver
    }

    /// Sends a response, with the faults of the mode, in one write.
    pub(crate) fn send(&self, line: String) {
        match self.mode {
            Mode::Stranger => {
                let strangers = [answer("987654321", "{}"), answer("\"stranger\"", "{}")].concat();
                self.write(strangers + &line);
            }
            Mode::Junk => self.write(format!("this is not JSON\n\n\r\n{line}")),
            _ => self.write(line),
        }
    }

    /// Writes whole lines. Ends a half line first.
    pub(crate) fn write(&self, mut lines: String) {
        if self.mode == Mode::HalfLine && self.state.half_line.swap(false, Ordering::SeqCst) {
            lines.insert(0, '\n');
        }
        self.output.write(lines.as_bytes());
    }
}
