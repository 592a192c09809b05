//! Answers of git as text.

use std::fmt::Write as _;

use emergent_wire::git::{GitAnswer, GitStatus};

use super::Lines;

/// The text of an answer.
pub(in crate::tools) fn answer(answer: &GitAnswer) -> String {
    let mut text = Lines::default();
    if let Some(output) = &answer.output {
        text.piece(output.trim_end());
    }
    for commit in answer.commits.iter().flatten() {
        let short = commit.commit.get(..12).unwrap_or(&commit.commit);
        text.line(format!("{short} {} {}: {}", commit.date, commit.author_name, commit.subject));
    }
    for branch in answer.branches.iter().flatten() {
        let current = if branch.current { "*" } else { " " };
        let upstream = branch.upstream.as_deref().map(|name| format!(" -> {name}")).unwrap_or_default();
        let short = branch.commit.get(..12).unwrap_or(&branch.commit);
        text.line(format!("{current} {} {short}{upstream}", branch.name));
    }
    for file in answer.files.iter().flatten() {
        match (file.additions, file.deletions) {
            (Some(added), Some(removed)) => text.note(format!("{} +{added} -{removed}", file.path)),
            _ => text.note(format!("{} binary", file.path)),
        };
    }
    if let Some(diff) = &answer.diff {
        text.piece(diff);
    }
    if answer.truncated {
        text.note("the patch was cut: ask for single files");
    }
    if let Some(status) = &answer.status {
        text.piece(&work_tree(status));
    }
    if text.0.is_empty() {
        let lists = answer.files.is_some() || answer.diff.is_some() || answer.commits.is_some();
        text.note(if lists { "nothing" } else { "done" });
    }
    text.into_text()
}

fn work_tree(status: &GitStatus) -> String {
    let mut text = Lines::default();
    let at = match (&status.branch, &status.commit) {
        (Some(branch), _) => format!("on branch {branch}"),
        (None, Some(commit)) => format!("detached at {}", commit.get(..12).unwrap_or(commit)),
        (None, None) => "on no branch".to_owned(),
    };
    let mut line = at;
    if status.commit.is_none() {
        line.push_str(", no commits yet");
    }
    if let Some(upstream) = &status.upstream {
        let _ = write!(line, ", {} ahead and {} behind {upstream}", status.ahead, status.behind);
    }
    if status.clean {
        line.push_str(", nothing changed");
    }
    text.note(line);
    for file in &status.files {
        let staged = if file.staged { " (staged)" } else { "" };
        let from = file.original_path.as_deref().map(|path| format!(" from {path}")).unwrap_or_default();
        text.line(format!("{} {}{from}{staged}", file.status, file.path));
    }
    text.into_text()
}

#[cfg(test)]
mod tests {
    use emergent_wire::git::{GitBranch, GitCommit, GitDiffFile, GitFileStatus};

    use super::*;

    #[test]
    fn a_work_tree_is_described() {
        let status = GitStatus {
            branch: Some("main".to_owned()),
            commit: Some("0123456789abcdef".to_owned()),
            upstream: Some("origin/main".to_owned()),
            ahead: 2,
            files: vec![GitFileStatus {
                path: "b".to_owned(),
                status: "renamed".to_owned(),
                staged: true,
                original_path: Some("a".to_owned()),
            }],
            ..GitStatus::default()
        };
        let text = answer(&GitAnswer { status: Some(status.clone()), ..GitAnswer::default() });
        assert_eq!(text, "[on branch main, 2 ahead and 0 behind origin/main]\nrenamed b from a (staged)");
        let detached = GitStatus { branch: None, upstream: None, files: vec![], clean: true, ..status };
        let text = answer(&GitAnswer { status: Some(detached), ..GitAnswer::default() });
        assert_eq!(text, "[detached at 0123456789ab, nothing changed]");
    }

    #[test]
    fn every_action_has_a_text() {
        let commit = GitCommit {
            commit: "0123456789abcdef".to_owned(),
            author_name: "Ada".to_owned(),
            date: "2026-01-02T03:04:05Z".to_owned(),
            subject: "Begin".to_owned(),
            ..GitCommit::default()
        };
        let branch = GitBranch {
            name: "main".to_owned(),
            commit: "0123456789abcdef".to_owned(),
            current: true,
            upstream: Some("origin/main".to_owned()),
        };
        let file = GitDiffFile { path: "a".to_owned(), additions: Some(1), deletions: Some(2) };
        let none = GitAnswer::default;
        for (given, expected) in [
            (
                GitAnswer { commits: Some(vec![commit]), ..none() },
                "0123456789ab 2026-01-02T03:04:05Z Ada: Begin",
            ),
            (GitAnswer { branches: Some(vec![branch]), ..none() }, "* main 0123456789ab -> origin/main"),
            (
                GitAnswer { files: Some(vec![file]), diff: Some("@@\n".into()), truncated: true, ..none() },
                "[a +1 -2]\n@@\n[the patch was cut: ask for single files]",
            ),
            (GitAnswer { output: Some("pushed\n".into()), ..none() }, "pushed"),
            (GitAnswer { diff: Some(String::new()), files: Some(vec![]), ..none() }, "[nothing]"),
            (none(), "[done]"),
        ] {
            assert_eq!(answer(&given), expected);
        }
    }
}
