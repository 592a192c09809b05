//! The seam: what this crate asks of whoever runs the tools.

use async_trait::async_trait;
use emergent_wire::git::{GitAnswer, GitRequest};
use emergent_wire::tools::{
    BashAnswer, BashRequest, EditAnswer, EditRequest, GlobAnswer, GlobRequest, GrepAnswer, GrepRequest,
    OperationAnswer, ReadAnswer, ReadRequest, Tool, WriteAnswer, WriteRequest,
};
use emergent_wire::{ErrorCode, ErrorDetail};
use rmcp::model::JsonObject;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::OutputSink;

/// Runs the tools of one workspace.
#[async_trait]
pub trait Tools: Send + Sync + 'static {
    /// The tools that may be used here now. Others are neither shown nor run.
    fn allowed(&self) -> Vec<Tool>;

    /// Runs a tool. The request was parsed, but its ranges were not checked. Dropping the future cancels the call.
    async fn call(&self, call: Call) -> Result<ToolAnswer, ErrorDetail>;
}

/// One call of a tool.
#[derive(Debug)]
pub struct Call {
    /// What to do.
    pub request: ToolRequest,
    /// Takes a command's output as it comes, when somebody wants to see it (bash in the foreground only). The
    /// answer holds the output all the same.
    pub output: Option<OutputSink>,
    /// What was attached to the HTTP request that brought the call: who asks, for instance. Calls of one session
    /// may come from different callers.
    pub http: http::Extensions,
}

/// The request of a tool, as REST takes it.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum ToolRequest {
    Bash(BashRequest),
    Read(ReadRequest),
    Write(WriteRequest),
    Edit(EditRequest),
    Glob(GlobRequest),
    Grep(GrepRequest),
    Git(GitRequest),
}

/// The answer of a tool. As JSON it is exactly the body of REST's answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum ToolAnswer {
    Bash(BashAnswer),
    /// Of bash in the background.
    Operation(OperationAnswer),
    Read(ReadAnswer),
    Write(WriteAnswer),
    Edit(EditAnswer),
    Glob(GlobAnswer),
    Grep(GrepAnswer),
    Git(GitAnswer),
}

impl ToolRequest {
    /// Which tool this is for.
    pub fn tool(&self) -> Tool {
        match self {
            Self::Bash(_) => Tool::Bash,
            Self::Read(_) => Tool::Read,
            Self::Write(_) => Tool::Write,
            Self::Edit(_) => Tool::Edit,
            Self::Glob(_) => Tool::Glob,
            Self::Grep(_) => Tool::Grep,
            Self::Git(_) => Tool::Git,
        }
    }

    /// A tool's request out of the arguments of an MCP call. What does not fit is named.
    pub(crate) fn parse(tool: Tool, arguments: JsonObject) -> Result<Self, ErrorDetail> {
        Ok(match tool {
            Tool::Bash => Self::Bash(typed(arguments)?),
            Tool::Read => Self::Read(typed(arguments)?),
            Tool::Write => Self::Write(typed(arguments)?),
            Tool::Edit => Self::Edit(typed(arguments)?),
            Tool::Glob => Self::Glob(typed(arguments)?),
            Tool::Grep => Self::Grep(typed(arguments)?),
            Tool::Git => Self::Git(typed(arguments)?),
        })
    }
}

fn typed<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, ErrorDetail> {
    serde_path_to_error::deserialize(serde_json::Value::Object(arguments)).map_err(|error| {
        let path = error.path().to_string();
        let reason = error.inner();
        // A field that is missing or unknown is named by the reason itself.
        let message = match path.as_str() {
            "." | "?" => format!("the arguments can't be read: {reason}"),
            path => format!("the argument '{path}' can't be read: {reason}"),
        };
        ErrorDetail::new(ErrorCode::BadRequest, message)
    })
}

macro_rules! from_answers {
    ($($answer:ident => $variant:ident),* $(,)?) => {
        $(impl From<$answer> for ToolAnswer {
            fn from(answer: $answer) -> Self {
                Self::$variant(answer)
            }
        })*
    };
}

from_answers! {
    BashAnswer => Bash,
    OperationAnswer => Operation,
    ReadAnswer => Read,
    WriteAnswer => Write,
    EditAnswer => Edit,
    GlobAnswer => Glob,
    GrepAnswer => Grep,
    GitAnswer => Git,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(tool: Tool, arguments: &serde_json::Value) -> Result<ToolRequest, ErrorDetail> {
        ToolRequest::parse(tool, arguments.as_object().unwrap().clone())
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (tool, arguments, named) in [
            (Tool::Bash, json!({}), "command"),
            (Tool::Bash, json!({"command": 5}), "'command'"),
            (Tool::Bash, json!({"command": "ls", "timeout": 5}), "timeout"),
            (Tool::Bash, json!({"command": "ls", "timeout_ms": "5"}), "'timeout_ms'"),
            (Tool::Bash, json!({"command": "ls", "environment": {"A": 1}}), "'environment.A'"),
            (Tool::Git, json!({"action": "rebase"}), "'action'"),
            (Tool::Git, json!({"action": "diff", "files": ["a", 1]}), "'files[1]'"),
        ] {
            let error = parse(tool, &arguments).unwrap_err();
            assert_eq!(error.code, ErrorCode::BadRequest);
            assert!(error.message.contains(named), "{arguments}: {}", error.message);
        }
    }

    #[test]
    fn every_tool_has_its_request() {
        for (tool, arguments) in [
            (Tool::Bash, json!({"command": "ls"})),
            (Tool::Read, json!({"path": "a"})),
            (Tool::Write, json!({"file_path": "a", "content": ""})),
            (Tool::Edit, json!({"file_path": "a", "old_string": "x", "new_string": "y"})),
            (Tool::Glob, json!({"pattern": "*"})),
            (Tool::Grep, json!({"pattern": "x"})),
            (Tool::Git, json!({"action": "status"})),
        ] {
            assert_eq!(parse(tool, &arguments).unwrap().tool(), tool);
        }
    }
}
