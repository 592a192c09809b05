//! The table of tools. [`Tool`] is the definition of one tool, [`ToolEntry`] the same definition for code that handles any tool.

use std::sync::Arc;

use emergent_wire::git::GitRequest;
use emergent_wire::tools::{
    BashRequest, EditRequest, GlobRequest, GrepRequest, ReadRequest, ToolRequest, WriteRequest,
};
use futures_util::future::BoxFuture;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

use super::call::ToolContext;
use super::error::ToolError;
use crate::summary::Summarize;

/// The limit on the size of a request, unless the tool defines another.
pub(crate) const MAX_REQUEST_BYTES: usize = 5 << 20;

/// The tools of all workspaces, in the order of the list.
pub(crate) fn standard() -> Vec<Arc<ToolEntry>> {
    vec![
        ToolEntry::of::<BashRequest>(),
        ToolEntry::of::<ReadRequest>(),
        ToolEntry::of::<WriteRequest>(),
        ToolEntry::of::<EditRequest>(),
        ToolEntry::of::<GlobRequest>(),
        ToolEntry::of::<GrepRequest>(),
        ToolEntry::of::<GitRequest>(),
    ]
}

/// A tool, defined by the type of its requests.
pub(crate) trait Tool: ToolRequest + Summarize + ToSchema + Send + Sync + 'static {
    /// A name for people.
    const TITLE: &'static str;
    /// Notes in the description of the REST API, beside the title.
    const NOTES: &'static str = "";
    /// Instructions for a model: the facts that the schema can't express.
    const INSTRUCTIONS: &'static str;
    const EFFECT: Effect;
    /// A second name in REST paths.
    const ALIAS: Option<&'static str> = None;
    const MAX_REQUEST_BYTES: usize = MAX_REQUEST_BYTES;

    /// Runs the tool. Dropping the future cancels the call.
    fn run(&self, context: &ToolContext<'_>) -> impl Future<Output = Result<Self::Answer, ToolError>> + Send;

    /// The answer as a model sees it.
    fn show(&self, answer: &Self::Answer) -> Shown;

    /// The output that this request can send while it runs.
    fn streaming(&self) -> Streaming {
        Streaming::None
    }

    /// Whether the answer reports only that the work has started.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// The types of the answers.
    fn answers() -> AnswerTypes;
}

/// The changes that a tool can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It changes nothing.
    ReadsFiles,
    /// It replaces a file. A repeated call changes nothing more.
    ReplacesFile,
    /// It changes a file.
    ChangesFile,
    /// It can change anything in the workspace, and send requests to the network.
    Anything,
}

/// The output that a call can send while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Streaming {
    None,
    /// The output of a command.
    CommandOutput,
    /// The bytes of a file.
    FileContent,
}

/// An answer as a model sees it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Shown {
    Text(String),
    Image {
        /// Base64.
        data: String,
        media_type: &'static str,
    },
}

/// The arguments of a call, in the form in which a front received them.
pub(crate) enum Arguments<'a> {
    /// The text of a JSON object.
    Json(&'a [u8]),
    Object(Map<String, Value>),
}

/// The types of a tool's answers.
pub(crate) struct AnswerTypes {
    /// The answer after the work.
    pub(crate) finished: TypeSchema,
    /// The answer to an asynchronous call, where the tool has such calls.
    pub(crate) started: Option<TypeSchema>,
}

/// The name and the schema of a type, for OpenAPI and JSON Schema.
#[derive(Clone, Copy)]
pub(crate) struct TypeSchema {
    pub(crate) name: fn() -> String,
    pub(crate) schema: fn() -> RefOr<Schema>,
    /// Adds the schemas of the types that it refers to.
    pub(crate) references: fn(&mut Vec<(String, RefOr<Schema>)>),
}

impl TypeSchema {
    pub(crate) fn of<T: ToSchema>() -> Self {
        Self { name: || T::name().into_owned(), schema: T::schema, references: T::schemas }
    }
}

/// An entry of the table.
pub(crate) struct ToolEntry {
    /// In REST paths, lists of tools, the audit log and the metrics.
    pub(crate) name: &'static str,
    pub(crate) alias: Option<&'static str>,
    pub(crate) title: &'static str,
    pub(crate) notes: &'static str,
    pub(crate) instructions: &'static str,
    pub(crate) effect: Effect,
    pub(crate) max_request_bytes: usize,
    pub(crate) request: TypeSchema,
    pub(crate) answers: fn() -> AnswerTypes,
    parse: fn(Arguments<'_>) -> Result<Box<dyn AnyRequest>, ToolError>,
}

impl ToolEntry {
    pub(crate) fn of<T: Tool>() -> Arc<Self> {
        Arc::new(Self {
            name: T::NAME,
            alias: T::ALIAS,
            title: T::TITLE,
            notes: T::NOTES,
            instructions: T::INSTRUCTIONS,
            effect: T::EFFECT,
            max_request_bytes: T::MAX_REQUEST_BYTES,
            request: TypeSchema::of::<T>(),
            answers: T::answers,
            parse: |arguments| Ok(Box::new(arguments.parse::<T>()?)),
        })
    }

