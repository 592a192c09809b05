//! The git tool: one request type for all actions, and a structured answer for each.

use serde::{Deserialize, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::git_url::check_repository;
use crate::tools::{ToolRequest, check_path};
use crate::validate::Validate;

/// A git action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum GitAction {
    Clone,
    Status,
    Diff,
    Log,
    Commit,
    Push,
    Pull,
    Checkout,
    Branch,
}

/// Runs git. Which fields an action takes is said at each field; others are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct GitRequest {
    /// The action.
    pub action: GitAction,
    /// The repository's directory (clone: where to put it); `/workspace` unless given.
    #[serde(default, alias = "file_path", skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// clone: what to clone (a git URL without credentials, or an absolute path in the sandbox).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository_url: Option<String>,
    /// clone, checkout, push, pull: a branch, tag or commit. branch: the branch to make or delete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// clone: only this many commits of history. log: how many commits (default 20, at most 500).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// commit: the message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// commit: the files to commit (default: all changes). diff, log: only these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<String>>,
    /// diff: what is staged instead of what is not.
    #[serde(default)]
    pub staged: bool,
    /// diff: compare with this commit or range. branch: where the new branch starts.
    #[serde(default, alias = "ref", skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// checkout: make the branch. branch: make `branch` (false lists, or deletes with `delete`).
    #[serde(default)]
    pub create: bool,
    /// branch: delete `branch` (it must be merged).
    #[serde(default)]
    pub delete: bool,
    /// push, pull: the remote's name, or where it is as for `repository_url`; `origin` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
}

/// One changed path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GitFileStatus {
    /// The path, relative to the repository.
    pub path: String,
    /// `added`, `modified`, `deleted`, `renamed`, `copied`, `type_changed`, `untracked`, `conflicted`.
    pub status: String,
    /// Whether the change is in the index.
    pub staged: bool,
    /// The earlier path of a renamed or copied file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original_path: Option<String>,
}

/// The state of a work tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GitStatus {
    /// The branch; null when detached.
    pub branch: Option<String>,
    /// The commit; null before the first.
    pub commit: Option<String>,
    /// The branch it follows.
    pub upstream: Option<String>,
    /// Commits ahead of it.
    pub ahead: u64,
    /// Commits behind it.
    pub behind: u64,
    /// Whether nothing is changed.
    pub clean: bool,
    /// The changed files (at most 1000).
    pub files: Vec<GitFileStatus>,
}

/// One file of a diff.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GitDiffFile {
    /// The path.
    pub path: String,
    /// Lines added; null for a binary file.
    pub additions: Option<u64>,
    /// Lines removed; null for a binary file.
    pub deletions: Option<u64>,
}

/// One commit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GitCommit {
    /// Its hash.
    pub commit: String,
    /// The author's name.
    pub author_name: String,
    /// The author's address.
    pub author_email: String,
    /// When, as RFC 3339.
    pub date: String,
    /// The first line of its message.
    pub subject: String,
    /// The rest of its message.
    pub body: String,
}

/// One branch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GitBranch {
    /// Its name.
    pub name: String,
    /// Its commit.
    pub commit: String,
    /// Whether it is checked out.
    pub current: bool,
    /// The branch it follows.
    pub upstream: Option<String>,
}

/// The answer of git. Each action fills its own fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GitAnswer {
    /// Always true: a failure is an error.
    pub success: bool,
    /// The repository's directory.
    pub path: String,
    /// status, clone, checkout, pull, commit: the state of the work tree after the action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<GitStatus>,
    /// diff: the patch (cut at 50 KiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
    /// diff: the files in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<GitDiffFile>>,
    /// diff: whether the patch was cut.
    #[serde(default)]
    pub truncated: bool,
    /// log: the commits; commit: the new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commits: Option<Vec<GitCommit>>,
    /// branch: the local branches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branches: Option<Vec<GitBranch>>,
    /// git's output (push, pull).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
}

impl GitRequest {
    /// A request with nothing but its action.
    pub fn new(action: GitAction) -> Self {
        Self {
            action,
            path: None,
            repository_url: None,
            branch: None,
            limit: None,
            message: None,
            files: None,
            staged: false,
            base: None,
            create: false,
            delete: false,
            remote: None,
        }
    }
}

impl ToolRequest for GitRequest {
    const NAME: &'static str = "git";
    type Answer = GitAnswer;
}

