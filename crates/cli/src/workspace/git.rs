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
/// Commits are made in the name of the server's bot, and credentials never enter the workspace.
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
    /// The workspace's id, or a unique piece of its beginning or end
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
        /// What to clone: http, https, file, or an absolute path in the workspace
        #[arg(value_name = "URL")]
        repository: String,
        /// The branch, tag or commit to check out
        #[arg(long, short)]
        branch: Option<String>,
        /// Only this many commits of history
        #[arg(long, value_name = "N")]
        depth: Option<u32>,
    },
    /// Show what is changed
    Status,
    /// Show the changes as a patch
    Diff {
        /// What is staged instead of what is not
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
        /// How many [default: 20]
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
        /// Where to [default: origin]
        #[arg(long)]
        remote: Option<String>,
        /// The branch [default: the current one]
        #[arg(long, short)]
        branch: Option<String>,
    },
    /// Pull a branch
    Pull {
        /// Where from [default: origin]
        #[arg(long)]
        remote: Option<String>,
        /// The branch [default: the one that is followed]
        #[arg(long, short)]
        branch: Option<String>,
    },
    /// Check out a branch, tag or commit
    Checkout {
        /// The branch, tag or commit
        branch: String,
        /// Make the branch
        #[arg(long, short = 'b')]
        create: bool,
        /// Where a new branch starts
        #[arg(long, value_name = "REF", requires = "create")]
        base: Option<String>,
    },
    /// List the branches, or make or delete one
    Branch {
        /// The branch to make or delete
        #[arg(required_if_eq("create", "true"), required_if_eq("delete", "true"))]
        branch: Option<String>,
        /// Make it
        #[arg(long, conflicts_with = "delete")]
        create: bool,
        /// Delete it; it must be merged
        #[arg(long, short)]
        delete: bool,
        /// Where a new branch starts
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
                // A name without --delete is a branch to make, as with git itself.
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
            output::note("note: the patch is longer; name files to see all of theirs");
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

    /// Every form the command line takes is one that the server accepts.
    #[test]
    fn what_is_parsed_is_valid() {
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
    fn what_is_not_valid_is_not_parsed() {
        for line in
            ["", "rebase", "clone", "commit", "checkout", "branch --delete", "branch --create --delete x"]
        {
            assert!(Line::try_parse_from(format!("git id {line}").trim().split(' ')).is_err(), "{line}");
        }
    }
}
