//! The git tool: runs the image's git and reads its machine-readable output.
//!
//! git runs without a terminal, prompt or pager. Values from the request are validated, so that git takes none for an option.

pub(crate) mod credentials;
mod failure;
mod parse;
mod remote;
mod run;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use emergent_guest_protocol::GitFailureReason;
use emergent_wire::git::{GitAction, GitAnswer, GitRequest};
use emergent_wire::tools::{AGENT_FILES, WORKSPACE_DIR};
use emergent_wire::{ErrorCode, ErrorDetail, Validate as _};

use crate::agent::Agent;
use crate::call::Call;
use run::Git;

/// The number of commits in a log without a limit.
const DEFAULT_LOG: u32 = 20;
/// The format of a commit. Control characters separate its fields.
const LOG_FORMAT: &str = "--format=%H%x1f%an%x1f%ae%x1f%aI%x1f%s%x1f%b%x1e";

/// Runs a request.
pub(crate) fn run(
    agent: &Arc<Agent>,
    call: &Arc<Call>,
    request: &GitRequest,
) -> Result<GitAnswer, ErrorDetail> {
    request.validate()?;
    let directory = Path::new(WORKSPACE_DIR).join(request.path.as_deref().unwrap_or(""));
    let git = Git::new(agent, call, clean(&directory))?;
    let mut answer = match request.action {
        GitAction::Clone => clone(agent, &git, request)?,
        GitAction::Status => GitAnswer { status: Some(status(&git)?), ..GitAnswer::default() },
        GitAction::Diff => diff(&git, request)?,
        GitAction::Log => log(&git, request)?,
        GitAction::Commit => commit(agent, &git, request)?,
        GitAction::Push => push(&git, request)?,
        GitAction::Pull => pull(&git, request)?,
        GitAction::Checkout => checkout(&git, request)?,
        GitAction::Branch => branch(&git, request)?,
    };
    answer.success = true;
    answer.path = git.directory.to_string_lossy().into_owned();
    Ok(answer)
}

/// The path without a trailing slash or `.` components.
fn clean(path: &Path) -> PathBuf {
    path.components().collect()
}

fn status(git: &Git) -> Result<emergent_wire::git::GitStatus, ErrorDetail> {
    let output = git.output(&["status", "--porcelain=v2", "--branch", "--untracked-files=all", "-z"])?;
    Ok(parse::status(&output))
}

fn clone(agent: &Agent, git: &Git, request: &GitRequest) -> Result<GitAnswer, ErrorDetail> {
    agent.disk.refuse_if_full(agent)?;
    let url = request.repository_url.as_deref().unwrap_or_default();
    let target = Target::prepare(&git.directory)?;
    let depth = request.limit.map(|limit| format!("--depth={limit}"));
    let place = target.place().to_string_lossy().into_owned();
    let mut arguments = vec!["clone", "--no-progress"];
    arguments.extend(depth.as_deref());
    // A remote lists branches and tags, not commits: a commit is fetched after the clone.
    let commit = request.branch.as_deref().filter(|name| is_commit(name));
    let name = request.branch.as_deref().filter(|_| commit.is_none()).map(short_name);
    if let Some(name) = name {
        arguments.extend(["--branch", name]);
    }
    arguments.extend(["--", url, &place]);
    let parent = git.at(target.parent());
    if let Err(error) = parent.transfer(&arguments, Some(url)) {
        return Err(explain_failed_clone(git, &target, url, name, depth.as_deref(), error));
    }
    if let Some(commit) = commit {
        let cloned = git.at(target.place());
        if !cloned.succeeds(&["cat-file", "-e", &format!("{commit}^{{commit}}")]) {
            let mut fetch = vec!["fetch", "--no-progress"];
            fetch.extend(depth.as_deref());
            fetch.extend(["origin", commit]);
            cloned.transfer(&fetch, Some("origin"))?;
        }
        cloned.output(&["checkout", "--detach", commit, "--"])?;
    }
    target.finish()?;
    Ok(GitAnswer { status: Some(status(git)?), ..GitAnswer::default() })
}

/// The name of a branch or tag as `git clone` takes it. Where a branch and a tag have the same name, git takes the branch.
fn short_name(name: &str) -> &str {
    name.strip_prefix("refs/heads/").or_else(|| name.strip_prefix("refs/tags/")).unwrap_or(name)
}

