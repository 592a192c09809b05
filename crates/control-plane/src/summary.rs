//! Summaries of requests for the audit log: the action and its object, without contents.
//!
//! Commands, file contents and variables can hold secrets. So a summary has only the length and the hash of a command, the size of
//! contents, and the names of variables.

use emergent_wire::git_url::GitUrl;
use serde_json::Value;

/// The limit on the length of a path or pattern in a summary.
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

/// The URL of a repository without credentials. A request with credentials in a URL is refused, but it is audited first.
pub(crate) fn repository(url: Option<&String>) -> Option<String> {
    url.map(|url| short(&GitUrl::without_credentials(url)))
}
