//! The terminal output of client commands.
//!
//! Results go to stdout. Progress, notes, warnings and errors go to stderr, so that a pipe gets results only. When the reader of
//! stdout closes it, the command ends without a message: that is [`StdoutClosed`].

use std::fmt::{self, Display};
use std::io::{self, IsTerminal, Write};

use anyhow::{Context as _, Result};
use emergent_wire::unreadable::UnreadableRow;

/// The reader of stdout has closed it.
#[derive(Debug)]
pub(crate) struct StdoutClosed;

impl Display for StdoutClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of stdout has closed it")
    }
}

impl std::error::Error for StdoutClosed {}

/// Maps the error of a closed pipe to [`StdoutClosed`].
fn map_broken_pipe(result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        result => result.context("can't write to stdout"),
    }
}

/// Writes a line to stdout.
pub(crate) fn line(text: impl Display) -> Result<()> {
    map_broken_pipe(writeln!(io::stdout().lock(), "{text}"))
}

/// Writes a text to stdout, and a newline unless it ends with one. An empty text writes nothing.
pub(crate) fn text(text: &str) -> Result<()> {
    match text {
        "" => Ok(()),
        text if text.ends_with('\n') => bytes(text.as_bytes()),
        text => line(text),
    }
}

/// Writes bytes to stdout and flushes.
pub(crate) fn bytes(bytes: &[u8]) -> Result<()> {
    let mut stdout = io::stdout().lock();
    map_broken_pipe(stdout.write_all(bytes).and_then(|()| stdout.flush()))
}

/// Writes a line to stderr. Errors are ignored.
pub(crate) fn note(text: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Reports the damaged rows of a list on stderr, because its table has no place for them.
pub(crate) fn report_damaged_rows(rows: &[UnreadableRow]) {
    rows.iter().for_each(|row| note(format_args!("a row can't be shown: {}", one_line(&row.error))));
}

/// Writes bytes to stderr and flushes. Errors are ignored.
pub(crate) fn error_bytes(bytes: &[u8]) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(bytes).and_then(|()| stderr.flush());
}

/// Whether stdout is a terminal.
pub(crate) fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Whether stderr is a terminal.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// A table of text. Each column is as wide as its widest cell.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    /// Whether the first row is a header. A header without rows is not printed.
    has_head: bool,
}

impl Table {
    /// A table with a header.
    pub(crate) fn with_head<const N: usize>(head: [&str; N]) -> Self {
        Self { rows: vec![head.iter().map(|cell| (*cell).to_owned()).collect()], has_head: true }
    }

    /// Adds a row.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.map(|cell| one_line(&cell)).into());
    }

    /// Adds a row of a name and its value, if there is a value.
    pub(crate) fn field(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.row([name.to_owned(), value.to_string()]);
        }
    }

    /// The table as text. A table without rows is empty.
    pub(crate) fn render(&self) -> String {
        if self.has_head && self.rows.len() == 1 {
            return String::new();
        }
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:<width$}  "));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    /// Writes it to stdout.
    pub(crate) fn print(&self) -> Result<()> {
        bytes(self.render().as_bytes())
    }
}

/// The text on one line, with control characters replaced, because they could control the terminal.
pub(crate) fn one_line(text: &str) -> String {
    if !text.contains(char::is_control) {
        return text.to_owned();
    }
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// The text with control characters replaced, except for newlines and tabs. Text of a sandbox could control the terminal.
pub(crate) fn printable(text: &str) -> String {
    let harmless = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().map(|c| if harmless(c) { c } else { '\u{fffd}' }).collect()
}

/// At most `most` characters of the text.
pub(crate) fn shorten(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let kept: String = text.chars().take(most.saturating_sub(1)).collect();
    format!("{kept}…")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::with_head(["ID", "STATUS", "WHY"]);
        table.row(["1".into(), "ready".into(), "ünï".into()]);
        table.row(["long-id".into(), "x".into(), String::new()]);
        assert_eq!(table.render(), "ID       STATUS  WHY\n1        ready   ünï\nlong-id  x\n");
    }

    #[test]
    fn table_without_rows_renders_to_nothing() {
        assert_eq!(Table::with_head(["ID"]).render(), "");
        assert_eq!(Table::default().render(), "");
        let mut fields = Table::default();
        fields.field("id", Some(7));
        fields.field("branch", None::<String>);
        assert_eq!(fields.render(), "id  7\n");
    }

    #[test]
    fn control_characters_are_replaced() {
        let mut table = Table::default();
        table.row(["a\nb\t c\u{1b}[31m".into(), "x".into()]);
        assert_eq!(table.render(), "a b c\u{fffd}[31m  x\n");
        assert_eq!(printable("a\n\tb\u{1b}[31m\r"), "a\n\tb\u{fffd}[31m\u{fffd}");
        assert_eq!(shorten("abcdef", 4), "abc…");
        assert_eq!(shorten("abcd", 4), "abcd");
    }
}
