//! Searches as messages: the guest agent hands them to a process of their own.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use emergent_wire::ErrorDetail;
use emergent_wire::tools::{GlobAnswer, GlobRequest, GrepAnswer, GrepRequest};
use serde::{Deserialize, Serialize};

use crate::{Context, glob, grep};

/// What to search, and where.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SearchRequest {
    /// Where relative paths start.
    pub workspace_dir: PathBuf,
    /// Where the search must stay.
    pub confined_to: Option<Vec<PathBuf>>,
    /// What to search.
    pub search: Search,
}

/// A search of either kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Search {
    /// By name.
    Glob(GlobRequest),
    /// By content.
    Grep(GrepRequest),
}

/// What a search found.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SearchReply {
    /// Files by name.
    Glob(GlobAnswer),
    /// Lines by content.
    Grep(GrepAnswer),
    /// Nothing, and why.
    Err(ErrorDetail),
}

/// Runs a search.
pub fn run(request: &SearchRequest, cancel: &AtomicBool) -> SearchReply {
    let context =
        Context { workspace_dir: request.workspace_dir.clone(), confined_to: request.confined_to.clone() };
    let reply = match &request.search {
        Search::Glob(request) => glob::glob(&context, request, cancel).map(SearchReply::Glob),
        Search::Grep(request) => grep::grep(&context, request, cancel).map(SearchReply::Grep),
    };
    reply.unwrap_or_else(SearchReply::Err)
}
