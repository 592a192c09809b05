//! Answers as text for a model. Square brackets mark notes that are not output of the tool.

pub(super) mod git;

use emergent_wire::tools::{
    BashAnswer, EditAnswer, GlobAnswer, GrepAnswer, GrepMatch, OUTPUT_DIR, OperationAnswer, ReadAnswer,
    WriteAnswer,
};

/// Output as text. Bytes that are not UTF-8 become replacement characters.
pub(crate) fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// Text that is built from lines and from pieces with or without a line end.
#[derive(Default)]
struct Lines(String);

impl Lines {
    /// Adds output as it is.
    fn piece(&mut self, text: &str) -> &mut Self {
        self.end_line();
        self.0.push_str(text);
        self
    }

    fn line(&mut self, text: impl AsRef<str>) -> &mut Self {
        self.piece(text.as_ref());
        self.end_line();
        self
    }

    fn note(&mut self, text: impl AsRef<str>) -> &mut Self {
        self.line(format!("[{}]", text.as_ref()))
    }

    fn end_line(&mut self) {
        if !self.0.is_empty() && !self.0.ends_with('\n') {
            self.0.push('\n');
        }
    }

    fn into_text(mut self) -> String {
        if self.0.ends_with('\n') {
            self.0.pop();
        }
        self.0
    }
}

pub(super) fn command(answer: &BashAnswer) -> String {
    let mut text = Lines::default();
    text.piece(&answer.stdout);
    if !answer.stderr.is_empty() {
        text.note("stderr").piece(&answer.stderr);
    }
    ending(&mut text, answer.exit_code, answer.signal.as_deref());
    if answer.timed_out {
        text.note(format!("timed out after {} ms", answer.duration_ms));
    }
    if answer.oom_killed {
        text.note("killed: the workspace ran out of memory");
    }
    if answer.truncated {
        for (name, bytes, path) in [
            ("stdout", answer.stdout_bytes, &answer.stdout_path),
            ("stderr", answer.stderr_bytes, &answer.stderr_path),
        ] {
            if let Some(path) = path {
                text.note(format!("{name} was cut: all {bytes} bytes are in {path}"));
            }
        }
        if answer.stdout_path.is_none() && answer.stderr_path.is_none() {
            text.note("output was cut");
        }
    }
    for note in &answer.notes {
        text.note(note);
    }
    text.into_text()
}

fn ending(text: &mut Lines, exit_code: Option<i32>, signal: Option<&str>) {
    match (exit_code, signal) {
        (Some(code), _) => text.note(format!("exit code {code}")),
        (None, Some(signal)) => text.note(format!("ended by {signal}")),
        (None, None) => text.note("did not exit by itself"),
    };
}

pub(super) fn operation(answer: &OperationAnswer) -> String {
    let id = answer.operation_id;
    let mut text = Lines::default();
    text.piece(&answer.stdout);
    if !answer.stderr.is_empty() {
        text.note("stderr").piece(&answer.stderr);
    }
    text.note(format!("in the background as operation {id}; its output goes to {OUTPUT_DIR}/{id}/log"));
    for note in &answer.notes {
        text.note(note);
    }
    text.into_text()
}

pub(super) fn read(answer: &ReadAnswer) -> String {
    let mut text = Lines::default();
    text.piece(&answer.content);
    if answer.is_binary && answer.note.is_none() {
        let kind = answer.media_type.as_deref().unwrap_or("of unknown kind");
        text.note(format!("binary file, {kind}, {} bytes", answer.file_size));
    } else if !answer.is_binary && answer.content.is_empty() {
        text.note(match (answer.is_dir, answer.file_size) {
            (true, _) => "empty directory",
            (false, 0) => "empty file",
            (false, _) => "no lines here",
        });
    }
    match (&answer.note, answer.next_offset) {
        (Some(note), _) => {
            text.note(note);
        }
        (None, Some(offset)) if answer.truncated => {
            text.note(format!("there is more: read on with offset {offset}"));
        }
        _ if answer.truncated => {
            text.note("there is more");
        }
        _ => {}
    }
    text.into_text()
}

pub(super) fn write(answer: &WriteAnswer) -> String {
    let kind = if answer.created { "new file" } else { "replaced" };
    format!("Wrote {} bytes to {} ({kind}).", answer.bytes_written, answer.file_path)
}

pub(super) fn edit(answer: &EditAnswer) -> String {
    let mut text = Lines::default();
    let times = if answer.replacements == 1 { "occurrence" } else { "occurrences" };
    text.line(format!("Replaced {} {times}, matched by {}.", answer.replacements, answer.matched_by));
    text.piece(&answer.diff);
    text.into_text()
}

pub(super) fn glob(answer: &GlobAnswer) -> String {
    let mut text = Lines::default();
    for path in &answer.matches {
        text.line(path);
    }
    if answer.matches.is_empty() {
        text.note("no files match");
    }
    if answer.truncated {
        text.note("there are more: narrow the pattern or raise limit");
    }
    text.into_text()
}

pub(super) fn grep(answer: &GrepAnswer) -> String {
    let mut text = Lines::default();
    for found in &answer.matches {
        matched(&mut text, found);
    }
    if answer.matches.is_empty() {
        text.note("no lines match");
    }
    if answer.truncated {
        text.note("there are more: narrow the search or raise limit");
    }
    for skipped in &answer.skipped {
        text.note(format!("not searched: {skipped}"));
    }
    text.into_text()
}

