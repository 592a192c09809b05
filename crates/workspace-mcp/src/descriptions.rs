//! What a model is told: of the workspace as a whole, and of each tool. Facts that a schema can't say.

use emergent_wire::tools::Tool;

/// What the server says of itself.
pub(crate) const INSTRUCTIONS: &str = "\
These tools work in one workspace: an isolated Linux machine with a disk of its own. Files live under /workspace, where \
relative paths start and where they stay from call to call; commands can change everything there and nothing outside. \
Use read, write, edit, glob and grep for files, git for repositories, and bash for all else: building, testing, \
installing, running programs. Output and answers are bounded; whatever was cut says so and says how to get the rest.";

/// A short name for people.
pub(crate) fn title(tool: Tool) -> &'static str {
    match tool {
        Tool::Bash => "Run a command",
        Tool::Read => "Read a file",
        Tool::Write => "Write a file",
        Tool::Edit => "Edit a file",
        Tool::Glob => "Find files by name",
        Tool::Grep => "Search in files",
        Tool::Git => "Use git",
    }
}

/// How to use a tool.
pub(crate) fn description(tool: Tool) -> &'static str {
    match tool {
        Tool::Bash => BASH,
        Tool::Read => READ,
        Tool::Write => WRITE,
        Tool::Edit => EDIT,
        Tool::Glob => GLOB,
        Tool::Grep => GREP,
        Tool::Git => GIT,
    }
}

const BASH: &str = "\
Run a command with bash and wait for its end: to build, test, install, run programs. To look at, find or change files \
use read, glob, grep, edit and write instead of cat, find, grep, sed and heredocs: they need no quoting and their \
answers are bounded. Use git for what it offers.

- It runs in /workspace unless `workdir` says otherwise. Every call is a new shell: files stay, but directory changes, \
variables and functions do not. Join what belongs together with &&.
- Standard input is empty, so nothing can be asked or typed: pass flags such as -y.
- After 120 s, or `timeout_ms` (at most 600000), the command and all it has started are ended, and `timed_out` is set.
- An exit code other than 0 is an answer, not a failure of the tool: look at `exit_code`.
- Of each stream up to 50 KiB are shown. Of more you get the beginning and the end (`truncated`), and all of it is in \
the files `stdout_path` and `stderr_path`: read or grep these rather than run the command again.
- For servers and long jobs set `background`: you get an `operation_id` at once and the command goes on. Its output \
grows in /workspace/.emergent/output/<operation_id>/log; state.json beside it says whether it still runs and how it \
ended. End it with kill or pkill.";

const READ: &str = "\
Read a text file as numbered lines (`12: text`), or list a directory (entries one a line, `/` after directories). \
Prefer it to cat, head, tail, sed and ls.

- Paths are absolute, or relative to /workspace.
- Up to 2000 lines or 50 KiB are shown at once, and 2000 characters of a line. When `truncated`, read on with `offset` \
set to `next_offset`; with `offset` and `limit` read just the part you need, for instance around a line that grep found.
- The numbers are not part of the file: leave them out of `old_string` of edit.
- `sha256` is the file's version: pass it as `expected_sha256` to edit to be sure that nobody changed it meanwhile.
- A binary file is named by kind and size instead of shown. With `raw` you get the exact bytes of any file up to 4 MiB \
in base64, and a picture (PNG, JPEG, GIF, WebP) to look at.";

const WRITE: &str = "\
Write a whole file: a new one, or in place of the old content, which is lost. Missing directories are made. To change \
a part of a file use edit, which sends less and can't lose the rest.

- Paths are absolute, or relative to /workspace.
- The file holds exactly `content`: end text with a line end yourself.
- For bytes that are not text set `encoding` to base64.
- The whole call may have 5 MiB; make larger files with bash.";

const EDIT: &str = "\
Replace a piece of text in a file; all other bytes stay as they are. Prefer it to write and to sed for changes.

- `old_string` must be in the file exactly once: copy it as read shows it, without the line numbers, with enough lines \
around to make it unique. If it occurs more often the edit is refused (multiple_matches); give more context, or set \
`replace_all` to change every occurrence.
- When it is not there exactly, differences in white space and the like are forgiven as long as one single place is \
meant; `matched_by` and `diff` show what was found and changed. Else it fails (old_string_not_found): read again.
- An empty `old_string` makes a new file out of `new_string`.
- With `expected_sha256` (from read) the edit is refused if the file was changed meanwhile (stale_file).
- Paths are absolute, or relative to /workspace.";

const GLOB: &str = "\
Find files by name, the newest first. Prefer it to find and ls -R.

- `**/*.ts`, `src/{a,b}/*.rs`: a pattern with / is matched against the path from `path` on (/workspace unless given), \
one without / against names at any depth.
- Hidden files are found; what .gitignore, .ignore or .rgignore leave out is not, unless `pattern` or `path` names \
its directory.
- 100 absolute paths unless `limit` says otherwise (at most 10000). When `truncated` there are more: narrow the pattern.";

const GREP: &str = "\
Search the contents of files with a regular expression (ripgrep's engine and syntax: no look-around, no \
back-references). Prefer it to grep and rg in bash.

- `path` is a file or directory, /workspace unless given; `include` takes only files that match a glob (`*.rs`).
- Lines come sorted by path and line number, with `context` lines around each if you ask. To look closer, read the file \
with that number as `offset`.
- Hidden files are searched; what .gitignore, .ignore or .rgignore leave out and binary files are not.
- 100 matching lines unless `limit` says otherwise (at most 10000). When `truncated` there are more: narrow the search. \
`skipped` names files that could not be searched.";

const GIT: &str = "\
Work with a git repository and get structured answers: clone, status, diff, log, commit, push, pull, checkout, branch. \
For anything else (merge, rebase, stash, tag, …) run git with bash.

- `path` is the repository, /workspace unless given; for clone it is where to put it. Each field says which actions \
take it; an action refuses fields that are not its own.
- commit takes all changes, new files too, unless `files` says which; it needs a `message`.
- diff shows what is not staged, or what is (`staged`), or the difference to `base`; the patch is cut at 50 KiB \
(`truncated`): ask for single `files` then.
- branch lists; with `create` or `delete` it changes `branch`. checkout switches to `branch`, with `create` a new one.
- A refusal of git is the error git_failed with git's own words.";
