//! `workspace list`, `get`, `stop`, `resume` and `destroy`.

use std::time::Duration;

use anyhow::{Result, bail};
use chrono::Utc;
use clap::Args;
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{ContainerType, ProviderName, Workspace, WorkspaceList, WorkspaceStatus};

use super::view;
use crate::client::Call;
use crate::client::calls::{self, StateChange};
use crate::context::{Context, PAGE};
use crate::output;
use crate::progress;
use crate::sse::EventStream;
use crate::values::one_of;

/// A watched list is printed again after this time without events.
const REFRESH: Duration = Duration::from_secs(10);
/// Events with a shorter interval cause one refresh.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// The escape sequences that clear a terminal.
const CLEAR: &[u8] = b"\x1b[H\x1b[2J";

/// One workspace.
#[derive(Args, Debug)]
pub(super) struct IdArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    pub(super) id: String,
}

/// Show all details of a workspace
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
    /// Only workspaces with this status
    #[arg(long, value_parser = one_of::<WorkspaceStatus>(WorkspaceStatus::ALL.iter().map(|name| name.as_str())))]
    status: Option<WorkspaceStatus>,
    /// Only workspaces of this provider
    #[arg(long, value_parser = one_of::<ProviderName>(ProviderName::ALL.iter().map(|name| name.as_str())))]
    provider: Option<ProviderName>,
    /// All workspaces, not only the newest 100
    #[arg(long)]
    all: bool,
    /// Print ids and nothing else
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Keep running, and print the list again after each event
    #[arg(long, short, conflicts_with = "quiet")]
    watch: bool,
}

/// Destroy workspaces and all their files
///
/// A running command gets SIGTERM, and SIGKILL after at most ten seconds.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace destroy 3fa2c9d1
  emergent workspace destroy --all --yes")]
pub(super) struct DestroyArgs {
    /// The workspaces' ids, or unique prefixes or suffixes of them
    #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "ID")]
    ids: Vec<String>,
    /// Every agent workspace of the server, but no hosted MCP server; needs --yes
    #[arg(long)]
    all: bool,
    /// Confirms --all
    #[arg(long, short)]
    yes: bool,
}

/// The call of one page of agent workspaces. Hosted MCP servers have another list.
fn page_of_workspaces() -> Call {
    calls::list_workspaces()
        .query("container_type", Some(ContainerType::AgentWorkspace))
        .query("limit", Some(PAGE))
}

fn page(args: &ListArgs) -> Call {
    page_of_workspaces().query("status", args.status).query("provider", args.provider)
}

pub(super) async fn list(context: &Context, args: &ListArgs) -> Result<u8> {
    if args.watch { watch(context, args).await } else { list_once(context, args).await }
}

/// Prints the list again after each event, and regularly because ages change.
async fn watch(context: &Context, args: &ListArgs) -> Result<u8> {
    let mut events = EventStream::new(context.client.send(calls::follow_events()).await?);
    loop {
        if output::stdout_is_terminal() {
            output::bytes(CLEAR)?;
        }
        list_once(context, args).await?;
        match tokio::time::timeout(REFRESH, events.next()).await {
            Ok(Ok(Some(_))) => {
                while let Ok(Ok(Some(_))) = tokio::time::timeout(DEBOUNCE, events.next()).await {}
            }
            Ok(Ok(None)) => bail!("the server ended the stream"),
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
    output::report_damaged_rows(&list.unreadable);
    if args.quiet {
        list.workspaces.iter().try_for_each(|workspace| output::line(workspace.id))?;
    } else {
        view::list(&list.workspaces, Utc::now()).print()?;
        if list.workspaces.is_empty() {
            output::note("no workspaces; create one with: emergent workspace create");
        }
    }
    if list.next_cursor.is_some() {
        output::note(format_args!(
            "only the newest {} are shown; --all shows the others",
            list.workspaces.len()
        ));
    }
    Ok(0)
}

pub(super) async fn get(context: &Context, args: &OneArgs) -> Result<u8> {
    let id = context.workspace_id(&args.which.id).await?;
    let answer = context.client.call(calls::get_workspace(id)).await?;
    context.show(&answer, |workspace: Workspace| {
        view::warnings(&workspace);
        view::details(&workspace).print()
    })?;
    Ok(0)
}

/// Stops or resumes a workspace.
pub(super) async fn change(context: &Context, args: &IdArgs, change: StateChange) -> Result<u8> {
    let id = context.workspace_id(&args.id).await?;
    let what = match change {
        StateChange::Stop => "stopping the workspace",
        StateChange::Resume => "resuming the workspace",
    };
    let call = context.client.call(calls::change_workspace(id, change));
    let answer = progress::during(what, call).await?;
    context.show(&answer, |workspace: Workspace| {
        view::warnings(&workspace);
        output::line(format_args!("{} {}", workspace.id, workspace.status))
    })?;
    Ok(0)
}

pub(super) async fn destroy(context: &Context, args: &DestroyArgs) -> Result<u8> {
    let ids = if args.all {
        let workspaces = context.all_workspaces(page_of_workspaces).await?;
        let ids: Vec<WorkspaceId> = workspaces.iter().map(|workspace| workspace.id).collect();
        if !args.yes && !ids.is_empty() {
            bail!("this would destroy {} workspaces and all their files: add --yes to confirm", ids.len());
        }
        ids
    } else {
        // All ids are resolved before the first workspace is destroyed, so that a typo destroys none.
        let mut ids = Vec::new();
        for given in &args.ids {
            ids.push(context.workspace_id(given).await?);
        }
        ids
    };
    let mut failures = 0_usize;
    let only_one = ids.len() == 1;
    for id in ids {
        let call = context.client.call(calls::destroy_workspace(id));
        match progress::during("destroying the workspace", call).await {
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