/// A match in the format of ripgrep: `path:12:line`, and the lines around it with `-`.
fn matched(text: &mut Lines, found: &GrepMatch) {
    let GrepMatch { file_path, line_number, line, before, after } = found;
    let first = line_number.saturating_sub(before.len() as u64);
    for (number, line) in (first..).zip(before) {
        text.line(format!("{file_path}-{number}-{line}"));
    }
    text.line(format!("{file_path}:{line_number}:{line}"));
    for (number, line) in (line_number + 1..).zip(after) {
        text.line(format!("{file_path}-{number}-{line}"));
    }
    if !before.is_empty() || !after.is_empty() {
        text.line("--");
    }
}

#[cfg(test)]
mod tests {
    use emergent_wire::OperationId;

    use super::*;

    fn ran(change: impl FnOnce(&mut BashAnswer)) -> String {
        let mut answer = BashAnswer {
            stdout: "out".to_owned(),
            stderr: String::new(),
            exit_code: Some(0),
            signal: None,
            duration_ms: 120_000,
            truncated: false,
            stdout_bytes: 3,
            stderr_bytes: 0,
            timed_out: false,
            oom_killed: false,
            stdout_path: None,
            stderr_path: None,
            notes: Vec::new(),
            operation_id: OperationId::generate(),
        };
        change(&mut answer);
        command(&answer)
    }

    #[test]
    fn the_text_of_a_command_has_its_ending() {
        assert_eq!(ran(|_| {}), "out\n[exit code 0]");
        assert_eq!(ran(|answer| answer.stdout.clear()), "[exit code 0]");
        let both = ran(|answer| {
            answer.stderr = "oops\n".to_owned();
            answer.exit_code = Some(1);
        });
        assert_eq!(both, "out\n[stderr]\noops\n[exit code 1]");
        let timed_out = ran(|answer| {
            (answer.exit_code, answer.signal) = (None, Some("SIGTERM".to_owned()));
            answer.timed_out = true;
        });
        assert_eq!(timed_out, "out\n[ended by SIGTERM]\n[timed out after 120000 ms]");
        let killed = ran(|answer| {
            (answer.exit_code, answer.oom_killed) = (Some(137), true);
            answer.notes.push("raise the limit".to_owned());
        });
        assert_eq!(
            killed,
            "out\n[exit code 137]\n[killed: the workspace ran out of memory]\n[raise the limit]"
        );
    }

    #[test]
    fn the_text_of_truncated_output_names_the_file_of_the_rest() {
        let cut = ran(|answer| {
            (answer.truncated, answer.stdout_bytes) = (true, 99_999);
            answer.stdout_path = Some("/workspace/.emergent/output/1/stdout".to_owned());
        });
        let note = "[stdout was cut: all 99999 bytes are in /workspace/.emergent/output/1/stdout]";
        assert_eq!(cut, format!("out\n[exit code 0]\n{note}"));
        assert_eq!(ran(|answer| answer.truncated = true), "out\n[exit code 0]\n[output was cut]");
    }

    #[test]
    fn files_are_shown_or_described() {
        let shown = |answer: ReadAnswer| read(&answer);
        let default = ReadAnswer::default;
        assert_eq!(shown(ReadAnswer { content: "1: a\n2: b\n".into(), ..default() }), "1: a\n2: b");
        assert_eq!(shown(default()), "[empty file]");
        assert_eq!(shown(ReadAnswer { is_dir: true, ..default() }), "[empty directory]");
        let more = ReadAnswer { content: "1: a".into(), truncated: true, next_offset: Some(2), ..default() };
        assert_eq!(shown(more.clone()), "1: a\n[there is more: read on with offset 2]");
        assert_eq!(shown(ReadAnswer { note: Some("go on".into()), ..more }), "1: a\n[go on]");
        let binary = ReadAnswer { is_binary: true, file_size: 9, ..default() };
        assert_eq!(shown(binary.clone()), "[binary file, of unknown kind, 9 bytes]");
        assert_eq!(shown(ReadAnswer { note: Some("A binary file".into()), ..binary }), "[A binary file]");
    }

    #[test]
    fn matches_are_shown_as_ripgrep_does() {
        let found = GrepMatch {
            file_path: "/workspace/a".to_owned(),
            line_number: 3,
            line: "here".to_owned(),
            before: vec!["one".to_owned(), "two".to_owned()],
            after: vec!["four".to_owned()],
        };
        let plain = GrepMatch { before: Vec::new(), after: Vec::new(), ..found.clone() };
        let answer = GrepAnswer {
            matches: vec![found, plain],
            truncated: true,
            skipped: vec!["/workspace/b: gone".into()],
        };
        let expected = "/workspace/a-1-one\n/workspace/a-2-two\n/workspace/a:3:here\n/workspace/a-4-four\n--\n\
                        /workspace/a:3:here\n[there are more: narrow the search or raise limit]\n\
                        [not searched: /workspace/b: gone]";
        assert_eq!(grep(&answer), expected);
        assert_eq!(grep(&GrepAnswer::default()), "[no lines match]");
        assert_eq!(glob(&GlobAnswer::default()), "[no files match]");
    }
}
