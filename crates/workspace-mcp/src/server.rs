//! The MCP server of one workspace, as the library calls it.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use emergent_wire::{ErrorCode, ErrorDetail};
use futures_util::FutureExt as _;
use http::request::Parts;
use rmcp::model::{
    CallToolRequestMethod, CallToolRequestParams, CallToolResponse, CompleteRequestMethod,
    CompleteRequestParams, CompleteResult, ConstString as _, CustomRequest, CustomResult,
    ErrorCode as RpcCode, Implementation, ListPromptsRequestMethod, ListPromptsResult,
    ListResourceTemplatesRequestMethod, ListResourceTemplatesResult, ListResourcesRequestMethod,
    ListResourcesResult, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig,
    Tool as McpTool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::OutputSink;
use crate::result::result;
use crate::sessions::Sessions;
use crate::tools::{Call, ToolDescription, ToolResult, Tools};

/// The server's name.
const NAME: &str = "emergent-workspace";
/// Instructions for a model: the workspace as a whole.
const INSTRUCTIONS: &str = "\
These tools work in one workspace: an isolated Linux machine with a disk of its own. Files live under /workspace, where \
relative paths start and where they stay from call to call; commands can change everything there and nothing outside. \
Use read, write, edit, glob and grep for files, git for repositories, and bash for all else: building, testing, \
installing, running programs. Output and answers are bounded; whatever was cut says so and says how to get the rest.";
/// The header with a session's id.
pub(crate) const SESSION_HEADER: &str = "mcp-session-id";

/// One workspace's server. The library makes a clone for each session and for each request without one.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) tools: Arc<dyn Tools>,
    pub(crate) sessions: Arc<Sessions>,
    /// A place for each call that may run.
    pub(crate) calls: Arc<Semaphore>,
    /// Is cancelled when there is no server for this workspace any more.
    pub(crate) ended: CancellationToken,
}

impl Server {
    /// A tool that a request may use.
    fn find(&self, name: &str, http: &http::Extensions) -> Option<&ToolDescription> {
        self.tools.all().iter().find(|tool| tool.name() == name && self.tools.is_allowed(name, http))
    }

    /// Runs a tool, with its output as progress if the client wants that.
    async fn run(&self, call: Call, context: &RequestContext<RoleServer>) -> Result<ToolResult, ErrorDetail> {
        let Ok(_permit) = self.calls.try_acquire() else {
            let message = "too many calls run in this workspace: retry when one has ended";
            return Err(ErrorDetail::new(ErrorCode::LimitReached, message));
        };
        let Some(token) = context.meta.get_progress_token() else {
            return self.call(call).await;
        };
        let output = OutputSink::default();
        let call = async {
            let answer = self.call(Call { output: Some(output.clone()), ..call }).await;
            output.close();
            answer
        };
        tokio::join!(call, output.send_to(&context.peer, &token)).0
    }

    /// Calls the tool. A panic must not leave the client waiting for ever.
    async fn call(&self, call: Call) -> Result<ToolResult, ErrorDetail> {
        let name = call.name.clone();
        AssertUnwindSafe(self.tools.call(call)).catch_unwind().await.unwrap_or_else(|_| {
            tracing::error!(tool = name, "a tool panicked");
            Err(ErrorDetail::new(
                ErrorCode::Internal,
                "the server failed: it is a fault of the server itself",
            ))
        })
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut server = Implementation::new(NAME, env!("CARGO_PKG_VERSION"));
        server.title = Some("Emergent workspace".to_owned());
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(server)
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let none = http::Extensions::new();
        let http = context.extensions.get::<Parts>().map_or(&none, |parts| &parts.extensions);
        let allowed = self.tools.all().iter().filter(|tool| self.tools.is_allowed(tool.name(), http));
        Ok(ListToolsResult::with_all_items(allowed.map(ToolDescription::to_mcp).collect()))
    }

    /// The library asks for a tool's schema, not for permission: that is checked by each call.
    fn get_tool(&self, name: &str) -> Option<McpTool> {
        self.tools.all().iter().find(|tool| tool.name() == name).map(ToolDescription::to_mcp)
    }

    async fn call_tool(
        &self,
        params: CallToolRequestParams,
        mut context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let parts = context.extensions.remove::<Parts>();
        let session = parts.as_ref().and_then(|parts| {
            let id = parts.headers.get(SESSION_HEADER)?.to_str().ok()?;
            self.sessions.get(id)
        });
        let http = parts.map(|parts| parts.extensions).unwrap_or_default();
        if self.find(&params.name, &http).is_none() {
            let name: String = params.name.chars().take(64).collect();
            return Err(ErrorData::invalid_params(format!("there is no tool '{name}' here"), None));
        }
        let _in_use = session.as_ref().map(|session| session.calls());
        let ended = session.map_or_else(|| self.ended.clone(), |session| session.ended());
        let (name, arguments) = (params.name.into_owned(), params.arguments.unwrap_or_default());
        let call = Call { name, arguments, output: None, http };
        // Whichever ends the wait drops the call, and so cancels it.
        tokio::select! {
            answer = self.run(call, &context) => Ok(result(answer).into()),
            () = context.ct.cancelled() => Err(cancelled()),
            () = ended.cancelled() => Err(cancelled()),
        }
    }

    // What is not offered does not exist. The library would answer with nothing instead.

    async fn complete(
        &self,
        _request: CompleteRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        Err(ErrorData::method_not_found::<CompleteRequestMethod>())
    }

    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListPromptsRequestMethod>())
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListResourcesRequestMethod>())
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListResourceTemplatesRequestMethod>())
    }

    /// Requests that the library could not read come here too.
    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        if request.method == CallToolRequestMethod::VALUE {
            let message = "tools/call needs `name`, a text, and takes `arguments`, an object";
            return Err(ErrorData::invalid_params(message, None));
        }
        Err(ErrorData::new(RpcCode::METHOD_NOT_FOUND, request.method, None))
    }
}

/// Nobody reads it.
fn cancelled() -> ErrorData {
    ErrorData::internal_error("the call was cancelled", None)
}
