//! The seam: what this crate asks of the code that runs the tools.

use std::sync::Arc;

use async_trait::async_trait;
use emergent_wire::ErrorDetail;
use rmcp::model::{JsonObject, Tool as McpTool, ToolAnnotations};
use serde::Serialize;
use serde_json::Value;

use crate::OutputSink;

/// The tools of one workspace.
#[async_trait]
pub trait Tools: Send + Sync + 'static {
    /// All tools, in the order in which they are listed.
    fn all(&self) -> &[ToolDescription];

    /// Whether a request with these extensions may use a tool. Other tools are neither listed nor run.
    fn is_allowed(&self, name: &str, http: &http::Extensions) -> bool;

    /// Runs a tool. Dropping the future cancels the call.
    async fn call(&self, call: Call) -> Result<ToolResult, ErrorDetail>;
}

/// One call of a tool.
#[derive(Debug)]
pub struct Call {
    /// The tool's name.
    pub name: String,
    /// The arguments as the client sent them.
    pub arguments: JsonObject,
    /// Takes output while the tool runs, when the client wants to see it. The answer holds the output, too.
    pub output: Option<OutputSink>,
    /// The extensions of the HTTP request that brought the call, such as the caller. Calls of one session may come from different
    /// callers.
    pub http: http::Extensions,
}

/// A tool as clients see it.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct ToolDescription(McpTool);

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
        (input, output): (JsonObject, JsonObject),
        hints: Hints,
    ) -> Self {
        let annotations = ToolAnnotations::with_title(title)
            .read_only(hints.read_only)
            .destructive(!hints.read_only)
            .idempotent(hints.idempotent)
            .open_world(hints.open_world);
        let tool = McpTool::new(name, description, Arc::new(input))
            .with_title(title)
            .with_raw_output_schema(Arc::new(output))
            .with_annotations(annotations);
        Self(tool)
    }

    /// The tool's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn to_mcp(&self) -> McpTool {
        self.0.clone()
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
