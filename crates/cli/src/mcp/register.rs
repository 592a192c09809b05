//! `emergent mcp register`.

use anyhow::Result;
use clap::Args;
use emergent_wire::mcp::{McpMode, McpServer, McpVolume, RegisterMcpServer, RestartPolicy};
use emergent_wire::workspace::{NetworkMode, ProviderChoice};

use super::{report_if_not_ready, table};
use crate::client::calls;
use crate::context::Context;
use crate::values::{self, LimitArgs, one_of};
use crate::{output, progress};

/// Register an MCP server and start it
///
/// The words after `--` are arguments for the image's own program. With --command they are a program and its arguments.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent mcp register time --image emergent/mcp-time
  emergent mcp register files --image emergent/mcp-filesystem --volume data:/data -- /data
  emergent mcp register search --image my/search --env API_KEY --memory 1G
  emergent mcp register browser --image my/browser --mode per_session
  emergent mcp register web --image my/web --port 8080
  emergent mcp register mine --command -- python3 /workspace/server.py")]
pub(super) struct RegisterArgs {
    /// The name: lower-case letters, digits and . - _
    name: String,
    /// The image [default: the workspace image, which needs --command]
    #[arg(long)]
    image: Option<String>,
    /// Run the words after -- as the program, instead of passing them to the image's own program
    #[arg(long)]
    command: bool,
    /// The port of an MCP server that speaks HTTP instead of standard input and output
    #[arg(long)]
    port: Option<u16>,
    /// The path of its HTTP endpoint [default: /mcp]
    #[arg(long, requires = "port")]
    path: Option<String>,
    /// One process for all clients, or one for each session [default: shared]
    #[arg(long, value_parser = one_of::<McpMode>(McpMode::ALL.iter().map(|name| name.as_str())))]
    mode: Option<McpMode>,
    /// When to restart it after it ended [default: always]
    #[arg(long, value_parser = one_of::<RestartPolicy>(RestartPolicy::ALL.iter().map(|name| name.as_str())))]
    restart: Option<RestartPolicy>,
    /// An environment variable. NAME alone passes on its value from here, which hides it from the list of processes
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// A volume, mounted at /PATH. Restarts keep its files
    #[arg(long, value_name = "NAME:/PATH")]
    volume: Vec<McpVolume>,
    #[command(flatten)]
    limits: LimitArgs,
    /// Its network: access to the internet (nat), or none (isolated) [default: nat]
    #[arg(long, value_parser = one_of::<NetworkMode>(NetworkMode::ALL.iter().map(|name| name.as_str())))]
    network: Option<NetworkMode>,
    /// The time-out of a call: seconds, or 500ms, 2m [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    timeout: Option<std::time::Duration>,
    /// The provider of its sandbox [default: auto]
    #[arg(long, value_parser = one_of::<ProviderChoice>(ProviderChoice::ALL.iter().map(|name| name.as_str())))]
    provider: Option<ProviderChoice>,
    /// Print the id and nothing else
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Arguments for the MCP server, or with --command a program and its arguments
    #[arg(last = true, value_name = "ARGUMENT")]
    words: Vec<String>,
}

/// Registers a server and prints it.
pub(super) async fn run(context: &Context, args: &RegisterArgs) -> Result<u8> {
    let (command, arguments) =
        if args.command { (args.words.clone(), Vec::new()) } else { (Vec::new(), args.words.clone()) };
    let request = RegisterMcpServer {
        name: args.name.clone(),
        image: args.image.clone(),
        command,
        args: arguments,
        stdio_bridge: args.port.is_none(),
        port: args.port,
        path: args.path.clone(),
        mode: args.mode,
        restart_policy: args.restart,
        environment: values::environment(None, &args.env)?,
        volumes: args.volume.clone(),
        resource_limits: args.limits.requested(),
        network: args.network,
        timeout_ms: args.timeout.map(values::millis),
        provider: args.provider,
    };
    let call = calls::register_mcp_server().body(&request)?;
    let answer = progress::during("starting the MCP server", context.client.call(call)).await?;
    context.show(
        &answer,
        |server: McpServer| {
            if args.quiet { output::line(server.id) } else { table([&server]).print() }
        },
    )?;
    let server: McpServer = answer.parse()?;
    if !args.quiet && !context.json && report_if_not_ready(&server) == 0 {
        output::note(format_args!("connect a client with: emergent mcp config {}", server.name));
    }
    Ok(u8::from(server.status != emergent_wire::mcp::McpStatus::Ready))
}
