//! git: one tool for all its actions.

use emergent_guest_protocol::GuestCall;
use emergent_wire::git::{GitAnswer, GitRequest};
use serde_json::{Value, json};

use super::bash::MAX_CALL_TIME;
use super::call::ToolContext;
use super::error::ToolError;
use super::table::{AnswerTypes, Effect, Shown, Tool, TypeSchema};
use super::text;
use crate::summary::{Summarize, repository, short_option};

impl Tool for GitRequest {
    const TITLE: &'static str = "Use git";
    const INSTRUCTIONS: &'static str = GIT;
    const EFFECT: Effect = Effect::Anything;

    async fn run(&self, context: &ToolContext<'_>) -> Result<GitAnswer, ToolError> {
        context.request_within(GuestCall::Git(self.clone()), MAX_CALL_TIME).await
    }

    fn show(&self, answer: &GitAnswer) -> Shown {
        Shown::Text(text::git::answer(answer))
    }

    fn answers() -> AnswerTypes {
        AnswerTypes { finished: TypeSchema::of::<GitAnswer>(), started: None }
    }
}

impl Summarize for GitRequest {
    fn summary(&self) -> Value {
        json!({
            "action": self.action,
            "path": short_option(self.path.as_ref()),
            "repository_url": repository(self.repository_url.as_ref()),
            "branch": short_option(self.branch.as_ref()),
            "remote": repository(self.remote.as_ref()),
        })
    }
}

const GIT: &str = "\
Work with a git repository and get structured answers: clone, status, diff, log, commit, push, pull, checkout, branch. \
For anything else (merge, rebase, stash, tag, …) run git with bash.

- `path` is the repository, /workspace unless given; for clone it is where to put it. Each field says which actions \
take it; an action refuses fields that are not its own.
- commit takes all changes, new files too, unless `files` says which; it needs a `message`.
- diff shows unstaged changes, or staged ones (`staged`), or the difference to `base`; the patch is cut at 50 KiB \
(`truncated`): ask for single `files` then.
- branch lists; with `create` or `delete` it changes `branch`. checkout switches to `branch`, with `create` a new one.
- A refusal of git is the error git_failed with git's own words.";
