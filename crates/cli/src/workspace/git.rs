//! `workspace git`: one subcommand for each action.

use anyhow::Result;
use clap::{Args, Subcommand};
use emergent_wire::git::{GitAction, GitAnswer, GitRequest};

use super::files::tool;
use super::git_text;
use crate::context::Context;
use crate::output;
use crate::progress;

/// Run git in a workspace
///
/// Without an identity in the repository or the user's configuration, commits have the server's bot as author. Credentials never
/// enter the workspace.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace git 3fa2c9d1 clone https://github.com/owner/name
  emergent workspace git 3fa2c9d1 status
  emergent workspace git 3fa2c9d1 diff --base main src/
  emergent workspace git 3fa2c9d1 checkout --create fix-it
  emergent workspace git 3fa2c9d1 commit -m 'Say hello'
  emergent workspace git 3fa2c9d1 log --limit 5
  emergent workspace git 3fa2c9d1 push --branch fix-it")]
pub(super) struct GitArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    id: String,
    /// The repository's directory [default: /workspace]
    #[arg(long, short = 'C', global = true, value_name = "DIR")]
    path: Option<String>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug, PartialEq)]
enum Action {
    /// Clone a repository into the directory
    Clone {
        /// The repository: an http, https or file URL, or an absolute path in the workspace
        #[arg(value_name = "URL")]
        repository: String,
        /// The branch, tag or commit to check out
        #[arg(long, short)]
        branch: Option<String>,
        /// The number of commits of history [default: all]
        #[arg(long, value_name = "N")]
        depth: Option<u32>,
    },
    /// List the changed files
    Status,
    /// Show the changes as a patch
    Diff {
        /// Staged changes, instead of those that are not staged
        #[arg(long, visible_alias = "cached")]
        staged: bool,
        /// Compare with this commit or range
        #[arg(long, value_name = "REF")]
        base: Option<String>,
        /// Only these files
        files: Vec<String>,
    },
    /// Show the last commits
    Log {
        /// The number of commits [default: 20]
        #[arg(long, short = 'n', value_name = "N")]
        limit: Option<u32>,
        /// Start at this commit, or show this range
        #[arg(long, value_name = "REF")]
        base: Option<String>,
        /// Only commits that changed these files
        files: Vec<String>,
    },
    /// Commit changes
    Commit {
        /// The message
        #[arg(long, short, allow_hyphen_values = true)]
        message: String,
        /// Only these files [default: all changes]
        files: Vec<String>,
    },
    /// Push a branch
    Push {
        /// The remote [default: origin]
        #[arg(long)]
        remote: Option<String>,
        /// The branch [default: the current branch]
        #[arg(long, short)]
        branch: Option<String>,
    },
    /// Pull a branch
    Pull {
        /// The remote [default: origin]
        #[arg(long)]
        remote: Option<String>,
        /// The branch [default: the upstream of the current branch]
        #[arg(long, short)]
        branch: Option<String>,
    },
    /// Check out a branch, tag or commit
    Checkout {
        /// The branch, tag or commit
        branch: String,
        /// Create the branch
        #[arg(long, short = 'b')]
        create: bool,
        /// The start point of a new branch
        #[arg(long, value_name = "REF", requires = "create")]
        base: Option<String>,
    },
    /// List the branches, or create or delete one
    Branch {
        /// The branch to create or delete
        #[arg(required_if_eq("create", "true"), required_if_eq("delete", "true"))]
        branch: Option<String>,
        /// Create it
        #[arg(long, conflicts_with = "delete")]
        create: bool,
        /// Delete it; it must be merged
        #[arg(long, short)]
        delete: bool,
        /// The start point of a new branch
        #[arg(long, value_name = "REF", requires = "create")]
        base: Option<String>,
    },
}

impl Action {
    fn request(self, path: Option<String>) -> GitRequest {
        let some = |files: Vec<String>| Some(files).filter(|files| !files.is_empty());
        let mut request = GitRequest { path, ..GitRequest::new(GitAction::Status) };
        match self {
            Self::Status => {}
            Self::Clone { repository, branch, depth } => {
                request.action = GitAction::Clone;
                (request.repository_url, request.branch, request.limit) = (Some(repository), branch, depth);
            }
            Self::Diff { staged, base, files } => {
                request.action = GitAction::Diff;
                (request.staged, request.base, request.files) = (staged, base, some(files));
            }
            Self::Log { limit, base, files } => {
                request.action = GitAction::Log;
                (request.limit, request.base, request.files) = (limit, base, some(files));
            }
            Self::Commit { message, files } => {
                request.action = GitAction::Commit;
                (request.message, request.files) = (Some(message), some(files));
            }
            Self::Push { remote, branch } => {
                request.action = GitAction::Push;
                (request.remote, request.branch) = (remote, branch);
            }
            Self::Pull { remote, branch } => {
                request.action = GitAction::Pull;
                (request.remote, request.branch) = (remote, branch);
            }
            Self::Checkout { branch, create, base } => {
                request.action = GitAction::Checkout;
                (request.branch, request.create, request.base) = (Some(branch), create, base);
            }
            Self::Branch { branch, create, delete, base } => {
                request.action = GitAction::Branch;
                // A name without --delete creates a branch, like `git branch NAME`.
                request.create = create || (branch.is_some() && !delete);
                (request.branch, request.delete, request.base) = (branch, delete, base);
            }
        }
        request
    }
}

pub(super) async fn run(context: &Context, args: GitArgs) -> Result<u8> {
    let request = args.action.request(args.path);
    let what = format!("git {}", request.action.as_str());
    let answer = progress::during(&what, tool(context, &args.id, &request)).await?;
    context.show(&answer, |answer: GitAnswer| {
        output::text(&git_text::render(request.action, &answer))?;
        if answer.truncated {
            output::note("note: the patch is cut off; name files to see their whole patch");
        }
        Ok(())
    })?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use emergent_wire::Validate as _;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: GitArgs,
    }

    #[test]
    fn every_git_command_line_is_a_valid_request() {
        for line in [
            "clone https://host/x --branch main --depth 1",
            "status",
            "status --path sub",
            "diff --staged a b",
            "diff --base main..x",
            "log -n 5 --base x file",
            "commit -m message a",
            "push",
            "pull --remote up --branch b",
            "checkout x",
            "checkout -b x --base y",
            "branch",
            "branch x",
            "branch --create x --base y",
            "branch -d x",
        ] {
            let parsed =
                Line::try_parse_from(format!("git id {line}").split(' ')).unwrap_or_else(|e| panic!("{e}"));
            let request = parsed.args.action.request(parsed.args.path);
            assert!(request.validate().is_ok(), "{line}: {:?}", request.validate());
        }
    }

    #[test]
    fn invalid_git_command_lines_are_refused() {
        for line in
            ["", "rebase", "clone", "commit", "checkout", "branch --delete", "branch --create --delete x"]
        {
            assert!(Line::try_parse_from(format!("git id {line}").trim().split(' ')).is_err(), "{line}");
        }
    }
}
