//! The tools as a client sees them: name, title, description, schemas and hints. Made once.

use std::sync::{Arc, LazyLock};

use emergent_wire::git::{GitAnswer, GitRequest};
use emergent_wire::tools::{
    BashAnswer, BashRequest, EditAnswer, EditRequest, GlobAnswer, GlobRequest, GrepAnswer, GrepRequest,
    OperationAnswer, ReadAnswer, ReadRequest, Tool, WriteAnswer, WriteRequest,
};
use rmcp::model::{JsonObject, Tool as McpTool, ToolAnnotations};

use crate::descriptions::{description, title};
use crate::schema::{input, of, output};

static CATALOG: LazyLock<Vec<(Tool, McpTool)>> =
    LazyLock::new(|| Tool::ALL.into_iter().map(|tool| (tool, describe(tool))).collect());

/// The tools of a list, each once and always in the same order.
pub(crate) fn tools(allowed: &[Tool]) -> Vec<McpTool> {
    CATALOG
        .iter()
        .filter(|(tool, _)| allowed.contains(tool))
        .map(|(_, described)| described.clone())
        .collect()
}

/// The tool of a name.
pub(crate) fn find(name: &str) -> Option<(Tool, &'static McpTool)> {
    CATALOG.iter().find(|(tool, _)| tool.as_str() == name).map(|(tool, described)| (*tool, described))
}

fn describe(tool: Tool) -> McpTool {
    let (takes, gives) = schemas(tool);
    McpTool::new(tool.as_str(), description(tool), Arc::new(takes))
        .with_title(title(tool))
        .with_raw_output_schema(Arc::new(gives))
        .with_annotations(annotations(tool))
}

/// What a tool takes and what it gives.
fn schemas(tool: Tool) -> (JsonObject, JsonObject) {
    match tool {
        Tool::Bash => {
            (input::<BashRequest>(), output([of::<BashAnswer>(), of::<OperationAnswer>()].as_slice()))
        }
        Tool::Read => (input::<ReadRequest>(), output(&[of::<ReadAnswer>()])),
        Tool::Write => (input::<WriteRequest>(), output(&[of::<WriteAnswer>()])),
        Tool::Edit => (input::<EditRequest>(), output(&[of::<EditAnswer>()])),
        Tool::Glob => (input::<GlobRequest>(), output(&[of::<GlobAnswer>()])),
        Tool::Grep => (input::<GrepRequest>(), output(&[of::<GrepAnswer>()])),
        Tool::Git => (input::<GitRequest>(), output(&[of::<GitAnswer>()])),
    }
}

/// Hints for clients that ask before they call. A command or a remote repository reaches the world outside.
fn annotations(tool: Tool) -> ToolAnnotations {
    let hints = ToolAnnotations::with_title(title(tool));
    match tool {
        Tool::Read | Tool::Glob | Tool::Grep => {
            hints.read_only(true).destructive(false).idempotent(true).open_world(false)
        }
        Tool::Write => hints.read_only(false).destructive(true).idempotent(true).open_world(false),
        Tool::Edit => hints.read_only(false).destructive(true).idempotent(false).open_world(false),
        Tool::Bash | Tool::Git => hints.read_only(false).destructive(true).idempotent(false).open_world(true),
    }
}
