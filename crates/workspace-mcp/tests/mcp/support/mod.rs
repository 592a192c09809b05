//! A workspace in memory, and clients of both eras that talk to its server as the protocol says, byte by byte.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod client;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use emergent_wire::git::{GitAnswer, GitStatus};
use emergent_wire::tools::{
    BashAnswer, BashRequest, EditAnswer, GlobAnswer, GrepAnswer, GrepMatch, OperationAnswer, OperationStatus,
    ReadAnswer, ReadRequest, Tool, WriteAnswer,
};
use emergent_wire::{ErrorCode, ErrorDetail, OperationId};
use emergent_workspace_mcp::{Call, Config, OutputSink, ToolAnswer, ToolRequest, Tools, WorkspaceMcp};
use tokio::sync::{Mutex as AsyncMutex, mpsc, watch};

/// A workspace in memory. Its bash knows a few commands:
///
/// | command | does |
/// |---|---|
/// | `echo …` | prints the rest |
/// | `fail` | prints to stderr and exits with 3 |
/// | `listen` | prints what the test says, until it says `None` |
/// | `flood` | prints for ever, as fast as it can, until the test says something |
/// | `panic` | panics |
/// | `who` | prints who asks |
pub struct Fake {
    pub allowed: Mutex<Vec<Tool>>,
    files: Mutex<BTreeMap<String, String>>,
    /// Commands that run.
    pub running: watch::Sender<usize>,
    /// Commands that were dropped before their end.
    pub dropped: watch::Sender<usize>,
    say: mpsc::UnboundedSender<Option<String>>,
    said: AsyncMutex<mpsc::UnboundedReceiver<Option<String>>>,
}

/// Who asks, as an access check would attach it to a request.
#[derive(Clone, Debug)]
pub struct Caller(pub &'static str);

impl Default for Fake {
    fn default() -> Self {
        let (say, said) = mpsc::unbounded_channel();
        Self {
            allowed: Mutex::new(Tool::ALL.to_vec()),
            files: Mutex::default(),
            running: watch::Sender::new(0),
            dropped: watch::Sender::new(0),
            say,
            said: AsyncMutex::new(said),
        }
    }
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
    pub fn serve(self, config: Config) -> (Arc<Self>, Arc<WorkspaceMcp>) {
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

    async fn bash(
        &self,
        request: &BashRequest,
        output: Option<OutputSink>,
        http: &http::Extensions,
    ) -> BashAnswer {
        self.running.send_modify(|count| *count += 1);
        let mut running = Running { fake: self, ended: false };
        let mut answer = BashAnswer {
            stdout: String::new(),
            stderr: String::new(),
            exit_code: Some(0),
            signal: None,
            duration_ms: 7,
            truncated: false,
            stdout_bytes: 0,
            stderr_bytes: 0,
            timed_out: false,
            oom_killed: false,
            stdout_path: None,
            stderr_path: None,
            notes: Vec::new(),
            operation_id: OperationId(uuid::Uuid::nil()),
        };
        match request.command.as_str() {
            "fail" => {
                answer.stderr = "no such thing\n".to_owned();
                answer.exit_code = Some(3);
            }
            "listen" => {
                let mut said = self.said.lock().await;
                while let Some(Some(text)) = said.recv().await {
                    if let Some(output) = &output {
                        output.write(text.as_bytes());
                    }
                    answer.stdout.push_str(&text);
                }
            }
            "flood" => {
                let mut said = self.said.lock().await;
                while said.try_recv().is_err() {
                    if let Some(output) = &output {
                        output.write(&[b'x'; 64 * 1024]);
                    }
                    answer.stdout_bytes += 64 * 1024;
                    tokio::task::yield_now().await;
                }
            }
            "panic" => panic!("as the test wants"),
            "who" => {
                answer.stdout = http.get::<Caller>().map_or("nobody", |caller| caller.0).to_owned();
            }
            command => answer.stdout = format!("{}\n", command.trim_start_matches("echo ")),
        }
        running.ended = true;
        answer
    }

    fn read(&self, request: &ReadRequest) -> Result<ReadAnswer, ErrorDetail> {
        let files = self.files.lock().unwrap();
        let content = files.get(&request.file_path).ok_or_else(|| {
            ErrorDetail::new(ErrorCode::FileNotFound, format!("{} does not exist", request.file_path))
        })?;
        let lines = content.lines().count() as u64;
        let content = content.lines().enumerate().map(|(at, line)| format!("{}: {line}\n", at + 1)).collect();
        Ok(ReadAnswer { content, total_lines: Some(lines), file_size: 9, ..ReadAnswer::default() })
    }
}

#[async_trait]
impl Tools for Fake {
    fn allowed(&self) -> Vec<Tool> {
        self.allowed.lock().unwrap().clone()
    }

    async fn call(&self, call: Call) -> Result<ToolAnswer, ErrorDetail> {
        let Call { request, output, http } = call;
        Ok(match request {
            ToolRequest::Bash(request) if request.background => OperationAnswer {
                operation_id: OperationId(uuid::Uuid::nil()),
                status: OperationStatus::Running,
                exit_code: None,
                signal: None,
                duration_ms: 0,
                timed_out: false,
                oom_killed: false,
                stdout: String::new(),
                stderr: String::new(),
                next_offset: 0,
                more: false,
                notes: Vec::new(),
            }
            .into(),
            ToolRequest::Bash(request) => self.bash(&request, output, &http).await.into(),
            ToolRequest::Read(request) => self.read(&request)?.into(),
            ToolRequest::Write(request) => {
                let bytes_written = request.content.len() as u64;
                let path = request.file_path.clone();
                let created = self.files.lock().unwrap().insert(path, request.content).is_none();
                let (file_path, sha256) = (request.file_path, "5e".repeat(32));
                WriteAnswer { success: true, file_path, bytes_written, created, sha256 }.into()
            }
            ToolRequest::Edit(request) => {
                let mut files = self.files.lock().unwrap();
                let content =
                    files.get_mut(&request.file_path).filter(|text| text.contains(&request.old_string));
                let content = content.ok_or_else(|| {
                    ErrorDetail::new(
                        ErrorCode::OldStringNotFound,
                        "old_string is not in the file: read it again",
                    )
                })?;
                *content = content.replacen(&request.old_string, &request.new_string, 1);
                EditAnswer {
                    success: true,
                    lines_changed: 1,
                    replacements: 1,
                    diff: format!("-{}\n+{}\n", request.old_string, request.new_string),
                    matched_by: "exact".to_owned(),
                    sha256: "5e".repeat(32),
                }
                .into()
            }
            ToolRequest::Glob(_) => {
                let matches: Vec<String> = self.files.lock().unwrap().keys().cloned().collect();
                GlobAnswer { count: matches.len() as u64, matches, truncated: false }.into()
            }
            ToolRequest::Grep(request) => {
                let files = self.files.lock().unwrap();
                let found = files.iter().find(|(_, content)| content.contains(&request.pattern));
                let matches = found.map(|(path, content)| GrepMatch {
                    file_path: path.clone(),
                    line_number: 1,
                    line: content.lines().next().unwrap_or_default().to_owned(),
                    ..GrepMatch::default()
                });
                GrepAnswer { matches: matches.into_iter().collect(), ..GrepAnswer::default() }.into()
            }
            ToolRequest::Git(request) => {
                let status =
                    GitStatus { branch: Some("main".to_owned()), clean: true, ..GitStatus::default() };
                let path = request.path.unwrap_or_else(|| "/workspace".to_owned());
                GitAnswer { success: true, path, status: Some(status), ..GitAnswer::default() }.into()
            }
        })
    }
}
