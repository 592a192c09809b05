//! Summaries of requests for the audit log: enough to know what was done to what, never contents.
//!
//! Commands, file contents and variables can hold secrets: of a command its length and hash are kept, of contents their size, of
//! variables their names.

use emergent_wire::git_url::GitUrl;
use serde_json::Value;

/// The longest text that is kept of a path or pattern.
const MAX_CHARS: usize = 200;

/// A request that has a summary.
pub(crate) trait Summarize {
    fn summary(&self) -> Value;
}

pub(crate) fn short(text: &str) -> String {
    text.chars().take(MAX_CHARS).collect()
}

pub(crate) fn short_option(text: Option<&String>) -> Option<String> {
    text.map(|text| short(text))
}

/// A repository's URL without credentials: a request that carries some is recorded before it is refused.
pub(crate) fn repository(url: Option<&String>) -> Option<String> {
    url.map(|url| short(&GitUrl::without_credentials(url)))
}
