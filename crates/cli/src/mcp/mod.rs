//! `emergent mcp`: commands for hosted MCP servers.

mod config;
mod register;

use anyhow::{Context as _, Result, bail};
use chrono::Utc;
use clap::{Args, Subcommand};
use emergent_wire::mcp::{McpLogLine, McpLogs, McpServer, McpServerList, McpStatus};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::calls;
use crate::connection::ConnectionArgs;
use crate::context::Context;
use crate::output::{self, Table, printable};
use crate::progress;
use crate::sse::EventStream;
use crate::values::{self, age, timestamp};

/// Host MCP servers: register, call, restart, read their logs
///
/// A registered MCP server runs in a sandbox of its own until it is removed. The server starts it when it starts itself, and
/// restarts it when it ends. Any MCP client can use it: `emergent mcp config` prints the client's configuration.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent mcp register time --image emergent/mcp-time
  emergent mcp list
  emergent mcp call time tools/list
  emergent mcp call time get_current_time --args '{\"timezone\": \"UTC\"}'
  emergent mcp logs time --follow
  emergent mcp config time
  emergent mcp remove time")]
pub(crate) struct McpArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: McpCommand,
}

#[derive(Subcommand, Debug)]
enum McpCommand {
    Register(register::RegisterArgs),
    /// List MCP servers, oldest first
    #[command(
        visible_alias = "ls",
        after_help = "Examples:\n  emergent mcp list\n  emergent mcp list --json"
    )]
    List,
    /// Show one MCP server
    #[command(after_help = "Examples:\n  emergent mcp get time")]
    Get {
        /// Its name or id
        name: String,
    },
    /// Call a method or a tool of an MCP server
    ///
    /// A name without a slash is the name of a tool: `call time get_current_time` calls `tools/call` with that tool.
    #[command(after_help = "\
Examples:
  emergent mcp call time tools/list
  emergent mcp call time get_current_time --args '{\"timezone\": \"UTC\"}'
  emergent mcp call files resources/read --params '{\"uri\": \"file:///data/x\"}'")]
    Call {
        /// Its name or id
        name: String,
        /// The method (`tools/list`), or the name of a tool
        method: String,
        /// The parameters of the method as JSON; - reads them from standard input
        #[arg(long, value_name = "JSON", conflicts_with = "args")]
        params: Option<String>,
        /// The arguments of the tool as JSON; - reads them from standard input
        #[arg(long, value_name = "JSON")]
        args: Option<String>,
        /// The time-out: seconds, or 500ms, 2m [default: the time-out of the MCP server]
        #[arg(long, value_name = "DURATION", value_parser = values::duration)]
        timeout: Option<std::time::Duration>,
    },
    /// Print the log of an MCP server: its standard error, starts and ends
    #[command(
        after_help = "Examples:\n  emergent mcp logs time\n  emergent mcp logs time --follow --tail 20"
    )]
    Logs {
        /// Its name or id
        name: String,
        /// The number of last lines
        #[arg(long, value_name = "COUNT", default_value_t = 200)]
        tail: usize,
        /// Keep running and print new lines
        #[arg(long, short)]
        follow: bool,
    },
    /// Restart an MCP server in a new container; its volumes are kept
    #[command(after_help = "Examples:\n  emergent mcp restart time")]
    Restart {
        /// Its name or id
        name: String,
    },
    /// Stop MCP servers and remove them with their volumes
    #[command(visible_alias = "rm", after_help = "Examples:\n  emergent mcp remove time")]
    Remove {
        /// Their names or ids
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    Config(config::ConfigArgs),
}

