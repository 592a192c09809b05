//! `emergent mcp config`: configurations for MCP clients.

use anyhow::Result;
use clap::{Args, ValueEnum};
use emergent_wire::mcp::McpServer;
use serde_json::{Value, json};

use crate::client::calls;
use crate::context::Context;
use crate::output;
use crate::values::shell_word;

/// Print the configuration for an MCP client
///
/// For a hosted MCP server, or with --workspace for the tools of a workspace. The token is the placeholder ${EMERGENT_TOKEN},
/// which most clients replace from their environment. --with-token prints the token itself.
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
    /// The tools of this workspace: its id, or a unique prefix or suffix of it
    #[arg(long, value_name = "ID", conflicts_with = "name")]
    workspace: Option<String>,
    /// The format
    #[arg(long, value_enum, default_value_t = ClientKind::Generic)]
    client: ClientKind,
    /// Print the token instead of a placeholder
    #[arg(long)]
    with_token: bool,
}

/// The formats of the clients' configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ClientKind {
    /// `mcpServers` with type, url and headers: Cursor, Claude Code's .mcp.json and many others
    Generic,
    /// A command line for Claude Code
    ClaudeCode,
    /// .vscode/mcp.json
    Vscode,
    /// For clients that only start programs: npx runs the bridge mcp-remote
    Stdio,
}

/// Prints the configuration.
pub(super) async fn run(context: &Context, args: &ConfigArgs) -> Result<u8> {
    let base = context.client.base_url().trim_end_matches('/').to_owned();
    let (name, url) = match (&args.workspace, &args.name) {
        (Some(given), _) => {
            let id = context.workspace_id(given).await?;
            ("workspace".to_owned(), format!("{base}{}", calls::workspace_mcp_path(id)))
        }
        (None, name) => {
            let name = name.as_deref().unwrap_or_default();
            let server: McpServer = context.client.call(calls::get_mcp_server(name)).await?.parse()?;
            (server.name, format!("{base}{}", server.endpoint))
        }
    };
    let token = if args.with_token { context.client.token() } else { "${EMERGENT_TOKEN}" };
    if args.client == ClientKind::ClaudeCode {
        let header = format!("Authorization: Bearer {token}");
        // In double quotes the shell replaces the placeholder.
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
            "hint: create a token for this endpoint only with: emergent token create NAME --workspace ID",
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
