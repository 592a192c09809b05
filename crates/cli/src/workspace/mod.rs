//! `emergent workspace`: the lifecycle of workspaces, and their seven tools.

mod attach;
mod bash;
mod create;
mod exit_status;
mod files;
mod git;
mod git_text;
mod lifecycle;
mod operation;
mod search;
mod view;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::client::calls::StateChange;
use crate::connection::ConnectionArgs;
use crate::context::Context;
use crate::snapshot::{self, CopyArgs};

pub(crate) use create::show_new;

/// Create workspaces, work in them, destroy them
///
/// An ID can be shortened to a unique prefix or suffix of at least four characters. Prefer the suffix: workspaces that were
/// created about the same time have a common prefix.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  id=$(emergent workspace create -q)
  emergent workspace write $id hello.py --content 'print(\"hello\")'
  emergent workspace bash $id -- 'python3 hello.py'
  emergent workspace list
  emergent workspace destroy $id")]
pub(crate) struct WorkspaceArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: WorkspaceCommand,
}

#[derive(Subcommand, Debug)]
enum WorkspaceCommand {
    Create(Box<create::CreateArgs>),
    #[command(visible_alias = "ls")]
    List(lifecycle::ListArgs),
    Get(lifecycle::OneArgs),
    /// Stop a workspace: it keeps its files and uses no memory and no CPU
    #[command(after_help = "Examples:\n  emergent workspace stop 3fa2c9d1")]
    Stop(lifecycle::IdArgs),
    /// Start a stopped workspace again, with all its files
    #[command(after_help = "Examples:\n  emergent workspace resume 3fa2c9d1")]
    Resume(lifecycle::IdArgs),
    Attach(attach::AttachArgs),
    Detach(attach::DetachArgs),
    /// Copy a workspace with its files
    #[command(after_help = "\
Examples:
  emergent workspace fork 3fa2c9d1
  copy=$(emergent workspace fork 3fa2c9d1 -q)
  emergent workspace fork 3fa2c9d1 --with-memory       its processes continue in both")]
    Fork {
        #[command(flatten)]
        which: lifecycle::IdArgs,
        /// Copy the memory too (microVMs only): its processes continue in both
        #[arg(long, conflicts_with_all = ["cpu", "memory", "disk"])]
        with_memory: bool,
        #[command(flatten)]
        copy: CopyArgs,
    },
    #[command(visible_alias = "rm")]
    Destroy(lifecycle::DestroyArgs),
    Bash(bash::BashArgs),
    Read(files::ReadArgs),
    Write(files::WriteArgs),
    Edit(files::EditArgs),
    Glob(search::GlobArgs),
    Grep(search::GrepArgs),
    Git(git::GitArgs),
    Operation(operation::OperationArgs),
}

/// Runs one of the commands.
pub(crate) async fn run(args: WorkspaceArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    match args.command {
        WorkspaceCommand::Create(args) => create::run(&context, &args).await,
        WorkspaceCommand::List(args) => lifecycle::list(&context, &args).await,
        WorkspaceCommand::Get(args) => lifecycle::get(&context, &args).await,
        WorkspaceCommand::Stop(args) => lifecycle::change(&context, &args, StateChange::Stop).await,
        WorkspaceCommand::Resume(args) => lifecycle::change(&context, &args, StateChange::Resume).await,
        WorkspaceCommand::Attach(args) => attach::attach(&context, args).await,
        WorkspaceCommand::Detach(args) => attach::detach(&context, args).await,
        WorkspaceCommand::Fork { which, with_memory, copy } => {
            let id = context.workspace_id(&which.id).await?;
            snapshot::fork(&context, id, with_memory, &copy).await?;
            Ok(0)
        }
        WorkspaceCommand::Destroy(args) => lifecycle::destroy(&context, &args).await,
        WorkspaceCommand::Bash(args) => bash::run(&context, args).await,
        WorkspaceCommand::Read(args) => files::read(&context, args).await,
        WorkspaceCommand::Write(args) => files::write(&context, args).await,
        WorkspaceCommand::Edit(args) => files::edit(&context, args).await,
        WorkspaceCommand::Glob(args) => search::glob(&context, args).await,
        WorkspaceCommand::Grep(args) => search::grep(&context, args).await,
        WorkspaceCommand::Git(args) => git::run(&context, args).await,
        WorkspaceCommand::Operation(args) => operation::run(&context, &args).await,
    }
}
