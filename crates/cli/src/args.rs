//! The command line's first level. Each group of commands declares its own arguments beside its code.

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
  emergent doctor                              what works here, and how to fix the rest
  emergent serve                               start the server
  id=$(emergent workspace create -q)           make a workspace
  emergent workspace bash $id -- 'uname -a'    run a command in it
  emergent workspace destroy $id               remove it and everything in it
  emergent mcp register NAME --image IMAGE     host an MCP server

The client finds the server and its token in the data directory. For a server elsewhere set EMERGENT_URL \
and EMERGENT_TOKEN.

Exit codes: 0 done, 1 failed, 2 the command line is wrong; `workspace bash` passes on the command's own.";

/// Isolated machines for AI agents.
///
/// One self-hosted server creates workspaces (Firecracker microVMs or gVisor containers) in which agents work with seven structured
/// tools: bash, read, write, edit, glob, grep and git; and hosts MCP servers, each in a sandbox of its own.
#[derive(Parser, Debug)]
#[command(name = "emergent", version, after_help = EXAMPLES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What there is to do.
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
    /// Print completions for a shell
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
    /// Whether the answer is for a program.
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
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Every command that does something shows how to use it.
    #[test]
    fn every_command_has_an_example_and_says_what_it_does() {
        fn walk(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            assert!(command.get_about().is_some(), "{path} says nothing of itself");
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
    fn tokens_in_the_environment_are_never_shown_in_help() {
        fn walk(command: &clap::Command) {
            for argument in command.get_arguments() {
                let id = argument.get_id();
                assert!(argument.get_env().is_none() || argument.is_hide_env_values_set(), "{id}");
            }
            command.get_subcommands().for_each(walk);
        }
        walk(&Cli::command());
    }

    /// clap would take one for the other without a word: `token revoke NAME` sent NAME as the access token.
    #[test]
    fn no_argument_has_the_name_of_a_flag_of_its_group() {
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
    fn flags_work_before_and_after_the_subcommand() {
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
