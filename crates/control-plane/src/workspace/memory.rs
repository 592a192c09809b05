//! Detects out-of-memory kills by the host, which the guest agent can't see, and adds them to the answers of commands.
//!
//! The host kills a process of a gVisor sandbox only when the agent in the sandbox has not prevented it in time. gVisor does not cope
//! well with that: other processes of the sandbox, also later ones, may exit at once with code 1 and without a message, or hang. So the
//! next call restarts such a sandbox with its files, if no command runs in it. Otherwise failing commands get a note with the
//! possible reason.

use emergent_wire::event::EventKind;
use emergent_wire::tools::{BashAnswer, OperationAnswer, OperationStatus};
use emergent_wire::{OperationId, WorkspaceId};

use super::calls::{CallTarget, Calls};
use super::live::LiveWorkspace;

/// The note for a command during which the host has killed a process.
const OUT_OF_MEMORY: &str = "out of memory: a process of this workspace was killed; use less, or create the workspace with more memory";
/// The note for a background command, which may have ended before the kill.
const OUT_OF_MEMORY_SINCE: &str = "out of memory: a process of this workspace was killed since this command began, and this one failed; use less, or create the workspace with more memory";

/// The note for a command that failed in a sandbox in which the host has killed a process before.
const DAMAGED: &str = "this workspace ran out of memory before, and the host killed one of its processes: since then commands may fail without a reason; stop and resume it, which ends its processes and keeps its files";

impl Calls {
    /// The host's count of out-of-memory kills in a sandbox.
    pub(super) fn oom_kills(&self, target: CallTarget) -> u64 {
        self.context.provider(target.provider).map_or(0, |provider| provider.oom_kills(target.id))
    }

    /// Completes the answer of a command in the foreground.
    pub(super) fn complete_command(
        &self,
        target: CallTarget,
        live: &LiveWorkspace,
        kills_before: u64,
        answer: &mut BashAnswer,
    ) {
        let kills = self.oom_kills(target);
        if kills > kills_before {
            live.note_damage();
        }
        if !answer.oom_killed && kills > kills_before {
            answer.oom_killed = true;
            answer.notes.push(OUT_OF_MEMORY.to_owned());
        } else if kills > 0 && !answer.oom_killed && answer.exit_code != Some(0) {
            answer.notes.push(DAMAGED.to_owned());
        }
        if answer.oom_killed {
            self.report_out_of_memory(target.id, answer.operation_id);
        }
        answer.notes.extend(self.disk_space.note_for_commands());
    }

    /// Completes the answer of a command in the background. Other commands may have run since its end, so the kill is attributed to it
    /// only if it failed. (gVisor shows a process that the host has killed as one that exited with code 1.)
    pub(super) fn complete_operation(
        &self,
        target: CallTarget,
        live: &LiveWorkspace,
        answer: &mut OperationAnswer,
    ) {
        let (id, kills) = (answer.operation_id, self.oom_kills(target));
        live.note_operation(id, kills);
        if answer.status != OperationStatus::Exited {
            return;
        }
        let failed = answer.exit_code != Some(0) && !answer.timed_out;
        let known_to_agent = answer.oom_killed;
        let (ran_out, is_new) =
            live.ran_out_of_memory(id, |kills_before| known_to_agent || (failed && kills > kills_before));
        if ran_out && !known_to_agent {
            answer.oom_killed = true;
            answer.notes.push(OUT_OF_MEMORY_SINCE.to_owned());
        }
        if ran_out && is_new {
            self.report_out_of_memory(target.id, id);
        }
    }

    fn report_out_of_memory(&self, id: WorkspaceId, operation: OperationId) {
        tracing::warn!(workspace = %id, %operation, "a command ran out of memory");
        metrics::counter!("emergent_oom_kills_total").increment(1);
        self.context.events.workspace(
            EventKind::OutOfMemory,
            id,
            "a command ran out of memory and was ended",
        );
    }
}
