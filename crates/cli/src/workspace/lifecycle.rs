//! `workspace list`, `get`, `stop`, `resume` and `destroy`.

use std::time::Duration;

use anyhow::{Result, bail};
use chrono::Utc;
use clap::Args;
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{ContainerType, ProviderName, Workspace, WorkspaceList, WorkspaceStatus};

use super::view;
use crate::client::Call;
use crate::context::{Context, PAGE};
use crate::output;
use crate::progress;
use crate::sse::EventStream;
use crate::values::one_of;

/// How often a watched list is shown when nothing happens.
const SHOW_EVERY: Duration = Duration::from_secs(10);
/// Events this close to each other are one.
const TOGETHER: Duration = Duration::from_millis(200);
/// Clears a terminal.
const CLEAR: &[u8] = b"\x1b[H\x1b[2J";

/// A workspace.
#[derive(Args, Debug)]
pub(super) struct IdArgs {
    /// The workspace's id, or a unique piece of its beginning or end
    pub(super) id: String,
}

/// Show everything about a workspace
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  emergent workspace get 3fa2c9d1\n  emergent workspace get 3fa2c9d1 --json"
)]
pub(super) struct OneArgs {
    #[command(flatten)]
    which: IdArgs,
}

/// List workspaces, newest first
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace list
  emergent workspace list --status ready --provider gvisor
  emergent workspace list --watch
  emergent workspace list -q --all | xargs emergent workspace destroy")]
pub(super) struct ListArgs {
    /// Only those that stand so
    #[arg(long, value_parser = one_of::<WorkspaceStatus>(WorkspaceStatus::ALL.iter().map(|name| name.as_str())))]
    status: Option<WorkspaceStatus>,
    /// Only those of this provider
    #[arg(long, value_parser = one_of::<ProviderName>(ProviderName::ALL.iter().map(|name| name.as_str())))]
    provider: Option<ProviderName>,
    /// All of them, not only the newest
    #[arg(long)]
    all: bool,
    /// Print ids and nothing else
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Show the list again whenever something happens, until this is ended
    #[arg(long, short, conflicts_with = "quiet")]
    watch: bool,
}

/// Destroy workspaces: nothing of them is kept
///
/// A command that still runs in one gets SIGTERM and up to ten seconds.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace destroy 3fa2c9d1
  emergent workspace destroy --all --yes")]
pub(super) struct DestroyArgs {
    /// The workspaces' ids, or unique pieces of their beginnings or ends
    #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "ID")]
    ids: Vec<String>,
    /// Every agent workspace of the server (hosted MCP servers are left alone); needs --yes
    #[arg(long)]
    all: bool,
    /// Yes, all of them
    #[arg(long, short)]
    yes: bool,
}

fn page(args: &ListArgs) -> Call {
    // MCP servers have a list of their own.
    Call::get(&["agent", "workspaces"])
        .query("container_type", Some(ContainerType::AgentWorkspace))
        .query("status", args.status)
        .query("provider", args.provider)
        .query("limit", Some(PAGE))
}

pub(super) async fn list(context: &Context, args: &ListArgs) -> Result<u8> {
    if args.watch { watch(context, args).await } else { list_once(context, args).await }
}

/// Shows the list again after each event, and from time to time because ages change.
async fn watch(context: &Context, args: &ListArgs) -> Result<u8> {
    let mut events = EventStream::new(context.client.send(Call::get(&["events"]).events()).await?);
    loop {
        if output::stdout_is_terminal() {
            output::bytes(CLEAR)?;
        }
        list_once(context, args).await?;
        match tokio::time::timeout(SHOW_EVERY, events.next()).await {
            Ok(Ok(Some(_))) => {
                // What comes together is shown together.
                while let Ok(Ok(Some(_))) = tokio::time::timeout(TOGETHER, events.next()).await {}
            }
            Ok(Ok(None)) => bail!("the server has ended the stream"),
            Ok(Err(error)) => return Err(error),
            Err(_) => {}
        }
    }
}

async fn list_once(context: &Context, args: &ListArgs) -> Result<u8> {
    let list = if args.all {
        let workspaces = context.all_workspaces(|| page(args)).await?;
        let list = WorkspaceList { workspaces, unreadable: Vec::new(), next_cursor: None };
        if context.json {
            output::line(serde_json::to_string_pretty(&list)?)?;
            return Ok(0);
        }
        list
    } else {
        let answer = context.client.call(page(args)).await?;
        if context.json {
            context.show(&answer, |_: WorkspaceList| Ok(()))?;
            return Ok(0);
        }
        answer.parse()?
    };
    output::damaged(&list.unreadable);
    if args.quiet {
        list.workspaces.iter().try_for_each(|workspace| output::line(workspace.id))?;
    } else {
        view::list(&list.workspaces, Utc::now()).print()?;
        if list.workspaces.is_empty() {
            output::note("no workspaces; make one with: emergent workspace create");
        }
    }
    if list.next_cursor.is_some() {
        output::note(format_args!(
            "only the newest {} are shown; --all shows the rest",
            list.workspaces.len()
        ));
    }
    Ok(0)
}

pub(super) async fn get(context: &Context, args: &OneArgs) -> Result<u8> {
    let id = context.workspace_id(&args.which.id).await?;
    let answer = context.client.call(Call::get(&["agent", "workspaces", &id.to_string()])).await?;
    context.show(&answer, |workspace: Workspace| {
        view::warnings(&workspace);
        view::details(&workspace).print()
    })?;
    Ok(0)
}

/// Stops or resumes.
pub(super) async fn change(context: &Context, args: &IdArgs, action: &'static str) -> Result<u8> {
    let id = context.workspace_id(&args.id).await?;
    let call = Call::post(&["agent", "workspaces", &id.to_string(), action]);
    let what = if action == "stop" { "stopping the workspace" } else { "resuming the workspace" };
    let answer = progress::during(what, context.client.call(call)).await?;
    context.show(&answer, |workspace: Workspace| {
        view::warnings(&workspace);
        output::line(format_args!("{} {}", workspace.id, workspace.status))
    })?;
    Ok(0)
}

pub(super) async fn destroy(context: &Context, args: &DestroyArgs) -> Result<u8> {
    let ids = if args.all {
        let call = || {
            Call::get(&["agent", "workspaces"])
                .query("container_type", Some(ContainerType::AgentWorkspace))
                .query("limit", Some(PAGE))
        };
        let ids: Vec<WorkspaceId> =
            context.all_workspaces(call).await?.iter().map(|workspace| workspace.id).collect();
        if !args.yes && !ids.is_empty() {
            bail!(
                "this would destroy {} workspaces and all their files: add --yes if you mean it",
                ids.len()
            );
        }
        ids
    } else {
        // All are looked up before the first is destroyed, so that a typo destroys nothing.
        let mut ids = Vec::new();
        for given in &args.ids {
            ids.push(context.workspace_id(given).await?);
        }
        ids
    };
    let mut failures = 0_usize;
    let only_one = ids.len() == 1;
    for id in ids {
        let call = Call::delete(&["agent", "workspaces", &id.to_string()]);
        match progress::during("destroying the workspace", context.client.call(call)).await {
            Ok(answer) => {
                context.show(&answer, |_: serde_json::Value| output::line(format_args!("{id} destroyed")))?
            }
            Err(error) if only_one => return Err(error),
            Err(error) => {
                failures += 1;
                output::note(format_args!("error: {id}: {error:#}"));
            }
        }
    }
    Ok(u8::from(failures > 0))
}
