//! The walk of glob and grep over a tree, with the rules of `rg --hidden`.
//!
//! `.gitignore` (also where there is no repository), `.ignore` and `.rgignore` are followed, of the directories
//! above the root too; the user's global ignore file is not, so that a workspace gives the same answer everywhere.
//! Left out are `.git`, the guest agent's own directory, temporary files of write, and, when all of `/` is walked,
//! the kernel's file systems. The root itself is never excluded. Links are not followed.
//!
//! There are two walks: ripgrep's own, which uses paths and is fast, and one for confined contexts, which uses descriptors, so
//! that a process can't lead it outside by swapping directories with links (see `confined_walk`).

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread::available_parallelism;

use emergent_wire::ErrorDetail;
use emergent_wire::tools::AGENT_FILES;
use ignore::WalkBuilder;
use rustix::fs::{FileType, fstat};

use crate::Context;
use crate::error::{io_error, os_error};
use crate::read::open_failure;
use crate::write::{TEMPORARY_PREFIX, TEMPORARY_SUFFIX};

const MAX_THREADS: usize = 4;

/// The root of a search.
#[derive(Debug)]
pub(crate) struct Root {
    /// The prefix of all paths in the answer.
    pub(crate) path: PathBuf,
    /// Its type.
    pub(crate) file_type: FileType,
    /// The root, open.
    pub(crate) file: File,
}

/// Opens the root of a search. A root that is missing or can't be read is a failure, never an empty answer.
pub(crate) fn open_root(context: &Context, path: &Path) -> Result<Root, ErrorDetail> {
    let request = context.absolute(path);
    let location = context.locate(&request)?;
    let file = location.open().map_err(|errno| open_failure("search", &location, errno))?;
    let stat = fstat(&file).map_err(|errno| os_error("search", &location.path, errno))?;
    let path = if context.confined_to.is_none() && request.has_parent_steps() {
        location.path.canonicalize().map_err(|error| io_error("search", &location.path, &error))?
    } else {
        location.path
    };
    Ok(Root { path, file_type: FileType::from_raw_mode(stat.st_mode), file })
}

/// A walk of a directory by its path, for contexts that are not confined.
pub(crate) fn builder(context: &Context, root: &Path) -> WalkBuilder {
    let left_out = LeftOut::new(context, root);
    let mut builder = WalkBuilder::new(root);
    builder
        .current_dir(root)
        .hidden(false)
        .require_git(false)
        .git_global(false)
        .follow_links(false)
        .threads(threads())
        .add_custom_ignore_filename(".rgignore")
        .filter_entry(move |entry| {
            let name = entry.file_name().as_encoded_bytes();
            entry.depth() == 0 || !left_out.contains(entry.path(), name, entry.depth())
        });
    builder
}

/// The number of threads of a search.
pub(crate) fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS)))
}

/// The entries that are excluded regardless of ignore files.
pub(crate) struct LeftOut {
    own_directory: PathBuf,
    is_whole_system: bool,
}

impl LeftOut {
    pub(crate) fn new(context: &Context, root: &Path) -> Self {
        Self {
            own_directory: context.workspace_dir.join(AGENT_FILES),
            is_whole_system: root == Path::new("/"),
        }
    }

    /// Whether an entry below the root is excluded.
    pub(crate) fn contains(&self, path: &Path, name: &[u8], depth: usize) -> bool {
        if name.starts_with(b".") {
            let is_temporary =
                name.starts_with(TEMPORARY_PREFIX.as_bytes()) && name.ends_with(TEMPORARY_SUFFIX.as_bytes());
            return name == b".git"
                || is_temporary
                || (name == AGENT_FILES.as_bytes() && path == self.own_directory);
        }
        self.is_whole_system && depth == 1 && matches!(name, b"proc" | b"sys" | b"dev")
    }
}
