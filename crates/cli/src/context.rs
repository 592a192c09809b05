//! What a client command has at hand: the server, and how to show answers.

use anyhow::Result;
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{Workspace, WorkspaceList};
use serde::de::DeserializeOwned;

use crate::client::{Answer, ApiError, Call, Client};
use crate::connection::ConnectionArgs;
use crate::{json, output, pick};

/// The most pages that are read of one list: a server that repeats its cursor must not keep us busy for ever.
const MAX_PAGES: usize = 10_000;
/// The largest page a server gives.
pub(crate) const PAGE: u32 = 100;

/// The server, and how to show its answers.
pub(crate) struct Context {
    /// The server.
    pub(crate) client: Client,
    /// Whether answers are shown as JSON.
    pub(crate) json: bool,
}

impl Context {
    /// Finds the server.
    pub(crate) fn open(connection: &ConnectionArgs) -> Result<Self> {
        let client = Client::open(&connection.target()?)?;
        Ok(Self { client, json: connection.json })
    }

    /// Shows an answer: as it came, or for people.
    pub(crate) fn show<T: DeserializeOwned>(
        &self,
        answer: &Answer,
        human: impl FnOnce(T) -> Result<()>,
    ) -> Result<()> {
        if self.json {
            return output::line(json::pretty(&answer.text));
        }
        human(answer.parse()?)
    }

    /// Every page of a list of workspaces. `page` makes the call for one, without its cursor.
    pub(crate) async fn all_workspaces(&self, page: impl Fn() -> Call) -> Result<Vec<Workspace>> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        for _ in 0..MAX_PAGES {
            let call = page().query("cursor", cursor.as_deref());
            let list: WorkspaceList = self.client.call(call).await?.parse()?;
            output::damaged(&list.unreadable);
            all.extend(list.workspaces);
            cursor = list.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        Ok(all)
    }

    /// The id that a user means: a whole id, or a piece of one that only one workspace has.
    pub(crate) async fn workspace_id(&self, given: &str) -> Result<WorkspaceId> {
        if let Ok(id) = given.parse() {
            return Ok(id);
        }
        pick::check(given)?;
        let listed =
            self.all_workspaces(|| Call::get(&["agent", "workspaces"]).query("limit", Some(PAGE))).await;
        let workspaces = listed.map_err(|error| match error.downcast_ref::<ApiError>() {
            Some(refused) if refused.status == reqwest::StatusCode::FORBIDDEN => {
                error.context("short ids need a token that may list workspaces; give the whole id")
            }
            _ => error,
        })?;
        let candidates = workspaces.into_iter().map(|workspace| {
            let about = format!("{}, {}", workspace.status, workspace.created_at.format("%Y-%m-%d %H:%M:%S"));
            (workspace.id, about)
        });
        pick::by_id("workspace", given, candidates.collect())
    }
}