/// Finds the reason of a failed clone. A remote that does not list the branch has refused it. Otherwise the transfer is
/// repeated as a fetch: git removes the files of a failed transfer of a clone, so a disk that was full has room again; a failed
/// fetch leaves its files, and [`Target`] removes them.
fn explain_failed_clone(
    git: &Git,
    target: &Target,
    url: &str,
    name: Option<&str>,
    depth: Option<&str>,
    error: ErrorDetail,
) -> ErrorDetail {
    let is_unknown = error.code == ErrorCode::GitFailed && GitFailureReason::of(&error).is_none();
    // After a complete transfer git keeps the repository: the checkout failed.
    let has_repository = target.place().join(".git").exists();
    if !is_unknown || has_repository || std::fs::create_dir_all(target.place()).is_err() {
        return error;
    }
    let repeated = git.at(target.place());
    let Some(reference) = listed_reference(&repeated, url, name) else { return error };
    if !repeated.succeeds(&["init", "--quiet", "--bare"]) {
        return error;
    }
    let mut fetch = vec!["fetch", "--no-progress", "--quiet"];
    fetch.extend(depth);
    fetch.extend(["--", url]);
    // As `git clone` does: all branches and tags, or one of them with a limited history.
    match depth {
        Some(_) => fetch.push(&reference),
        None => fetch.extend(["+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*"]),
    }
    match repeated.transfer(&fetch, Some(url)) {
        Err(found) if found.code == ErrorCode::DiskFull => {
            let message = format!("the workspace's disk is full: {}", error.message);
            ErrorDetail { message, ..found }
        }
        // No network can have interrupted it.
        Err(_) if url.starts_with('/') => error,
        _ => {
            let message = format!("{}; the transfer was interrupted: try again", error.message);
            GitFailureReason::TransferInterrupted.add_to(ErrorDetail::new(ErrorCode::GitFailed, message))
        }
    }
}

/// The full name of a remote's branch or tag, or HEAD; none when the remote does not list it.
fn listed_reference(git: &Git, url: &str, name: Option<&str>) -> Option<String> {
    let names = match name {
        Some(name) => vec![format!("refs/heads/{name}"), format!("refs/tags/{name}")],
        None => vec!["HEAD".to_owned()],
    };
    let list: Vec<&str> =
        ["ls-remote", "--", url].into_iter().chain(names.iter().map(String::as_str)).collect();
    let line = git.first_line(&list)?;
    line.split_once('\t').map(|(_, reference)| reference.to_owned())
}

/// The target directory of a clone. git needs an empty directory. A directory that holds only `.emergent` gets the clone in a
/// staging directory in there, which is moved up when the clone is complete. A failure leaves the directory as it was.
struct Target {
    directory: PathBuf,
    staging: Option<PathBuf>,
    /// The directory did not exist.
    made: bool,
    finished: bool,
}

impl Target {
    fn prepare(directory: &Path) -> Result<Self, ErrorDetail> {
        let (entries, made) = match std::fs::read_dir(directory) {
            Ok(entries) => (entries.flatten().map(|entry| entry.file_name()).collect(), false),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => (Vec::new(), true),
            Err(error) => return Err(cannot(directory, &error)),
        };
        let staging = match entries.as_slice() {
            [] => None,
            [only] if only == AGENT_FILES => {
                Some(directory.join(AGENT_FILES).join(format!("clone-{}", uuid::Uuid::new_v4().simple())))
            }
            _ => {
                let message = format!(
                    "{} is not empty: give another path to clone into, or remove what is there",
                    directory.display()
                );
                return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
            }
        };
        std::fs::create_dir_all(directory).map_err(|error| cannot(directory, &error))?;
        Ok(Self { directory: directory.to_owned(), staging, made, finished: false })
    }

    fn place(&self) -> &Path {
        self.staging.as_deref().unwrap_or(&self.directory)
    }

    fn parent(&self) -> &Path {
        &self.directory
    }

    fn finish(mut self) -> Result<(), ErrorDetail> {
        if let Some(staging) = &self.staging {
            let mut entries: Vec<_> = std::fs::read_dir(staging)
                .map_err(|error| cannot(staging, &error))?
                .flatten()
                .map(|entry| entry.file_name())
                .collect();
            // `.git` comes last: until then the directory is not a repository.
            entries.sort_by_key(|name| name == ".git");
            for name in entries {
                std::fs::rename(staging.join(&name), self.directory.join(&name))
                    .map_err(|error| cannot(staging, &error))?;
            }
            std::fs::remove_dir(staging).map_err(|error| cannot(staging, &error))?;
        }
        self.finished = true;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        match &self.staging {
            Some(staging) => {
                let _ = std::fs::remove_dir_all(staging);
            }
            None if self.made => {
                let _ = std::fs::remove_dir_all(&self.directory);
            }
            // The directory was empty.
            None => {
                for entry in std::fs::read_dir(&self.directory).into_iter().flatten().flatten() {
                    let _ =
                        std::fs::remove_dir_all(entry.path()).or_else(|_| std::fs::remove_file(entry.path()));
                }
            }
        }
    }
}

