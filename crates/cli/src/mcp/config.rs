//! `emergent mcp config`.

use anyhow::Result;
use clap::{Args, ValueEnum};
use emergent_wire::mcp::McpServer;
use serde_json::{Value, json};

use crate::client::Call;
use crate::context::Context;
use crate::output;
use crate::values::shell_word;

/// Print what to put into an MCP client's configuration
///
/// For a hosted server, or with --workspace for the tools of a workspace. The token stands as ${EMERGENT_TOKEN}, which
/// most clients fill in from their environment; --with-token writes it out.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent mcp config time
  emergent mcp config time --client claude-code
  emergent mcp config --workspace 3fa2c9d1 --client vscode
  emergent mcp config time --with-token > .cursor/mcp.json")]
pub(super) struct ConfigArgs {
    /// The server's name or id
    #[arg(required_unless_present = "workspace")]
    name: Option<String>,
    /// A workspace's id, or a unique piece of it: its seven tools
    #[arg(long, value_name = "ID", conflicts_with = "name")]
    workspace: Option<String>,
    /// For which client
    #[arg(long, value_enum, default_value_t = ClientKind::Generic)]
    client: ClientKind,
    /// Write the token out instead of a placeholder
    #[arg(long)]
    with_token: bool,
}

/// Clients that want it each in their own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ClientKind {
    /// `mcpServers` with type, url and headers: Cursor, Claude Code's .mcp.json, many others
    Generic,
    /// A command line for Claude Code
    ClaudeCode,
    /// .vscode/mcp.json
    Vscode,
    /// For clients that only start programs: a bridge by npx
    Stdio,
}

/// Prints the snippet.
pub(super) async fn run(context: &Context, args: &ConfigArgs) -> Result<u8> {
    let base = context.client.base_url().trim_end_matches('/').to_owned();
    let (name, url) = match (&args.workspace, &args.name) {
        (Some(given), _) => {
            let id = context.workspace_id(given).await?;
            ("workspace".to_owned(), format!("{base}/api/v1/agent/workspaces/{id}/mcp"))
        }
        (None, name) => {
            let name = name.as_deref().unwrap_or_default();
            let server: McpServer =
                context.client.call(Call::get(&["mcp", "servers", name])).await?.parse()?;
            (server.name, format!("{base}{}", server.endpoint))
        }
    };
    let token = if args.with_token { context.client.token() } else { "${EMERGENT_TOKEN}" };
    if args.client == ClientKind::ClaudeCode {
        let header = format!("Authorization: Bearer {token}");
        // With the placeholder the shell is to fill it in.
        let header = if args.with_token { shell_word(&header) } else { format!("\"{header}\"") };
        output::line(format_args!(
            "claude mcp add --transport http {} {} --header {header}",
            shell_word(&name),
            shell_word(&url)
        ))?;
    } else {
        output::line(serde_json::to_string_pretty(&snippet(args.client, &name, &url, token))?)?;
    }
    if !args.with_token {
        output::note(
            "hint: make a token that reaches nothing else with: emergent token create NAME --workspace ID",
        );
    }
    Ok(0)
}

fn snippet(client: ClientKind, name: &str, url: &str, token: &str) -> Value {
    let headers = json!({ "Authorization": format!("Bearer {token}") });
    match client {
        ClientKind::Vscode => {
            let token = if token.starts_with("${") { "${env:EMERGENT_TOKEN}" } else { token };
            let headers = json!({ "Authorization": format!("Bearer {token}") });
            json!({ "servers": { name: { "type": "http", "url": url, "headers": headers } } })
        }
        ClientKind::Stdio => json!({ "mcpServers": { name: {
            "command": "npx",
            "args": ["-y", "mcp-remote", url, "--header", "Authorization:${AUTHORIZATION}"],
            "env": { "AUTHORIZATION": format!("Bearer {token}") },
        } } }),
        ClientKind::Generic | ClientKind::ClaudeCode => {
            json!({ "mcpServers": { name: { "type": "http", "url": url, "headers": headers } } })
        }
    }
}
