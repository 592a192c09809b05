//! Parses the machine-readable output of git. Pure functions.

use emergent_wire::git::{GitBranch, GitCommit, GitDiffFile, GitFileStatus, GitStatus};

/// The limit of changed paths in an answer.
const MAX_FILES: usize = 1000;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `git status --porcelain=v2 --branch -z`.
pub(super) fn status(output: &[u8]) -> GitStatus {
    let mut status = GitStatus { clean: true, ..GitStatus::default() };
    let mut records = output.split(|byte| *byte == 0).filter(|record| !record.is_empty());
    while let Some(record) = records.next() {
        let line = text(record);
        if let Some(header) = line.strip_prefix("# ") {
            branch_header(&mut status, header);
            continue;
        }
        status.clean = false;
        let original = line.starts_with("2 ").then(|| records.next().map(text)).flatten();
        if status.files.len() < MAX_FILES {
            status.files.extend(changes(&line, original.as_deref()));
        }
    }
    status
}

fn branch_header(status: &mut GitStatus, header: &str) {
    let (name, value) = header.split_once(' ').unwrap_or((header, ""));
    let given = |absent: &str| (value != absent).then(|| value.to_owned());
    match name {
        "branch.oid" => status.commit = given("(initial)"),
        "branch.head" => status.branch = given("(detached)"),
        "branch.upstream" => status.upstream = Some(value.to_owned()),
        "branch.ab" => {
            let mut counts =
                value.split(' ').map(|count| count.trim_start_matches(['+', '-']).parse().unwrap_or(0));
            status.ahead = counts.next().unwrap_or(0);
            status.behind = counts.next().unwrap_or(0);
        }
        _ => {}
    }
}

/// One record: a path may be changed in the index and, again, in the work tree.
fn changes(line: &str, original: Option<&str>) -> Vec<GitFileStatus> {
    let Some((kind, rest)) = line.split_at_checked(1) else { return Vec::new() };
    let rest = rest.trim_start();
    let path_after = |fields: usize| rest.splitn(fields + 1, ' ').nth(fields).unwrap_or_default().to_owned();
    let plain = |status: &str, path: String| GitFileStatus {
        path,
        status: status.to_owned(),
        staged: false,
        original_path: None,
    };
    match kind {
        "?" => vec![plain("untracked", rest.to_owned())],
        "u" => vec![plain("conflicted", path_after(9))],
        "1" | "2" => {
            let path = path_after(if kind == "1" { 7 } else { 8 });
            let letters: Vec<char> = rest.chars().take(2).collect();
            letters
                .iter()
                .zip([true, false])
                .filter_map(|(letter, staged)| {
                    Some(GitFileStatus {
                        path: path.clone(),
                        status: word(*letter)?.to_owned(),
                        staged,
                        original_path: original.filter(|_| matches!(letter, 'R' | 'C')).map(str::to_owned),
                    })
                })
                .collect()
        }
        _ => Vec::new(),
    }
}

fn word(letter: char) -> Option<&'static str> {
    Some(match letter {
        'M' => "modified",
        'A' => "added",
        'D' => "deleted",
        'R' => "renamed",
        'C' => "copied",
        'T' => "type_changed",
        _ => return None,
    })
}

/// `git diff --numstat -z`.
pub(super) fn numstat(output: &[u8]) -> Vec<GitDiffFile> {
    let mut records = output.split(|byte| *byte == 0).filter(|record| !record.is_empty());
    let mut files = Vec::new();
    while let Some(record) = records.next() {
        let line = text(record);
        let mut fields = line.splitn(3, '\t');
        let (added, removed, path) = (fields.next(), fields.next(), fields.next());
        let path = match path {
            // A rename: the old and the new path follow as two records.
            Some("") => {
                records.next();
                records.next().map(text).unwrap_or_default()
            }
            Some(path) => path.to_owned(),
            None => continue,
        };
        let count = |field: Option<&str>| field.and_then(|count| count.parse().ok());
        if files.len() < MAX_FILES {
            files.push(GitDiffFile { path, additions: count(added), deletions: count(removed) });
        }
    }
    files
}

/// `git log` in our format.
pub(super) fn log(output: &[u8]) -> Vec<GitCommit> {
    text(output)
        .split('\x1e')
        .filter_map(|record| {
            let mut fields = record.trim_start_matches('\n').split('\x1f').map(str::to_owned);
            Some(GitCommit {
                commit: fields.next().filter(|commit| !commit.is_empty())?,
                author_name: fields.next()?,
                author_email: fields.next()?,
                date: fields.next()?,
                subject: fields.next()?,
                body: fields.next()?.trim_end().to_owned(),
            })
        })
        .collect()
}

/// `git branch` in our format.
pub(super) fn branches(output: &[u8]) -> Vec<GitBranch> {
    text(output)
        .lines()
        .filter_map(|line| {
            let mut fields = line.split('\x1f');
            let (name, commit, head, upstream) =
                (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
            // A detached HEAD is listed in parentheses; it is no branch.
            (!name.starts_with('(')).then(|| GitBranch {
                name: name.to_owned(),
                commit: commit.to_owned(),
                current: head == "*",
                upstream: (!upstream.is_empty()).then(|| upstream.to_owned()),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn status_names_every_kind_of_change() {
        let output =
            b"# branch.oid abc\0# branch.head main\0# branch.upstream origin/main\0# branch.ab +2 -1\0\
            1 .M N... 100644 100644 100644 aaa bbb a file.txt\0\
            1 MM N... 100644 100644 100644 aaa bbb both\0\
            2 R. N... 100644 100644 100644 aaa bbb R100 new name\0old name\0\
            u UU N... 100644 100644 100644 100644 a b c conflict\0\
            ? new\0";
        let status = status(output);
        assert_eq!((status.ahead, status.behind, status.clean), (2, 1, false));
        assert_eq!(status.branch.as_deref(), Some("main"));
        let seen: Vec<_> =
            status.files.iter().map(|file| (file.path.as_str(), file.status.as_str(), file.staged)).collect();
        assert_eq!(
            seen,
            [
                ("a file.txt", "modified", false),
                ("both", "modified", true),
                ("both", "modified", false),
                ("new name", "renamed", true),
                ("conflict", "conflicted", false),
                ("new", "untracked", false),
            ]
        );
        assert_eq!(status.files[3].original_path.as_deref(), Some("old name"));
    }

    #[test]
    fn a_new_repository_has_no_commit() {
        let status = status(b"# branch.oid (initial)\0# branch.head main\0");
        assert_eq!((status.commit, status.clean), (None, true));
    }

    #[test]
    fn counts_of_a_diff() {
        let files = numstat(b"3\t1\ta\0-\t-\timage.png\x000\t0\t\0old\0new\0");
        assert_eq!(files.len(), 3);
        assert_eq!((files[0].additions, files[1].additions), (Some(3), None));
        assert_eq!(files[2].path, "new");
    }

    proptest! {
        #[test]
        fn any_output_gives_an_answer(output in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = (status(&output), numstat(&output), log(&output), branches(&output));
        }
    }
}
