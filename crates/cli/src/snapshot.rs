//! `emergent snapshot`: copies workspaces, and makes workspaces of the copies.

use anyhow::Result;
use chrono::Utc;
use clap::{Args, Subcommand};
use emergent_wire::SnapshotId;
use emergent_wire::snapshot::{CreateSnapshot, FromSnapshot, Snapshot, SnapshotList};
use emergent_wire::workspace::{NetworkMode, Workspace};

use crate::client::{Call, calls};
use crate::connection::ConnectionArgs;
use crate::context::{Context, PAGE};
use crate::output::{self, Table};
use crate::values::{self, LimitArgs, age, one_of};
use crate::{progress, short_id, workspace};

/// Copy workspaces, and make workspaces of the copies
///
/// A snapshot has the files under /workspace. A snapshot of a microVM has the whole disk, and with --with-memory the memory. It
/// outlives its workspace.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  snapshot=$(emergent snapshot create 3fa2c9d1 -q)
  emergent snapshot list
  emergent snapshot restore $snapshot
  emergent snapshot delete $snapshot")]
pub(crate) struct SnapshotArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Subcommand, Debug)]
enum SnapshotCommand {
    /// Copy a workspace; its processes are paused meanwhile
    #[command(after_help = "\
Examples:
  emergent snapshot create 3fa2c9d1
  emergent snapshot create 3fa2c9d1 --description 'before the upgrade'
  emergent snapshot create 3fa2c9d1 --with-memory      its processes continue in workspaces made of the snapshot")]
    Create {
        /// The workspace's id, or a unique prefix or suffix of it
        id: String,
        /// A description for lists
        #[arg(long, value_name = "TEXT")]
        description: Option<String>,
        /// Copy the memory too (microVMs only): the processes continue in workspaces made of the snapshot
        #[arg(long)]
        with_memory: bool,
        /// Print the id and nothing else
        #[arg(long, short, conflicts_with = "json")]
        quiet: bool,
    },
    /// List snapshots, newest first
    #[command(
        visible_alias = "ls",
        after_help = "Examples:\n  emergent snapshot list\n  emergent snapshot list --workspace 3fa2c9d1"
    )]
    List {
        /// Only snapshots of this workspace: its whole id. The workspace may be destroyed
        #[arg(long, value_name = "ID")]
        workspace: Option<emergent_wire::WorkspaceId>,
    },
    Restore(RestoreArgs),
    /// Delete snapshots; workspaces that were made of them keep their files
    #[command(visible_alias = "rm", after_help = "Examples:\n  emergent snapshot delete 5b1e77aa")]
    Delete {
        /// The snapshots' ids, or unique prefixes or suffixes of them
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
}

/// Create a workspace from a snapshot
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent snapshot restore 5b1e77aa
  emergent snapshot restore 5b1e77aa --disk 20G --env MODE=test")]
pub(crate) struct RestoreArgs {
    /// The snapshot's id, or a unique prefix or suffix of it
    id: String,
    #[command(flatten)]
    copy: CopyArgs,
}

/// The settings of a copy that may differ from the original. An omitted setting is copied. The disk can't be smaller.
#[derive(Args, Debug)]
pub(crate) struct CopyArgs {
    #[command(flatten)]
    limits: LimitArgs,
    /// Its network: access to the internet (nat), or none (isolated) [default: as in the original]
    #[arg(long, value_parser = one_of::<NetworkMode>(NetworkMode::ALL.iter().map(|name| name.as_str())))]
    network: Option<NetworkMode>,
    /// An environment variable of all commands. NAME alone passes on its value from here. Variables of the original are not
    /// copied
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// Its time to live after the last use: seconds, or 90m, 2h, 7d
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    ttl: Option<std::time::Duration>,
    /// Print the id and nothing else
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) quiet: bool,
}

impl CopyArgs {
    fn request(&self, snapshot_id: SnapshotId) -> Result<FromSnapshot> {
        Ok(FromSnapshot {
            snapshot_id,
            resource_limits: self.limits.requested(),
            environment: values::environment(None, &self.env)?,
            network: self.network,
            ttl_seconds: self.ttl.map(|ttl| ttl.as_secs()),
        })
    }
}

