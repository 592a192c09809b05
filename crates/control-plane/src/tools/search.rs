//! glob and grep: searches in the workspace.

use emergent_guest_protocol::GuestCall;
use emergent_wire::tools::{GlobAnswer, GlobRequest, GrepAnswer, GrepRequest};
use serde_json::{Value, json};

use super::call::ToolContext;
use super::error::ToolError;
use super::table::{AnswerTypes, Effect, Shown, Tool, TypeSchema};
use super::text;
use crate::summary::{Summarize, short, short_option};

impl Tool for GlobRequest {
    const TITLE: &'static str = "Find files by name";
    const INSTRUCTIONS: &'static str = GLOB;
    const EFFECT: Effect = Effect::ReadsFiles;

    async fn run(&self, context: &ToolContext<'_>) -> Result<GlobAnswer, ToolError> {
        context.request(GuestCall::Glob(self.clone())).await
    }

    fn show(&self, answer: &GlobAnswer) -> Shown {
        Shown::Text(text::glob(answer))
    }

    fn answers() -> AnswerTypes {
        AnswerTypes { finished: TypeSchema::of::<GlobAnswer>(), started: None }
    }
}

impl Summarize for GlobRequest {
    fn summary(&self) -> Value {
        json!({ "pattern": short(&self.pattern), "path": short_option(self.path.as_ref()) })
    }
}

const GLOB: &str = "\
Find files by name, the newest first. Prefer it to find and ls -R.

- `**/*.ts`, `src/{a,b}/*.rs`: a pattern with / is matched against the path from `path` on (/workspace unless given), \
one without / against names at any depth.
- Hidden files are found; what .gitignore, .ignore or .rgignore leave out is not, unless `pattern` or `path` names \
its directory.
- 100 absolute paths unless `limit` says otherwise (at most 10000). When `truncated` there are more: narrow the pattern.";

impl Tool for GrepRequest {
    const TITLE: &'static str = "Search file contents";
    const INSTRUCTIONS: &'static str = GREP;
    const EFFECT: Effect = Effect::ReadsFiles;

    async fn run(&self, context: &ToolContext<'_>) -> Result<GrepAnswer, ToolError> {
        context.request(GuestCall::Grep(self.clone())).await
    }

    fn show(&self, answer: &GrepAnswer) -> Shown {
        Shown::Text(text::grep(answer))
    }

    fn answers() -> AnswerTypes {
        AnswerTypes { finished: TypeSchema::of::<GrepAnswer>(), started: None }
    }
}

impl Summarize for GrepRequest {
    fn summary(&self) -> Value {
        json!({
            "pattern": short(&self.pattern),
            "path": short_option(self.path.as_ref()),
            "include": short_option(self.include.as_ref()),
        })
    }
}

const GREP: &str = "\
Search the contents of files with a regular expression (ripgrep's engine and syntax: no look-around, no \
back-references). Prefer it to grep and rg in bash.

- `path` is a file or directory, /workspace unless given; `include` takes only files that match a glob (`*.rs`).
- Lines come sorted by path and line number, with `context` lines around each if you ask. To look closer, read the file \
with that number as `offset`.
- Hidden files are searched; what .gitignore, .ignore or .rgignore leave out and binary files are not.
- 100 matching lines unless `limit` says otherwise (at most 10000). When `truncated` there are more: narrow the search. \
`skipped` names files that could not be searched.";