fn is_commit(name: &str) -> bool {
    name.len() >= 7 && name.len() <= 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn diff(git: &Git, request: &GitRequest) -> Result<GitAnswer, ErrorDetail> {
    let mut common = vec!["diff", "--no-ext-diff", "--no-textconv"];
    if request.staged {
        common.push("--cached");
    }
    common.extend(request.base.as_deref());
    let with = |extra: &[&str]| -> Vec<String> {
        let mut arguments: Vec<String> = common.iter().chain(extra).map(|text| (*text).to_owned()).collect();
        arguments.push("--".to_owned());
        arguments.extend(request.files.iter().flatten().cloned());
        arguments
    };
    let counts = git.output(&as_strs(&with(&["--numstat", "-z"])))?;
    let (patch, truncated) = git.text(&as_strs(&with(&[])))?;
    Ok(GitAnswer {
        diff: Some(patch),
        files: Some(parse::numstat(&counts)),
        truncated,
        ..GitAnswer::default()
    })
}

fn as_strs(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

fn log(git: &Git, request: &GitRequest) -> Result<GitAnswer, ErrorDetail> {
    let count = format!("--max-count={}", request.limit.unwrap_or(DEFAULT_LOG));
    let mut arguments = vec!["log", LOG_FORMAT, &count];
    arguments.extend(request.base.as_deref());
    arguments.push("--");
    arguments.extend(request.files.iter().flatten().map(String::as_str));
    let commits = parse::log(&git.output(&arguments)?);
    Ok(GitAnswer { commits: Some(commits), ..GitAnswer::default() })
}

fn commit(agent: &Agent, git: &Git, request: &GitRequest) -> Result<GitAnswer, ErrorDetail> {
    agent.disk.refuse_if_full(agent)?;
    let git = &git.with_identity();
    match &request.files {
        None => git.output(&["add", "--all", "--", "."])?,
        Some(files) => {
            let mut arguments = vec!["add", "--all", "--"];
            arguments.extend(files.iter().map(String::as_str));
            git.output(&arguments)?
        }
    };
    let message = format!("--message={}", request.message.as_deref().unwrap_or_default());
    let mut arguments = vec!["commit", "--no-gpg-sign", "--quiet", &message];
    if let Some(files) = &request.files {
        arguments.extend(["--only", "--"]);
        arguments.extend(files.iter().map(String::as_str));
    }
    git.output(&arguments)?;
    let commits = parse::log(&git.output(&["log", LOG_FORMAT, "--max-count=1"])?);
    Ok(GitAnswer { commits: Some(commits), status: Some(status(git)?), ..GitAnswer::default() })
}

fn push(git: &Git, request: &GitRequest) -> Result<GitAnswer, ErrorDetail> {
    let remote = request.remote.as_deref().unwrap_or("origin");
    let branch = request.branch.as_deref().unwrap_or("HEAD");
    let output = git.transfer(&["push", "--no-progress", "--set-upstream", remote, branch], Some(remote))?;
    Ok(GitAnswer { output: Some(output), ..GitAnswer::default() })
}

fn pull(git: &Git, request: &GitRequest) -> Result<GitAnswer, ErrorDetail> {
    let remote = request.remote.as_deref().unwrap_or("origin");
    let mut arguments = vec!["pull", "--no-progress", "--ff", "--no-rebase", "--no-edit"];
    let is_named = request.remote.is_some() || request.branch.is_some();
    if is_named {
        arguments.push(remote);
    }
    arguments.extend(request.branch.as_deref());
    // A pull may make a merge commit.
    let output = git.with_identity().transfer(&arguments, is_named.then_some(remote))?;
    Ok(GitAnswer { output: Some(output), status: Some(status(git)?), ..GitAnswer::default() })
}

fn checkout(git: &Git, request: &GitRequest) -> Result<GitAnswer, ErrorDetail> {
    let name = request.branch.as_deref().unwrap_or_default();
    let mut arguments = vec!["checkout", "--no-progress"];
    if request.create {
        arguments.extend(["-b", name]);
        arguments.extend(request.base.as_deref());
    } else {
        arguments.push(name);
    }
    arguments.push("--");
    git.output(&arguments)?;
    Ok(GitAnswer { status: Some(status(git)?), ..GitAnswer::default() })
}

fn branch(git: &Git, request: &GitRequest) -> Result<GitAnswer, ErrorDetail> {
    if let Some(name) = request.branch.as_deref() {
        let mut arguments = vec!["branch"];
        if request.delete {
            arguments.push("--delete");
        }
        arguments.push(name);
        arguments.extend(request.base.as_deref());
        git.output(&arguments)?;
    }
    let format = "--format=%(refname:short)%1f%(objectname)%1f%(HEAD)%1f%(upstream:short)";
    let branches = parse::branches(&git.output(&["branch", format])?);
    Ok(GitAnswer { branches: Some(branches), ..GitAnswer::default() })
}

fn cannot(path: &Path, error: &std::io::Error) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::Unacceptable, format!("{}: {error}", path.display()))
}
