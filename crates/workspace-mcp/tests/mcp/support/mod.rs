//! A workspace in memory, and clients of both eras that talk to its server as the protocol says, byte by byte.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod client;

use std::sync::Arc;

use async_trait::async_trait;
use emergent_mcp_http::Limits;
use emergent_wire::{ErrorCode, ErrorDetail};
use emergent_workspace_mcp::{
    Call, Config, Hints, OutputSink, ToolContent, ToolDescription, ToolResult, Tools, WorkspaceMcp,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Mutex as AsyncMutex, mpsc, watch};

/// The tools of the fake, in the order in which they are listed.
pub const TOOLS: [&str; 4] = ["bash", "read", "picture", "grep"];

/// A workspace in memory. `read` knows no file but `/workspace/a`, `picture` gives an image, `grep` takes no arguments, and `bash` knows a few
/// commands:
///
/// | command | does |
/// |---|---|
/// | `echo …` | prints the rest |
/// | `fail` | prints to stderr and exits with 3 |
/// | `listen` | prints the texts that the test gives, until it gives `None` |
/// | `flood` | prints for ever, as fast as it can, until the test gives a text |
/// | `panic` | panics |
/// | `who` | prints the caller's name and the number of its request |
pub struct Fake {
    pub allowed: Mutex<Vec<&'static str>>,
    described: Vec<ToolDescription>,
    /// Commands that run.
    pub running: watch::Sender<usize>,
    /// Commands that were dropped before their end.
    pub dropped: watch::Sender<usize>,
    say: mpsc::UnboundedSender<Option<String>>,
    said: AsyncMutex<mpsc::UnboundedReceiver<Option<String>>>,
}

/// The caller, as access control would identify it. The number differs between requests of one caller.
#[derive(Clone, Debug)]
pub struct Caller(pub &'static str, pub u32);

impl emergent_mcp_http::Caller for Caller {
    type Owner = &'static str;

    fn owner(&self) -> &'static str {
        self.0
    }
}

pub type Mcp = WorkspaceMcp<Caller>;

/// Limits under which a request that waits is answered by events at once.
pub fn events_at_once() -> Config {
    let http = Limits { events_after: std::time::Duration::ZERO, ..Limits::default() };
    Config { http, ..Config::default() }
}

pub fn with_sessions(sessions: usize) -> Config {
    let mut config = events_at_once();
    config.http.sessions = sessions;
    config
}

impl Default for Fake {
    fn default() -> Self {
        let (say, said) = mpsc::unbounded_channel();
        Self {
            allowed: Mutex::new(TOOLS.to_vec()),
            described: TOOLS.into_iter().map(describe).collect(),
            running: watch::Sender::new(0),
            dropped: watch::Sender::new(0),
            say,
            said: AsyncMutex::new(said),
        }
    }
}

fn describe(name: &'static str) -> ToolDescription {
    let schema = |value: Value| value.as_object().unwrap().clone();
    let input = schema(json!({ "type": "object", "properties": { "command": { "type": "string" } } }));
    let output = schema(json!({ "type": "object" }));
    let read_only = name != "bash";
    let hints = Hints { read_only, idempotent: read_only, open_world: !read_only };
    ToolDescription::new(name, "A title", "Instructions.", (input, output), hints)
}

struct Running<'a> {
    fake: &'a Fake,
    ended: bool,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.fake.running.send_modify(|count| *count -= 1);
        if !self.ended {
            self.fake.dropped.send_modify(|count| *count += 1);
        }
    }
}

impl Fake {
    pub fn serve(self, config: Config) -> (Arc<Self>, Arc<Mcp>) {
        let fake = Arc::new(self);
        let mcp = Arc::new(WorkspaceMcp::new(fake.clone(), config));
        (fake, mcp)
    }

    /// Makes `listen` print something.
    pub fn say(&self, text: &str) {
        self.say.send(Some(text.to_owned())).unwrap();
    }

    /// Makes `listen` or `flood` end.
    pub fn end(&self) {
        self.say.send(None).unwrap();
    }

    pub async fn until_running(&self, count: usize) {
        self.running.subscribe().wait_for(|running| *running == count).await.unwrap();
    }

    pub async fn until_dropped(&self, count: usize) {
        self.dropped.subscribe().wait_for(|dropped| *dropped == count).await.unwrap();
    }

    async fn bash(&self, command: &str, output: Option<OutputSink>, caller: &Caller) -> ToolResult {
        self.running.send_modify(|count| *count += 1);
        let mut running = Running { fake: self, ended: false };
        let (mut stdout, mut exit_code) = (String::new(), 0);
        match command {
            "fail" => exit_code = 3,
            "listen" => {
                let mut said = self.said.lock().await;
                while let Some(Some(text)) = said.recv().await {
                    if let Some(output) = &output {
                        output.write(text.as_bytes());
                    }
                    stdout.push_str(&text);
                }
            }
            "flood" => {
                let mut said = self.said.lock().await;
                while said.try_recv().is_err() {
                    if let Some(output) = &output {
                        output.write(&[b'x'; 64 * 1024]);
                    }
                    tokio::task::yield_now().await;
                }
            }
            "panic" => panic!("as the test wants"),
            "who" => stdout = format!("{} {}", caller.0, caller.1),
            command => stdout = format!("{}\n", command.trim_start_matches("echo ")),
        }
        running.ended = true;
        let content = ToolContent::Text(format!("{stdout}[exit code {exit_code}]"));
        ToolResult { data: json!({ "stdout": stdout, "exit_code": exit_code }), content }
    }
}

#[async_trait]
impl Tools<Caller> for Fake {
    fn all(&self) -> &[ToolDescription] {
        &self.described
    }

    fn is_allowed(&self, name: &str, _: &Caller) -> bool {
        self.allowed.lock().contains(&name)
    }

    async fn call(&self, call: Call<Caller>) -> Result<ToolResult, ErrorDetail> {
        let Call { name, arguments, output, caller } = call;
        let text = |name: &str| arguments.get(name).and_then(Value::as_str);
        match name.as_str() {
            "bash" => match text("command") {
                Some(command) => Ok(self.bash(command, output, &caller).await),
                None => {
                    let message = "the arguments can't be read: missing field `command`";
                    Err(ErrorDetail::new(ErrorCode::BadRequest, message))
                }
            },
            "read" if text("path") == Some("/workspace/a") => {
                let content = ToolContent::Text("1: one".to_owned());
                Ok(ToolResult { data: json!({ "content": "1: one\n" }), content })
            }
            "read" => Err(ErrorDetail::new(ErrorCode::FileNotFound, "the file does not exist")),
            "picture" => {
                let (data, media_type) = ("aGVsbG8=".to_owned(), "image/png".to_owned());
                let content = ToolContent::Image { data: data.clone(), media_type };
                Ok(ToolResult { data: json!({ "content": data }), content })
            }
            _ => {
                let content = ToolContent::Text("[no lines match]".to_owned());
                Ok(ToolResult { data: json!({ "matches": [] }), content })
            }
        }
    }
}
