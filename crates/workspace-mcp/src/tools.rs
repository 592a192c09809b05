//! The seam to the code that runs the tools.

use async_trait::async_trait;
use emergent_wire::ErrorDetail;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::OutputSink;

/// The tools of one workspace, for callers of type `C`.
#[async_trait]
pub trait Tools<C>: Send + Sync + 'static {
    /// All tools, in the order in which they are listed.
    fn all(&self) -> &[ToolDescription];

    /// Whether a caller may use a tool. Other tools are neither listed nor run.
    fn is_allowed(&self, name: &str, caller: &C) -> bool;

    /// Runs a tool. Dropping the future cancels the call.
    async fn call(&self, call: Call<C>) -> Result<ToolResult, ErrorDetail>;
}

/// One call of a tool.
#[derive(Debug)]
pub struct Call<C> {
    /// The tool's name.
    pub name: String,
    /// The arguments as the client sent them.
    pub arguments: Map<String, Value>,
    /// Takes output while the tool runs, when the client wants to see it. The answer holds the output, too.
    pub output: Option<OutputSink>,
    /// The caller. It comes from access control, never from the message.
    pub caller: C,
}

/// A tool as clients see it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolDescription {
    name: &'static str,
    title: &'static str,
    description: &'static str,
    input_schema: Map<String, Value>,
    output_schema: Map<String, Value>,
    annotations: Annotations,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[allow(clippy::struct_excessive_bools, reason = "the protocol's form")]
struct Annotations {
    title: &'static str,
    read_only_hint: bool,
    destructive_hint: bool,
    idempotent_hint: bool,
    open_world_hint: bool,
}

/// Hints for clients that ask a person before they call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hints {
    /// The tool changes nothing.
    pub read_only: bool,
    /// The same call again changes nothing more.
    pub idempotent: bool,
    /// The tool may reach the network.
    pub open_world: bool,
}

impl ToolDescription {
    /// A tool with its JSON Schemas.
    pub fn new(
        name: &'static str,
        title: &'static str,
        description: &'static str,
        (input_schema, output_schema): (Map<String, Value>, Map<String, Value>),
        hints: Hints,
    ) -> Self {
        let annotations = Annotations {
            title,
            read_only_hint: hints.read_only,
            destructive_hint: !hints.read_only,
            idempotent_hint: hints.idempotent,
            open_world_hint: hints.open_world,
        };
        Self { name, title, description, input_schema, output_schema, annotations }
    }

    /// The tool's name.
    pub fn name(&self) -> &str {
        self.name
    }
}

/// The answer of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolResult {
    /// For programs: the body of the REST API's answer.
    pub data: Value,
    /// For the model.
    pub content: ToolContent,
}

/// An answer as a model sees it.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum ToolContent {
    Text(String),
    Image {
        /// Base64.
        data: String,
        media_type: String,
    },
}