    /// Parses a request. It is not validated yet.
    pub(super) fn parse(&self, arguments: Arguments<'_>) -> Result<Box<dyn AnyRequest>, ToolError> {
        (self.parse)(arguments)
    }
}

impl Arguments<'_> {
    fn parse<T: Tool>(self) -> Result<T, ToolError> {
        let refuse = |message| ToolError::Unreadable(message);
        match self {
            Self::Json(text) => serde_json::from_slice(text)
                .map_err(|error| refuse(format!("the body can't be read: {error}"))),
            Self::Object(object) => {
                serde_path_to_error::deserialize(Value::Object(object)).map_err(|error| {
                    let reason = error.inner();
                    refuse(match error.path().to_string().as_str() {
                        // The reason itself names a field that is missing or unknown.
                        "." | "?" => format!("the arguments can't be read: {reason}"),
                        path => format!("the argument '{path}' can't be read: {reason}"),
                    })
                })
            }
        }
    }
}

/// The request of any tool.
pub(super) trait AnyRequest: Send + Sync {
    fn validate(&self) -> Result<(), ToolError>;
    fn summary(&self) -> Value;
    fn streaming(&self) -> Streaming;
    fn run<'a>(self: Box<Self>, context: &'a ToolContext<'_>) -> BoxFuture<'a, Result<ToolAnswer, ToolError>>
    where
        Self: 'a;
}

impl<T: Tool> AnyRequest for T {
    fn validate(&self) -> Result<(), ToolError> {
        emergent_wire::Validate::validate(self).map_err(ToolError::Invalid)
    }

    fn summary(&self) -> Value {
        Summarize::summary(self)
    }

    fn streaming(&self) -> Streaming {
        Tool::streaming(self)
    }

    fn run<'a>(self: Box<Self>, context: &'a ToolContext<'_>) -> BoxFuture<'a, Result<ToolAnswer, ToolError>>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let answer = Tool::run(&*self, context).await?;
            Ok(ToolAnswer(Box::new(Answered { request: self, answer })))
        })
    }
}

/// The answer of any tool.
pub(crate) struct ToolAnswer(Box<dyn AnyAnswer>);

impl ToolAnswer {
    /// The answer as JSON text.
    pub(crate) fn to_json(&self) -> Result<Vec<u8>, ToolError> {
        self.0.to_json().map_err(ToolError::Unwritable)
    }

    /// The answer as a JSON value.
    pub(crate) fn to_value(&self) -> Result<Value, ToolError> {
        self.0.to_value().map_err(ToolError::Unwritable)
    }

    pub(crate) fn show(&self) -> Shown {
        self.0.show()
    }

    /// Whether it reports only that the work has started.
    pub(crate) fn is_asynchronous(&self) -> bool {
        self.0.is_asynchronous()
    }
}

struct Answered<T: Tool> {
    request: Box<T>,
    answer: T::Answer,
}

trait AnyAnswer: Send {
    fn to_json(&self) -> serde_json::Result<Vec<u8>>;
    fn to_value(&self) -> serde_json::Result<Value>;
    fn show(&self) -> Shown;
    fn is_asynchronous(&self) -> bool;
}

impl<T: Tool> AnyAnswer for Answered<T> {
    fn to_json(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&self.answer)
    }

    fn to_value(&self) -> serde_json::Result<Value> {
        serde_json::to_value(&self.answer)
    }

    fn show(&self) -> Shown {
        self.request.show(&self.answer)
    }

    fn is_asynchronous(&self) -> bool {
        self.request.is_asynchronous()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(name: &str) -> Arc<ToolEntry> {
        standard().into_iter().find(|tool| tool.name == name).unwrap()
    }

    fn parse(tool: &str, arguments: &Value) -> Result<Box<dyn AnyRequest>, ToolError> {
        entry(tool).parse(Arguments::Object(arguments.as_object().unwrap().clone()))
    }

    #[test]
    fn errors_name_the_field_that_can_not_be_read() {
        for (tool, arguments, named) in [
            ("bash", json!({}), "command"),
            ("bash", json!({"command": 5}), "'command'"),
            ("bash", json!({"command": "ls", "timeout": 5}), "timeout"),
            ("bash", json!({"command": "ls", "timeout_ms": "5"}), "'timeout_ms'"),
            ("bash", json!({"command": "ls", "environment": {"A": 1}}), "'environment.A'"),
            ("git", json!({"action": "rebase"}), "'action'"),
            ("git", json!({"action": "diff", "files": ["a", 1]}), "'files[1]'"),
        ] {
            let Err(error) = parse(tool, &arguments) else { panic!("{tool} takes {arguments}") };
            assert!(
                matches!(&error, ToolError::Unreadable(text) if text.contains(named)),
                "{arguments}: {error}"
            );
        }
    }

    #[test]
    fn each_tool_parses_its_own_requests() {
        for (tool, arguments) in [
            ("bash", json!({"command": "ls"})),
            ("read", json!({"path": "a"})),
            ("write", json!({"file_path": "a", "content": ""})),
            ("edit", json!({"file_path": "a", "old_string": "x", "new_string": "y"})),
            ("glob", json!({"pattern": "*"})),
            ("grep", json!({"pattern": "x"})),
            ("git", json!({"action": "status"})),
        ] {
            let request = parse(tool, &arguments).unwrap_or_else(|error| panic!("{tool}: {error}"));
            request.validate().unwrap();
            let text = serde_json::to_vec(&arguments).unwrap();
            assert!(entry(tool).parse(Arguments::Json(&text)).is_ok(), "{tool}");
        }
    }
}