/// Runs one of the commands.
pub(crate) async fn run(args: SnapshotArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    match args.command {
        SnapshotCommand::Create { id, description, with_memory, quiet } => {
            let id = context.workspace_id(&id).await?;
            let call =
                calls::create_snapshot(id).body(&CreateSnapshot { description, memory: with_memory })?;
            let answer = progress::during("copying the workspace", context.client.call(call)).await?;
            context.show(&answer, |snapshot: Snapshot| {
                if quiet { output::line(snapshot.id) } else { table([&snapshot]).print() }
            })?;
        }
        SnapshotCommand::List { workspace } => {
            let call = list_call().query("workspace_id", workspace);
            let answer = context.client.call(call).await?;
            context.show(&answer, |list: SnapshotList| {
                table(&list.snapshots).print()?;
                output::report_damaged_rows(&list.unreadable);
                if list.snapshots.is_empty() {
                    output::note("no snapshots; create one with: emergent snapshot create WORKSPACE");
                }
                if list.next_cursor.is_some() {
                    output::note(format_args!("only the newest {} are shown", list.snapshots.len()));
                }
                Ok(())
            })?;
        }
        SnapshotCommand::Restore(args) => {
            let id = snapshot_id(&context, &args.id).await?;
            restore(&context, id, &args.copy).await?;
        }
        SnapshotCommand::Delete { ids } => {
            let mut found = Vec::new();
            for given in &ids {
                found.push(snapshot_id(&context, given).await?);
            }
            for id in found {
                let answer = context.client.call(calls::delete_snapshot(id)).await?;
                context.show(&answer, |_: serde_json::Value| output::line(format_args!("{id} deleted")))?;
            }
        }
    }
    Ok(0)
}

/// Creates a workspace from a snapshot and prints it.
async fn restore(context: &Context, id: SnapshotId, args: &CopyArgs) -> Result<()> {
    let call = calls::create_from_snapshot().body(&args.request(id)?)?;
    let answer = progress::during("creating a workspace", context.client.call(call)).await?;
    context.show(&answer, |made: Workspace| workspace::show_new(&made, args.quiet))
}

/// Copies a workspace through a snapshot, which is deleted afterwards.
pub(crate) async fn fork(
    context: &Context,
    id: emergent_wire::WorkspaceId,
    memory: bool,
    args: &CopyArgs,
) -> Result<()> {
    let request = CreateSnapshot { description: Some("made by `workspace fork`".to_owned()), memory };
    let call = calls::create_snapshot(id).body(&request)?;
    let copied = progress::during("copying the workspace", context.client.call(call)).await?;
    let snapshot: Snapshot = copied.parse()?;
    let restored = restore(context, snapshot.id, args).await;
    let deleted = context.client.call(calls::delete_snapshot(snapshot.id)).await;
    restored?;
    if let Err(error) = deleted {
        output::note(format_args!("warning: the snapshot {} could not be deleted: {error:#}", snapshot.id));
    }
    Ok(())
}

fn list_call() -> Call {
    calls::list_snapshots().query("limit", Some(PAGE))
}

/// The id of the snapshot with this id, or with this unique prefix or suffix of an id.
async fn snapshot_id(context: &Context, given: &str) -> Result<SnapshotId> {
    if let Ok(id) = given.parse() {
        return Ok(id);
    }
    short_id::check(given)?;
    let list: SnapshotList = context.client.call(list_call()).await?.parse()?;
    let candidates = list.snapshots.into_iter().map(|snapshot| {
        (snapshot.id, snapshot.description.unwrap_or_else(|| snapshot.workspace_id.to_string()))
    });
    short_id::resolve("snapshot", given, candidates.collect())
}

pub(crate) fn table<'a>(snapshots: impl IntoIterator<Item = &'a Snapshot>) -> Table {
    let now = Utc::now();
    let mut table =
        Table::with_head(["ID", "STATUS", "WORKSPACE", "PROVIDER", "DISK", "SIZE", "AGE", "DESCRIPTION"]);
    for snapshot in snapshots {
        table.row([
            snapshot.id.to_string(),
            snapshot.status.to_string(),
            snapshot.workspace_id.to_string(),
            snapshot.provider.to_string(),
            snapshot.resource_limits.disk.to_string(),
            snapshot.size_bytes.map_or_else(|| "-".to_owned(), values::size),
            age(snapshot.created_at, now),
            output::shorten(&snapshot.description.clone().unwrap_or_default(), 60),
        ]);
    }
    table
}
