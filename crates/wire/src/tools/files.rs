//! The requests and answers of read, write and edit.

use serde::{Deserialize, Serialize};

use super::{ToolRequest, check_path, check_range, check_text};
use crate::error::{ErrorCode, ErrorDetail};
use crate::validate::Validate;

/// Reads a file (as numbered lines, or raw) or lists a directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReadRequest {
    /// The file or directory.
    #[serde(alias = "path")]
    pub file_path: String,
    /// The first line to show, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The most lines to show; 2000 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Give the exact bytes, base64, instead of numbered lines.
    #[serde(default)]
    pub raw: bool,
}

/// A file's lines, a directory's entries, or a file's bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReadAnswer {
    /// Lines as `N: text`; entries one a line with `/` after directories; base64 when raw; empty for a binary file.
    pub content: String,
    /// Lines of the file, or entries of the directory. Null for a file too large to count (over 256 MiB).
    pub total_lines: Option<u64>,
    /// The file's size in bytes.
    pub file_size: u64,
    /// Whether the path is a directory.
    pub is_dir: bool,
    /// Whether the file is binary.
    pub is_binary: bool,
    /// Whether there is more than this answer shows.
    pub truncated: bool,
    /// SHA-256 of the whole file, for `expected_sha256` of edit. Null for directories and files over 256 MiB.
    pub sha256: Option<String>,
    /// The media type, when binary or raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The line to pass as `offset` to read on, when truncated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_offset: Option<u64>,
    /// The next step for the caller, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// The encoding of the `content` of write in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ContentEncoding {
    /// Text.
    #[default]
    #[serde(rename = "utf-8", alias = "utf8")]
    Utf8,
    /// Base64 (standard alphabet, padded) of any bytes.
    #[serde(rename = "base64")]
    Base64,
}

/// Writes a whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct WriteRequest {
    /// The file; missing directories above it are made.
    #[serde(alias = "path")]
    pub file_path: String,
    /// The new content, at most 64 MiB.
    pub content: String,
    /// The encoding of `content`.
    #[serde(default)]
    pub encoding: ContentEncoding,
}

/// A file was written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WriteAnswer {
    /// Always true: a failure is an error.
    pub success: bool,
    /// The file's absolute path.
    pub file_path: String,
    /// Its size now.
    pub bytes_written: u64,
    /// Whether it is new.
    pub created: bool,
    /// SHA-256 of what it holds now.
    pub sha256: String,
}

/// Replaces a piece of text in a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EditRequest {
    /// The file.
    #[serde(alias = "path")]
    pub file_path: String,
    /// The text to replace. Empty: make a new file out of `new_string`.
    pub old_string: String,
    /// The replacement.
    pub new_string: String,
    /// Replace every occurrence instead of insisting on exactly one.
    #[serde(default)]
    pub replace_all: bool,
    /// Refuse (409) unless the file has this SHA-256 now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_sha256: Option<String>,
}

/// A file was edited.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EditAnswer {
    /// Always true: a failure is an error.
    pub success: bool,
    /// Lines that were added or removed, whichever is more in each place, summed.
    pub lines_changed: u64,
    /// Occurrences replaced.
    pub replacements: u64,
    /// The change as a unified diff (cut at 50 KiB).
    pub diff: String,
    /// The matcher that found `old_string`: `exact`, `line_trimmed`, ….
    pub matched_by: String,
    /// SHA-256 of the file now.
    pub sha256: String,
}

impl ToolRequest for ReadRequest {
    const NAME: &'static str = "read";
    type Answer = ReadAnswer;
}

impl ToolRequest for WriteRequest {
    const NAME: &'static str = "write";
    type Answer = WriteAnswer;
}

impl ToolRequest for EditRequest {
    const NAME: &'static str = "edit";
    type Answer = EditAnswer;
}

impl Validate for ReadRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        check_path("file_path", &self.file_path)?;
        check_range("offset", self.offset, 1, u64::MAX)?;
        check_range("limit", self.limit, 1, 1_000_000)?;
        if self.raw && (self.offset.is_some() || self.limit.is_some()) {
            return Err(ErrorDetail::new(
                ErrorCode::BadRequest,
                "raw gives the whole file: leave offset and limit out",
            ));
        }
        Ok(())
    }
}

impl Validate for WriteRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        check_path("file_path", &self.file_path)
    }
}

impl Validate for EditRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        check_path("file_path", &self.file_path)?;
        check_text("old_string", &self.old_string)?;
        check_text("new_string", &self.new_string)?;
        if let Some(sha256) = &self.expected_sha256
            && (sha256.len() != 64 || !sha256.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            return Err(ErrorDetail::new(
                ErrorCode::BadRequest,
                "expected_sha256 must be 64 hexadecimal digits, as read returns them",
            ));
        }
        Ok(())
    }
}
