//! Renders git answers in git's own short formats.

use emergent_wire::git::{GitAction, GitAnswer, GitBranch, GitCommit, GitFileStatus, GitStatus};

/// The length of a shortened commit hash.
const SHORT_HASH: usize = 10;

/// The answer as text.
pub(super) fn render(action: GitAction, answer: &GitAnswer) -> String {
    let mut text = answer.output.clone().unwrap_or_default();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(answer.diff.as_deref().unwrap_or_default());
    for commit in answer.commits.iter().flatten() {
        text.push_str(&commit_line(commit));
    }
    for branch in answer.branches.iter().flatten() {
        text.push_str(&branch_line(branch));
    }
    // After a commit, the status is printed only if changes are left.
    let show_status = |status: &&GitStatus| action != GitAction::Commit || !status.clean;
    if let Some(status) = answer.status.as_ref().filter(show_status) {
        text.push_str(&status_text(status));
    }
    text
}

/// The output of `git status --short --branch`.
fn status_text(status: &GitStatus) -> String {
    let short = |commit: &Option<String>| commit.as_deref().map_or_else(String::new, short_hash);
    let mut head = match (&status.branch, &status.commit) {
        (Some(branch), None) => format!("## No commits yet on {branch}"),
        (Some(branch), Some(_)) => format!("## {branch}"),
        (None, _) => format!("## HEAD (no branch) {}", short(&status.commit)).trim_end().to_owned(),
    };
    if let Some(upstream) = &status.upstream {
        head.push_str(&format!("...{upstream}"));
    }
    match (status.ahead, status.behind) {
        (0, 0) => {}
        (ahead, 0) => head.push_str(&format!(" [ahead {ahead}]")),
        (0, behind) => head.push_str(&format!(" [behind {behind}]")),
        (ahead, behind) => head.push_str(&format!(" [ahead {ahead}, behind {behind}]")),
    }
    head.push('\n');
    for file in &status.files {
        let from = file.original_path.as_ref().map(|path| format!("{path} -> ")).unwrap_or_default();
        head.push_str(&format!("{} {from}{}\n", letters(file), file.path));
    }
    head
}

/// The two columns of a short status: the index and the work tree.
fn letters(file: &GitFileStatus) -> String {
    let letter = match file.status.as_str() {
        "added" => 'A',
        "modified" => 'M',
        "deleted" => 'D',
        "renamed" => 'R',
        "copied" => 'C',
        "type_changed" => 'T',
        "untracked" => return "??".to_owned(),
        "conflicted" => return "UU".to_owned(),
        _ => '?',
    };
    if file.staged { format!("{letter} ") } else { format!(" {letter}") }
}

fn commit_line(commit: &GitCommit) -> String {
    let date = commit.date.get(..10).unwrap_or(&commit.date);
    format!("{} {date} {}  {}\n", short_hash(&commit.commit), commit.author_name, commit.subject)
}

fn branch_line(branch: &GitBranch) -> String {
    let mark = if branch.current { '*' } else { ' ' };
    let upstream = branch.upstream.as_ref().map(|upstream| format!(" [{upstream}]")).unwrap_or_default();
    format!("{mark} {} {}{upstream}\n", branch.name, short_hash(&branch.commit))
}

fn short_hash(hash: &str) -> String {
    hash.chars().take(SHORT_HASH).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, status: &str, staged: bool) -> GitFileStatus {
        GitFileStatus { path: path.into(), status: status.into(), staged, original_path: None }
    }

    #[test]
    fn status_renders_like_git_status_short() {
        let renamed = GitFileStatus { original_path: Some("old".into()), ..file("new", "renamed", true) };
        let status = GitStatus {
            branch: Some("main".into()),
            commit: Some("0123456789abcdef".into()),
            upstream: Some("origin/main".into()),
            ahead: 1,
            behind: 2,
            clean: false,
            files: vec![
                file("a", "modified", false),
                renamed,
                file("c d", "untracked", false),
                file("e", "conflicted", false),
            ],
        };
        let answer = GitAnswer { status: Some(status), ..GitAnswer::default() };
        assert_eq!(
            render(GitAction::Status, &answer),
            "## main...origin/main [ahead 1, behind 2]\n M a\nR  old -> new\n?? c d\nUU e\n"
        );
        let new = GitStatus { branch: Some("main".into()), clean: true, ..GitStatus::default() };
        assert_eq!(status_text(&new), "## No commits yet on main\n");
        let detached = GitStatus { commit: Some("0123456789abcdef".into()), ..GitStatus::default() };
        assert_eq!(status_text(&detached), "## HEAD (no branch) 0123456789\n");
    }

    #[test]
    fn commits_and_branches_render_on_one_line_each() {
        let commit = GitCommit {
            commit: "0123456789abcdef".into(),
            author_name: "Agent".into(),
            date: "2025-06-01T12:00:00Z".into(),
            subject: "Say hello".into(),
            ..GitCommit::default()
        };
        let status = GitStatus { clean: true, ..GitStatus::default() };
        let answer = GitAnswer { commits: Some(vec![commit]), status: Some(status), ..GitAnswer::default() };
        assert_eq!(render(GitAction::Commit, &answer), "0123456789 2025-06-01 Agent  Say hello\n");
        let branch = GitBranch {
            name: "main".into(),
            commit: "0123456789abcdef".into(),
            current: true,
            upstream: None,
        };
        let answer = GitAnswer { branches: Some(vec![branch]), ..GitAnswer::default() };
        assert_eq!(render(GitAction::Branch, &answer), "* main 0123456789\n");
        let answer =
            GitAnswer { diff: Some("--- a\n".into()), output: Some("done".into()), ..GitAnswer::default() };
        assert_eq!(render(GitAction::Diff, &answer), "done\n--- a\n");
    }
}