/// Runs one of the commands.
pub(crate) async fn run(args: McpArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    match args.command {
        McpCommand::Register(args) => return register::run(&context, &args).await,
        McpCommand::List => {
            let answer = context.client.call(calls::list_mcp_servers()).await?;
            context.show(&answer, |list: McpServerList| {
                output::report_damaged_rows(&list.unreadable);
                if list.servers.is_empty() {
                    output::note(
                        "no MCP servers; register one with: emergent mcp register NAME --image IMAGE",
                    );
                }
                table(&list.servers).print()
            })?;
        }
        McpCommand::Get { name } => {
            let answer = context.client.call(calls::get_mcp_server(&name)).await?;
            context.show(&answer, |server: McpServer| details(&server).print())?;
        }
        McpCommand::Call { name, method, params, args, timeout } => {
            return call(&context, &name, &method, params.as_deref(), args.as_deref(), timeout).await;
        }
        McpCommand::Logs { name, tail, follow } => return logs(&context, &name, tail, follow).await,
        McpCommand::Restart { name } => {
            let call = calls::restart_mcp_server(&name);
            let answer = progress::during("restarting the MCP server", context.client.call(call)).await?;
            context.show(&answer, |server: McpServer| table([&server]).print())?;
            let server: McpServer = answer.parse()?;
            return Ok(report_if_not_ready(&server));
        }
        McpCommand::Remove { names } => {
            for name in names {
                let call = calls::remove_mcp_server(&name);
                let answer = progress::during("removing the MCP server", context.client.call(call)).await?;
                context.show(&answer, |_: Value| output::line(format_args!("{name} removed")))?;
            }
        }
        McpCommand::Config(args) => return config::run(&context, &args).await,
    }
    Ok(0)
}

#[derive(Serialize)]
struct CallBody {
    method: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    params: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_ms: Option<u64>,
}

#[derive(Deserialize)]
struct CallAnswer {
    result: Option<Value>,
    error: Option<CallFailure>,
}

#[derive(Deserialize)]
struct CallFailure {
    code: i64,
    message: String,
}

async fn call(
    context: &Context,
    name: &str,
    method: &str,
    params: Option<&str>,
    arguments: Option<&str>,
    timeout: Option<std::time::Duration>,
) -> Result<u8> {
    let read = |text: &str, what: &str| -> Result<Value> {
        let text = if text == "-" { std::io::read_to_string(std::io::stdin())? } else { text.to_owned() };
        serde_json::from_str(&text).with_context(|| format!("{what} is not JSON"))
    };
    let params = params.map(|text| read(text, "--params")).transpose()?;
    let arguments = arguments.map(|text| read(text, "--args")).transpose()?;
    let (method, params) = if method.contains('/') || method == "ping" {
        if arguments.is_some() {
            bail!("--args is for tools: use --params for the method {method}");
        }
        (method.to_owned(), params)
    } else {
        if params.is_some() {
            bail!("--params is for methods: use --args for the tool {method}");
        }
        let arguments = arguments.unwrap_or_else(|| serde_json::json!({}));
        ("tools/call".to_owned(), Some(serde_json::json!({ "name": method, "arguments": arguments })))
    };
    let body = CallBody { method, params, timeout_ms: timeout.map(values::millis) };
    let request = calls::call_mcp_server(name).body(&body)?;
    let answer = context.client.call(request).await?;
    let mut code = 0;
    let parsed: CallAnswer = answer.parse()?;
    if parsed.error.is_some() || parsed.result.as_ref().is_some_and(is_tool_error) {
        code = 1;
    }
    context.show(&answer, |answer: CallAnswer| {
        if let Some(error) = answer.error {
            output::note(format_args!("error: {} ({})", printable(&error.message), error.code));
            return Ok(());
        }
        let result = answer.result.unwrap_or_default();
        match text_of(&result) {
            Some(text) => output::text(&printable(&text)),
            None => output::line(serde_json::to_string_pretty(&result)?),
        }
    })?;
    Ok(code)
}

fn is_tool_error(result: &Value) -> bool {
    result.get("isError").and_then(Value::as_bool) == Some(true)
}

/// The text of a tool's result. `None` if it has other content too.
fn text_of(result: &Value) -> Option<String> {
    let content = result.get("content")?.as_array()?;
    let texts: Option<Vec<&str>> = content.iter().map(|part| part.get("text")?.as_str()).collect();
    Some(texts?.join("\n"))
}

