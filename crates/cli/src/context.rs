//! The context of a client command: the client, and the output format.

use anyhow::Result;
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{Workspace, WorkspaceList};
use serde::de::DeserializeOwned;

use crate::client::{Answer, ApiError, Call, Client, calls};
use crate::connection::ConnectionArgs;
use crate::{json, output, short_id};

/// The limit of pages that are read of one list. A server that repeats its cursor can't cause an endless loop.
const MAX_PAGES: usize = 10_000;
/// The server's largest page.
pub(crate) const PAGE: u32 = 100;

/// The client, and the output format.
pub(crate) struct Context {
    /// The client of the server.
    pub(crate) client: Client,
    /// Whether answers are printed as JSON.
    pub(crate) json: bool,
}

impl Context {
    /// Finds the server and makes a client of it.
    pub(crate) fn open(connection: &ConnectionArgs) -> Result<Self> {
        let client = Client::open(&connection.target()?)?;
        Ok(Self { client, json: connection.json })
    }

    /// Prints an answer: its JSON, or a text for a person.
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

    /// Reads every page of a list of workspaces. `page` makes the call of a page, without the cursor.
    pub(crate) async fn all_workspaces(&self, page: impl Fn() -> Call) -> Result<Vec<Workspace>> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        for _ in 0..MAX_PAGES {
            let call = page().query("cursor", cursor.as_deref());
            let list: WorkspaceList = self.client.call(call).await?.parse()?;
            output::report_damaged_rows(&list.unreadable);
            all.extend(list.workspaces);
            cursor = list.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        Ok(all)
    }

    /// The id of the workspace with this id, or with this unique prefix or suffix of an id.
    pub(crate) async fn workspace_id(&self, given: &str) -> Result<WorkspaceId> {
        if let Ok(id) = given.parse() {
            return Ok(id);
        }
        short_id::check(given)?;
        let listed = self.all_workspaces(|| calls::list_workspaces().query("limit", Some(PAGE))).await;
        let workspaces = listed.map_err(|error| match error.downcast_ref::<ApiError>() {
            Some(refused) if refused.status == reqwest::StatusCode::FORBIDDEN => {
                error.context("short ids need a token that may list workspaces: give the whole id")
            }
            _ => error,
        })?;
        let candidates = workspaces.into_iter().map(|workspace| {
            let about = format!("{}, {}", workspace.status, workspace.created_at.format("%Y-%m-%d %H:%M:%S"));
            (workspace.id, about)
        });
        short_id::resolve("workspace", given, candidates.collect())
    }
}
