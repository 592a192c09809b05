//! Commands that ran out of memory: what the host knows of it and the sandbox's agent can't, and who is told.
//!
//! The host ends a process of a gVisor sandbox only when the agent in it came too late. gVisor does not cope well with
//! that: processes that are started later, or are there already, may end at once with exit code 1 and without a word, or
//! never. So such a sandbox is ended before the next call, which starts it again with its files, if nothing runs in it;
//! and if something does, commands that fail there are told what may be the reason.

use emergent_wire::event::EventKind;
use emergent_wire::tools::{BashAnswer, OperationAnswer, OperationStatus};
use emergent_wire::{OperationId, WorkspaceId};

use super::calls::{CallTarget, Calls};
use super::live::Live;

/// What is told of a process that something outside the sandbox has ended.
const OUT_OF_MEMORY: &str = "out of memory: a process of this workspace was killed; use less, or create the workspace with more memory";
/// The same of a command in the background, which may have ended before.
const OUT_OF_MEMORY_SINCE: &str = "out of memory: a process of this workspace was killed since this command began, and this one failed; use less, or create the workspace with more memory";

/// What is told of a command that failed in a sandbox that may be damaged.
const DAMAGED: &str = "this workspace ran out of memory before, and the host ended one of its processes: commands may fail without a reason since then; stop and resume it, which ends what runs in it and keeps its files";

impl Calls {
    pub(super) fn oom_kills(&self, to: CallTarget) -> u64 {
        self.context.provider(to.provider).map_or(0, |provider| provider.oom_kills(to.id))
    }

    /// Completes the answer of a command that somebody waited for.
    pub(super) fn judge_command(
        &self,
        to: CallTarget,
        live: &Live,
        kills_before: u64,
        answer: &mut BashAnswer,
    ) {
        let kills = self.oom_kills(to);
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
            self.tell_out_of_memory(to.id, answer.operation_id);
        }
        answer.notes.extend(self.disk_space.note_for_commands());
    }

    /// Completes the answer of a command in the background. It may have ended long ago, and others have run since: only
    /// one that failed can have been the one. (gVisor shows a process that the host ended as one that exited with 1.)
    pub(super) fn judge_operation(&self, to: CallTarget, live: &Live, answer: &mut OperationAnswer) {
        let (id, kills) = (answer.operation_id, self.oom_kills(to));
        live.remember_operation(id, kills);
        if answer.status != OperationStatus::Exited {
            return;
        }
        let failed = answer.exit_code != Some(0) && !answer.timed_out;
        let known_inside = answer.oom_killed;
        let (ran_out, is_new) =
            live.settle_operation(id, |kills_before| known_inside || (failed && kills > kills_before));
        if ran_out && !known_inside {
            answer.oom_killed = true;
            answer.notes.push(OUT_OF_MEMORY_SINCE.to_owned());
        }
        if ran_out && is_new {
            self.tell_out_of_memory(to.id, id);
        }
    }

    fn tell_out_of_memory(&self, id: WorkspaceId, operation: OperationId) {
        tracing::warn!(workspace = %id, %operation, "a command ran out of memory");
        metrics::counter!("emergent_oom_kills_total").increment(1);
        self.context.events.workspace(
            EventKind::OutOfMemory,
            id,
            "a command ran out of memory and was ended",
        );
    }
}
