//! bash: runs a command, in the foreground or in the background.

use std::time::Duration;

use emergent_guest_protocol::{BashCall, GuestCall};
use emergent_wire::OperationId;
use emergent_wire::tools::{
    BashAnswer, BashOutcome, BashRequest, MAX_STREAM_BYTES, MAX_TIMEOUT_MS, OperationAnswer,
    TERMINATE_GRACE_MS,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::call::{Output, ToolContext};
use super::error::ToolError;
use super::table::{AnswerTypes, Effect, Shown, Streaming, Tool, TypeSchema};
use super::text;
use crate::summary::{Summarize, short, short_option};
use crate::workspace::{GuestRequest, OutputLimit, TimeLimit};

/// The time that a call has beyond its command's: to end the processes, and to answer.
pub(crate) const MARGIN: Duration = Duration::from_millis(TERMINATE_GRACE_MS + 15_000);
/// The time limit for the start of a command in the background.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// The limit on the output of each stream in an answer: the head and the tail at their limits, and the note between them.
pub(crate) const OUTPUT_BYTES: usize = 3 * MAX_STREAM_BYTES;

impl Tool for BashRequest {
    const TITLE: &'static str = "Run a command";
    const NOTES: &'static str = "\
Answers when it has ended; with `Accept: text/event-stream` its output comes as events `stdout` and `stderr`, then
one `result`; with `background` it answers at once with an operation.";
    const INSTRUCTIONS: &'static str = INSTRUCTIONS;
    const EFFECT: Effect = Effect::Anything;
    const ALIAS: Option<&'static str> = Some("exec");

    async fn run(&self, context: &ToolContext<'_>) -> Result<BashOutcome, ToolError> {
        let (stream, collect) = match context.output {
            _ if self.background => (false, false),
            Output::InAnswer => (false, false),
            Output::Streamed(_) => (true, false),
            Output::Shown(_) => (true, true),
        };
        let time = self.effective_timeout_ms().filter(|_| !self.background);
        let time = time.map_or(START_TIMEOUT, |time_ms| Duration::from_millis(time_ms) + MARGIN);
        let call = BashCall { operation_id: OperationId::generate(), request: self.clone(), stream, collect };
        let time_limit = TimeLimit::Total(time);
        let mut running =
            context.start(GuestRequest { call: GuestCall::Bash(call), input: None, time_limit }).await?;
        let answer = context.forward(&mut running, OutputLimit::command(OUTPUT_BYTES)).await?;
        if self.background {
            let started: OperationAnswer = answer.parse()?;
            running.note_operation(started.operation_id);
            return Ok(BashOutcome::Started(started));
        }
        let mut ended: BashAnswer = answer.parse()?;
        running.complete_command(&mut ended);
        if !stream {
            ended.stdout = text::lossy(answer.stdout);
            ended.stderr = text::lossy(answer.stderr);
        }
        Ok(BashOutcome::Ended(ended))
    }

    fn show(&self, answer: &BashOutcome) -> Shown {
        Shown::Text(match answer {
            BashOutcome::Ended(answer) => text::command(answer),
            BashOutcome::Started(answer) => text::operation(answer),
        })
    }

    fn streaming(&self) -> Streaming {
        if self.background { Streaming::None } else { Streaming::CommandOutput }
    }

    fn is_asynchronous(&self) -> bool {
        self.background
    }

    fn answers() -> AnswerTypes {
        let started = Some(TypeSchema::of::<OperationAnswer>());
        AnswerTypes { finished: TypeSchema::of::<BashAnswer>(), started }
    }
}

impl Summarize for BashRequest {
    fn summary(&self) -> Value {
        json!({
            "command_bytes": self.command.len(),
            "command_sha256": hex::encode(Sha256::digest(self.command.as_bytes())),
            "workdir": short_option(self.workdir.as_ref()),
            "timeout_ms": self.timeout_ms,
            "background": self.background,
            "variables": self.environment.keys().map(|name| short(name)).collect::<Vec<_>>(),
        })
    }
}

/// The longest time of a call of git, and of bash in the foreground.
pub(super) const MAX_CALL_TIME: Duration = Duration::from_millis(MAX_TIMEOUT_MS).saturating_add(MARGIN);

const INSTRUCTIONS: &str = "\
Run a command with bash and wait for its end: to build, test, install, run programs. To look at, find or change files \
use read, glob, grep, edit and write instead of cat, find, grep, sed and heredocs: they need no quoting and their \
answers are bounded. Use git for the actions that it offers.

- It runs in /workspace unless `workdir` says otherwise. Every call is a new shell: files stay, but directory changes, \
variables and functions do not. Join what belongs together with &&.
- Standard input is empty, so nothing can be asked or typed: pass flags such as -y.
- After 120 s, or `timeout_ms` (at most 600000), the command and all it has started are ended, and `timed_out` is set.
- An exit code other than 0 is an answer, not a failure of the tool: look at `exit_code`.
- Of each stream up to 50 KiB are shown. Of more you get the beginning and the end (`truncated`), and all of it is in \
the files `stdout_path` and `stderr_path`: read or grep these rather than run the command again.
- For servers and long jobs set `background`: you get an `operation_id` at once and the command goes on. Its output \
grows in /workspace/.emergent/output/<operation_id>/log; state.json beside it says whether it still runs and how it \
ended. End it with kill or pkill.";
