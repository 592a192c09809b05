//! The messages between the guest agent and the search process.
//!
//! Requests and replies are JSON. Each follows its length, which is four bytes (little-endian).

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use emergent_wire::ErrorDetail;
use emergent_wire::tools::{GlobAnswer, GlobRequest, GrepAnswer, GrepRequest};
use serde::{Deserialize, Serialize};

use crate::{Context, glob, grep};

/// The size of a message's length.
pub const LENGTH_BYTES: usize = 4;
/// The longest message; the tools' own limits are far below.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// A message as it is sent.
pub fn to_message(content: &impl Serialize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; LENGTH_BYTES];
    serde_json::to_writer(&mut bytes, content).map_err(|error| error.to_string())?;
    let length = bytes.len() - LENGTH_BYTES;
    match u32::try_from(length).ok().filter(|_| length <= MAX_MESSAGE_BYTES) {
        Some(length) => bytes[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes()),
        None => return Err(format!("a message of {length} bytes is too long")),
    }
    Ok(bytes)
}

/// The content of a complete message; none for an incomplete one. A length over the limit is an error.
pub fn message_content(bytes: &[u8]) -> Result<Option<&[u8]>, String> {
    let Some((length, content)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(format!("a message of {length} bytes is too long"));
    }
    Ok(content.get(..length))
}

/// A search and its context.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SearchRequest {
    /// The start of relative paths.
    pub workspace_dir: PathBuf,
    /// The directories that the search is confined to.
    pub confined_to: Option<Vec<PathBuf>>,
    /// The search.
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

/// The result of a search.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SearchReply {
    /// Files by name.
    Glob(GlobAnswer),
    /// Lines by content.
    Grep(GrepAnswer),
    /// The error of a failed search.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_complete_with_its_last_byte() {
        let message = to_message(&"a search").unwrap();
        for end in 0..message.len() {
            assert_eq!(message_content(&message[..end]).unwrap(), None, "{end}");
        }
        assert_eq!(message_content(&message).unwrap(), Some(br#""a search""#.as_slice()));
        assert!(message_content(&u32::MAX.to_le_bytes()).is_err());
        assert!(to_message(&"x".repeat(MAX_MESSAGE_BYTES)).is_err());
    }
}
