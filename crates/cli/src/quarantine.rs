//! `emergent quarantine`: lists, restores and purges disks without a database record.

use anyhow::Result;
use clap::{Args, Subcommand};
use emergent_wire::SnapshotId;
use emergent_wire::snapshot::{Snapshot, SnapshotList};

use crate::client::{Call, calls};
use crate::connection::ConnectionArgs;
use crate::context::{Context, PAGE};
use crate::{output, short_id, snapshot};

/// Restore disks that were found without a record in the database
///
/// A database that is new (`emergent serve --adopt`) or restored from an older backup has no records of some disks. The server
/// keeps such disks in quarantine for `workspaces.quarantine_days` before it removes them.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent quarantine list
  emergent quarantine restore 3fa2c9d1     then: emergent snapshot restore 3fa2c9d1
  emergent quarantine restore --all
  emergent quarantine purge 3fa2c9d1")]
pub(crate) struct QuarantineArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: QuarantineCommand,
}

#[derive(Subcommand, Debug)]
enum QuarantineCommand {
    /// List the disks in quarantine, newest first
    #[command(visible_alias = "ls", after_help = "Examples:\n  emergent quarantine list")]
    List,
    /// Turn disks in quarantine into ordinary snapshots
    #[command(
        after_help = "Examples:\n  emergent quarantine restore 3fa2c9d1\n  emergent quarantine restore --all"
    )]
    Restore(Chosen),
    /// Remove disks in quarantine for good
    #[command(
        after_help = "Examples:\n  emergent quarantine purge 3fa2c9d1\n  emergent quarantine purge --all"
    )]
    Purge(Chosen),
}

/// The selected disks.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Chosen {
    /// Ids, or unique prefixes or suffixes of them
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// All disks in quarantine
    #[arg(long)]
    all: bool,
}

/// Runs one of the commands.
pub(crate) async fn run(args: QuarantineArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    match args.command {
        QuarantineCommand::List => {
            let answer = context.client.call(list_call()).await?;
            context.show(&answer, |list: SnapshotList| {
                snapshot::table(&list.snapshots).print()?;
                output::report_damaged_rows(&list.unreadable);
                if list.snapshots.is_empty() {
                    output::note("the quarantine is empty");
                }
                if list.next_cursor.is_some() {
                    output::note(format_args!("only the newest {} are shown", list.snapshots.len()));
                }
                Ok(())
            })?;
        }
        QuarantineCommand::Restore(chosen) => {
            for id in chosen.ids(&context).await? {
                let answer = context.client.call(calls::restore_from_quarantine(id)).await?;
                context.show(&answer, |_: Snapshot| {
                    output::line(format_args!(
                        "{id} is a snapshot now; make a workspace of it with: emergent snapshot restore {id}"
                    ))
                })?;
            }
        }
        QuarantineCommand::Purge(chosen) => {
            for id in chosen.ids(&context).await? {
                let answer = context.client.call(calls::purge_from_quarantine(id)).await?;
                context.show(&answer, |_: serde_json::Value| output::line(format_args!("{id} removed")))?;
            }
        }
    }
    Ok(0)
}

fn list_call() -> Call {
    calls::list_quarantine().query("limit", Some(PAGE))
}

impl Chosen {
    async fn ids(&self, context: &Context) -> Result<Vec<SnapshotId>> {
        let list: SnapshotList = context.client.call(list_call()).await?.parse()?;
        if self.all {
            return Ok(list.snapshots.iter().map(|snapshot| snapshot.id).collect());
        }
        let find = |given: &String| {
            if let Ok(id) = given.parse() {
                return Ok(id);
            }
            short_id::check(given)?;
            let candidates = list.snapshots.iter().map(|each| (each.id, each.workspace_id.to_string()));
            short_id::resolve("snapshot in quarantine", given, candidates.collect())
        };
        self.ids.iter().map(find).collect()
    }
}
