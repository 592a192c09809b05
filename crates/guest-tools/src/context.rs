//! The start of relative paths, and the confinement of all paths.

use std::path::{Component, Path, PathBuf};

use emergent_wire::tools::{WORKSPACE_DIR, check_path};
use emergent_wire::{ErrorCode, ErrorDetail};

/// The frame of a call: the directory that relative paths start at, and the directories it may not leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// Relative paths start here; normally `/workspace`.
    pub workspace_dir: PathBuf,
    /// If given, every path must end in one of these directories, also after symbolic links are followed.
    pub confined_to: Option<Vec<PathBuf>>,
}

impl Default for Context {
    fn default() -> Self {
        Self::new(WORKSPACE_DIR)
    }
}

/// A path of a request, made absolute.
#[derive(Clone, Debug)]
pub(crate) struct RequestPath {
    /// The path for the operating system, with `..` and a `/` at the end.
    pub(crate) os: PathBuf,
    /// The path for answers: without `.`, doubled `/` and `/` at the end.
    pub(crate) shown: PathBuf,
}

impl RequestPath {
    /// Whether `..` occurs, so that the shown path may not be the shortest one.
    pub(crate) fn has_parent_steps(&self) -> bool {
        self.shown.components().any(|c| c == Component::ParentDir)
    }

    /// Whether the path ends in `/`, `/.` or `/..`, which only a directory can.
    pub(crate) fn names_directory(&self) -> bool {
        let bytes = self.os.as_os_str().as_encoded_bytes();
        bytes.ends_with(b"/") || bytes.ends_with(b"/.") || bytes.ends_with(b"/..")
    }
}

impl Context {
    /// A context in which the whole sandbox can be reached.
    pub fn new(workspace_dir: impl Into<PathBuf>) -> Self {
        Self { workspace_dir: workspace_dir.into(), confined_to: None }
    }

    /// A context whose paths must stay inside `roots` (absolute paths).
    pub fn confined(workspace_dir: impl Into<PathBuf>, roots: Vec<PathBuf>) -> Self {
        Self { workspace_dir: workspace_dir.into(), confined_to: Some(roots) }
    }

    /// Checks a path of a request and makes it absolute. `field` is its name in the request.
    pub(crate) fn request_path(&self, field: &str, path: &str) -> Result<RequestPath, ErrorDetail> {
        check_path(field, path)?;
        Ok(self.absolute(Path::new(path)))
    }

    pub(crate) fn absolute(&self, path: &Path) -> RequestPath {
        let os = self.workspace_dir.join(path);
        let shown = os.components().collect();
        RequestPath { os, shown }
    }

    /// Whether `path` (real, without links) is inside a root, or on the way to one.
    pub(crate) fn permits_passing(&self, path: &Path) -> bool {
        self.any_root(|root| path.starts_with(root) || root.starts_with(path))
    }

    /// Whether `path` (real, without links) is inside a root.
    pub(crate) fn permits(&self, path: &Path) -> bool {
        self.any_root(|root| path.starts_with(root))
    }

    fn any_root(&self, test: impl Fn(&Path) -> bool) -> bool {
        let Some(roots) = &self.confined_to else {
            return true;
        };
        // A root may itself be reached through a link (`/tmp` on some images); look only when needed.
        roots.iter().any(|root| test(root))
            || roots.iter().any(|root| root.canonicalize().is_ok_and(|real| test(&real)))
    }

    /// The failure of a path that leads out of the roots.
    pub(crate) fn forbidden(&self, shown: &Path) -> ErrorDetail {
        let roots: Vec<String> =
            self.confined_to.iter().flatten().map(|root| root.display().to_string()).collect();
        ErrorDetail::new(
            ErrorCode::Forbidden,
            format!(
                "{} leads out of {}: file tools are confined to these directories, also through links",
                shown.display(),
                roots.join(" and ")
            ),
        )
    }
}