async fn logs(context: &Context, name: &str, tail: usize, follow: bool) -> Result<u8> {
    let call = calls::get_mcp_logs(name).query("tail", Some(tail));
    if !follow {
        let answer = context.client.call(call).await?;
        context.show(&answer, |logs: McpLogs| logs.lines.iter().try_for_each(log_line))?;
        return Ok(0);
    }
    let response = context.client.send(call.query("follow", Some(true)).events()).await?;
    let mut events = EventStream::new(response);
    while let Some(event) = events.next().await? {
        if context.json {
            output::line(&event.data)?;
        } else if let Ok(line) = serde_json::from_str(&event.data) {
            log_line(&line)?;
        }
    }
    output::note("the server ended the stream");
    Ok(1)
}

fn log_line(line: &McpLogLine) -> Result<()> {
    output::line(format_args!("{:<10}  {}", line.source, printable(&line.text)))
}

fn table<'a>(servers: impl IntoIterator<Item = &'a McpServer>) -> Table {
    let now = Utc::now();
    let mut table =
        Table::with_head(["NAME", "STATUS", "MODE", "IMAGE", "PROVIDER", "RESTARTS", "AGE", "ID"]);
    for server in servers {
        table.row([
            server.name.clone(),
            server.status.to_string(),
            mode_of(server),
            server.image.clone(),
            server.provider.map_or_else(|| "-".to_owned(), |provider| provider.to_string()),
            server.restarts.to_string(),
            age(server.created_at, now),
            server.id.to_string(),
        ]);
    }
    table
}

fn mode_of(server: &McpServer) -> String {
    match server.port {
        Some(port) if !server.stdio_bridge => format!("http:{port}"),
        _ => server.mode.to_string(),
    }
}

fn details(server: &McpServer) -> Table {
    let mut table = Table::default();
    table.field("name", Some(&server.name));
    table.field("id", Some(server.id));
    table.field("status", Some(server.status));
    table.field("error", server.error.as_ref());
    table.field("next restart", server.next_restart_at.map(timestamp));
    table.field("endpoint", Some(&server.endpoint));
    table.field("mode", Some(mode_of(server)));
    table.field("image", Some(&server.image));
    let words = |words: &[String]| (!words.is_empty()).then(|| words.join(" "));
    table.field("command", words(&server.command));
    table.field("arguments", words(&server.args));
    table.field("environment", words(&server.environment));
    let volumes: Vec<String> =
        server.volumes.iter().map(|volume| format!("{}:{}", volume.name, volume.path)).collect();
    table.field("volumes", words(&volumes));
    let limits = server.resource_limits;
    table
        .field("limits", Some(format!("{} CPU, {} memory, {} disk", limits.cpu, limits.memory, limits.disk)));
    table.field("network", Some(server.network));
    table.field("restart policy", Some(server.restart_policy));
    table.field("time-out", Some(format!("{} ms", server.timeout_ms)));
    table.field("provider", server.provider);
    table.field("placement", server.placement.as_ref().map(|placement| &placement.reason));
    table.field("started", server.started_at.map(timestamp));
    table.field("restarts", Some(server.restarts));
    if let Some(exit) = &server.last_exit {
        table.field("last exit", Some(format!("{} ({})", exit.reason, timestamp(exit.at))));
    }
    if let Some(usage) = &server.usage {
        table.field("memory", Some(values::size(usage.memory_bytes)));
        table.field("cpu", usage.cpu);
    }
    for warning in &server.warnings {
        table.field("warning", Some(warning));
    }
    table
}

/// Prints why a server is not ready, with the last lines of its standard error. Returns the exit code.
fn report_if_not_ready(server: &McpServer) -> u8 {
    if server.status == McpStatus::Ready {
        return 0;
    }
    output::note(format_args!("warning: '{}' is {}", server.name, server.status));
    if let Some(error) = &server.error {
        output::note(format_args!("  {}", printable(error)));
    }
    if let Some(exit) = &server.last_exit {
        output::note(format_args!("  {}; the end of its standard error:", exit.reason));
        for line in exit.stderr_tail.lines() {
            output::note(format_args!("    {}", printable(line)));
        }
    }
    output::note(format_args!("hint: read its log with: emergent mcp logs {}", server.name));
    1
}
