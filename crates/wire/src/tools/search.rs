//! The requests and answers of glob and grep.

use serde::{Deserialize, Serialize};

use super::{MAX_MATCHES, ToolRequest, check_path, check_range};
use crate::error::{ErrorCode, ErrorDetail};
use crate::validate::Validate;

/// Finds files by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct GlobRequest {
    /// A glob such as `**/*.ts` or `src/{a,b}/*.rs`, relative to `path`.
    pub pattern: String,
    /// The directory to search; `/workspace` unless given.
    #[serde(default, alias = "file_path", skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The most paths in the answer; 100 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

/// Files found by name, newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GlobAnswer {
    /// Absolute paths, newest first.
    pub matches: Vec<String>,
    /// The number of entries of `matches`.
    pub count: u64,
    /// Whether more files matched.
    pub truncated: bool,
}

/// Searches file contents with a regular expression (ripgrep's engine).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct GrepRequest {
    /// The regular expression.
    pub pattern: String,
    /// The file or directory to search; `/workspace` unless given.
    #[serde(default, alias = "file_path", skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Only files whose name or path matches this glob, such as `*.rs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include: Option<String>,
    /// The most matching lines in the answer; 100 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Ignore the case of letters.
    #[serde(default)]
    pub ignore_case: bool,
    /// Lines of context to show around each match (at most 50).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<u32>,
}

/// One matching line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GrepMatch {
    /// The file's absolute path.
    pub file_path: String,
    /// The line's number, from 1.
    pub line_number: u64,
    /// The line without its end, cut at 2000 characters.
    pub line: String,
    /// Lines before it, when context was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<String>,
    /// Lines after it, when context was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<String>,
}

/// Matching lines, by path and line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GrepAnswer {
    /// The matches, sorted by path, then line.
    pub matches: Vec<GrepMatch>,
    /// Whether there are more.
    pub truncated: bool,
    /// Files that could not be searched, with the reason (at most 20).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<String>,
}

impl ToolRequest for GlobRequest {
    const NAME: &'static str = "glob";
    type Answer = GlobAnswer;
}

impl ToolRequest for GrepRequest {
    const NAME: &'static str = "grep";
    type Answer = GrepAnswer;
}

fn check_pattern(pattern: &str) -> Result<(), ErrorDetail> {
    if pattern.is_empty() || pattern.contains('\0') || pattern.len() > 64 * 1024 {
        return Err(ErrorDetail::new(
            ErrorCode::InvalidPattern,
            "pattern is empty, has a NUL byte or is over 64 KiB",
        ));
    }
    Ok(())
}

impl Validate for GlobRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        check_pattern(&self.pattern)?;
        if let Some(path) = &self.path {
            check_path("path", path)?;
        }
        check_range("limit", self.limit.map(u64::from), 1, u64::from(MAX_MATCHES))
    }
}

impl Validate for GrepRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        check_pattern(&self.pattern)?;
        if let Some(path) = &self.path {
            check_path("path", path)?;
        }
        check_range("limit", self.limit.map(u64::from), 1, u64::from(MAX_MATCHES))?;
        check_range("context", self.context.map(u64::from), 0, 50)
    }
}
