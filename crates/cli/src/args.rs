//! The commands of the first level. Each group declares its own arguments beside its code.

use clap::{Parser, Subcommand};
use clap_complete::Shell;

use crate::audit::AuditArgs;
use crate::doctor::DoctorArgs;
use crate::events::EventsArgs;
use crate::firecracker_install::FirecrackerArgs;
use crate::firecracker_manager::ManagerArgs;
use crate::mcp::McpArgs;
use crate::pool::PoolArgs;
use crate::quarantine::QuarantineArgs;
use crate::serve::ServeArgs;
use crate::snapshot::SnapshotArgs;
use crate::token::TokenArgs;
use crate::workspace::WorkspaceArgs;

const EXAMPLES: &str = "\
Examples:
  emergent doctor                              check this machine; each problem comes with its fix
  emergent serve                               start the server
  id=$(emergent workspace create -q)           create a workspace
  emergent workspace bash $id -- 'uname -a'    run a command in it
  emergent workspace destroy $id               remove it and all its files
  emergent mcp register NAME --image IMAGE     host an MCP server

The client reads the server's URL and token from the data directory. To use another server, set EMERGENT_URL \
and EMERGENT_TOKEN.

Exit codes: 0 success, 1 failure, 2 invalid command line. `workspace bash` exits with the command's exit code.";

/// Isolated machines for AI agents.
///
/// One self-hosted server creates workspaces, which are Firecracker microVMs or gVisor containers. Agents work in them with
/// seven tools: bash, read, write, edit, glob, grep and git. The server also hosts MCP servers, each in a sandbox of its own.
#[derive(Parser, Debug)]
#[command(name = "emergent", version, after_help = EXAMPLES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    Serve(ServeArgs),
    Doctor(DoctorArgs),
    #[command(visible_alias = "ws")]
    Workspace(WorkspaceArgs),
    Snapshot(SnapshotArgs),
    Quarantine(QuarantineArgs),
    Mcp(McpArgs),
    Pool(PoolArgs),
    Token(TokenArgs),
    Events(EventsArgs),
    Audit(AuditArgs),
    Firecracker(FirecrackerArgs),
    FirecrackerManager(ManagerArgs),
    /// Print the completion script of a shell
    #[command(after_help = "\
Examples:
  emergent completions bash > /etc/bash_completion.d/emergent
  emergent completions zsh > \"${fpath[1]}/_emergent\"
  emergent completions fish > ~/.config/fish/completions/emergent.fish")]
    Completions {
        /// The shell
        shell: Shell,
    },
}

impl Command {
    /// Whether the output is JSON.
    pub(crate) fn wants_json(&self) -> bool {
        match self {
            Self::Workspace(args) => args.connection.json,
            Self::Snapshot(args) => args.connection.json,
            Self::Quarantine(args) => args.connection.json,
            Self::Mcp(args) => args.connection.json,
            Self::Pool(args) => args.connection.json,
            Self::Token(args) => args.connection.json,
            Self::Events(args) => args.connection.json,
            Self::Audit(args) => args.connection.json,
            Self::Doctor(args) => args.json,
            Self::Firecracker(args) => args.json(),
            Self::Serve(_) | Self::FirecrackerManager(_) | Self::Completions { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn clap_accepts_the_command_definition() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples_and_help_for_each_argument() {
        fn walk(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            assert!(command.get_about().is_some(), "{path} has no description");
            let own_examples =
                command.get_after_help().is_some_and(|help| help.to_string().contains("Examples:"));
            // The actions of git share the examples of `git`.
            assert!(own_examples || path.contains(" git "), "{path} has no examples");
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{path}: {} has no help", argument.get_id());
            }
            for subcommand in command.get_subcommands() {
                walk(subcommand, &path);
            }
        }
        let mut command = Cli::command();
        command.build();
        walk(&command, "");
    }

    #[test]
    fn help_hides_the_values_of_environment_variables() {
        fn walk(command: &clap::Command) {
            for argument in command.get_arguments() {
                let id = argument.get_id();
                assert!(argument.get_env().is_none() || argument.is_hide_env_values_set(), "{id}");
            }
            command.get_subcommands().for_each(walk);
        }
        walk(&Cli::command());
    }

    /// clap merges two arguments of one name without an error: `token revoke NAME` once sent NAME as the access token.
    #[test]
    fn no_argument_has_the_name_of_a_global_flag() {
        fn walk(command: &clap::Command, globals: &[String]) {
            for argument in command.get_arguments() {
                let name = argument.get_id().as_str();
                let clashes = !argument.is_global_set() && globals.iter().any(|global| global == name);
                assert!(!clashes, "{} has an argument '{name}'", command.get_name());
            }
            let own = command.get_arguments().filter(|argument| argument.is_global_set());
            let own = own.map(|argument| argument.get_id().to_string());
            let globals: Vec<String> = globals.iter().cloned().chain(own).collect();
            command.get_subcommands().for_each(|subcommand| walk(subcommand, &globals));
        }
        walk(&Cli::command(), &[]);
    }

    #[test]
    fn global_flags_work_before_and_after_the_subcommand() {
        for line in
            ["emergent workspace --json list", "emergent workspace list --json", "emergent ws list --json"]
        {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            assert!(cli.command.wants_json(), "{line}");
        }
        for line in ["emergent serve --json", "emergent workspace create -q --json", "emergent token revoke"]
        {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