impl Validate for GitRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        let bad = |message: String| Err(ErrorDetail::new(ErrorCode::BadRequest, message));
        let action = self.action;
        if let Some(path) = &self.path {
            check_path("path", path)?;
        }
        let named = [("branch", &self.branch), ("base", &self.base), ("remote", &self.remote)];
        for (field, value) in named {
            if let Some(value) = value
                && (value.is_empty()
                    || value.starts_with('-')
                    || value.contains(['\0', '\n'])
                    || value.len() > 2048)
            {
                return bad(format!(
                    "{field} is empty, too long, starts with '-' or has a control character"
                ));
            }
        }
        if let Some(url) = &self.repository_url {
            check_repository("repository_url", url)?;
        }
        // The name of a remote has neither in it.
        if let Some(remote) = self.remote.as_ref().filter(|remote| remote.contains([':', '@'])) {
            check_repository("remote", remote)?;
        }
        for file in self.files.iter().flatten() {
            check_path("files", file)?;
        }
        let allowed: &[&str] = match action {
            GitAction::Clone => &["repository_url", "branch", "limit"],
            GitAction::Status => &[],
            GitAction::Diff => &["staged", "base", "files"],
            GitAction::Log => &["limit", "files", "base"],
            GitAction::Commit => &["message", "files"],
            GitAction::Push | GitAction::Pull => &["remote", "branch"],
            GitAction::Checkout => &["branch", "create", "base"],
            GitAction::Branch => &["branch", "create", "delete", "base"],
        };
        let given = [
            ("repository_url", self.repository_url.is_some()),
            ("branch", self.branch.is_some()),
            ("limit", self.limit.is_some()),
            ("message", self.message.is_some()),
            ("files", self.files.is_some()),
            ("staged", self.staged),
            ("base", self.base.is_some()),
            ("create", self.create),
            ("delete", self.delete),
            ("remote", self.remote.is_some()),
        ];
        for (field, is_given) in given {
            if is_given && !allowed.contains(&field) {
                return bad(format!("git {} does not take '{field}'", action.as_str()));
            }
        }
        match action {
            GitAction::Clone if self.repository_url.is_none() => bad("git clone needs repository_url".into()),
            GitAction::Commit if self.message.as_deref().unwrap_or("").trim().is_empty() => {
                bad("git commit needs a message".into())
            }
            GitAction::Checkout if self.branch.is_none() => {
                bad("git checkout needs branch: a branch, tag or commit".into())
            }
            GitAction::Branch if (self.create || self.delete) && self.branch.is_none() => {
                bad("git branch needs the name of the branch to create or delete".into())
            }
            GitAction::Branch if self.create && self.delete => {
                bad("git branch can create or delete, not both".into())
            }
            GitAction::Branch if self.branch.is_some() && !self.create && !self.delete => {
                bad("git branch lists without 'branch'; say create or delete to change one".into())
            }
            _ if self.limit.is_some_and(|limit| limit == 0 || limit > 500) => {
                bad("limit must be from 1 to 500".into())
            }
            _ => Ok(()),
        }
    }
}

impl GitAction {
    /// The action's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            GitAction::Clone => "clone",
            GitAction::Status => "status",
            GitAction::Diff => "diff",
            GitAction::Log => "log",
            GitAction::Commit => "commit",
            GitAction::Push => "push",
            GitAction::Pull => "pull",
            GitAction::Checkout => "checkout",
            GitAction::Branch => "branch",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clone(url: &str) -> GitRequest {
        GitRequest { repository_url: Some(url.to_owned()), ..GitRequest::new(GitAction::Clone) }
    }

    fn code(request: &GitRequest) -> Option<ErrorCode> {
        request.validate().err().map(|error| error.code)
    }

    #[test]
    fn clone_refuses_credentials_and_other_schemes_before_a_sandbox_sees_them() {
        for good in ["https://host.example/r", "git@host.example:r", "/workspace/r", "/work space/r"] {
            assert_eq!(code(&clone(good)), None, "{good}");
        }
        for (bad, expected) in [
            ("https://token@host.example/r", ErrorCode::Unacceptable),
            ("https://host.example/r?token=x", ErrorCode::Unacceptable),
            ("ext::sh", ErrorCode::BadRequest),
            ("file:///workspace/r", ErrorCode::BadRequest),
            ("relative/path", ErrorCode::BadRequest),
            ("--upload-pack=x", ErrorCode::BadRequest),
            ("", ErrorCode::BadRequest),
            ("/a\nb", ErrorCode::BadRequest),
        ] {
            assert_eq!(code(&clone(bad)), Some(expected), "{bad}");
        }
    }

    #[test]
    fn a_remote_is_a_name_or_a_url_without_credentials() {
        let push =
            |remote: &str| GitRequest { remote: Some(remote.to_owned()), ..GitRequest::new(GitAction::Push) };
        for good in ["origin", "my/fork", "https://host.example/r", "git@host.example:r", "/workspace/r"] {
            assert_eq!(code(&push(good)), None, "{good}");
        }
        for bad in ["https://u:hunter2@host.example/r", "u:hunter2@host.example:r"] {
            let error = push(bad).validate().unwrap_err();
            assert_eq!(error.code, ErrorCode::Unacceptable, "{bad}");
            assert!(error.message.starts_with("remote ") && !error.message.contains("hunter2"), "{error}");
        }
        assert_eq!(code(&push("ext::sh -c x")), Some(ErrorCode::BadRequest));
    }
}
