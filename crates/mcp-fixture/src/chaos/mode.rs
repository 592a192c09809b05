//! The modes of the server.

use std::time::Duration;

/// The fault of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// None.
    Normal,
    /// It keeps running after the end of its input.
    IgnoreEof,
    /// It keeps running after the end of its input and after SIGTERM.
    IgnoreTerm,
    /// On `initialize` it writes "boom" to standard error and exits with status 3.
    DieInInitialize,
    /// It answers `initialize` with an error.
    RefuseInitialize,
    /// Its answer to `initialize` has this many bytes more than it needs.
    LongInitialize(usize),
    /// It never answers.
    Silent,
    /// It answers only `initialize`.
    SilentAfterInit,
    /// It exits with status 1 this long after its start.
    ExitAfter(Duration),
    /// After `initialize` it sends valid notifications without end.
    FloodStdout,
    /// After `initialize` it writes to standard error without end.
    FloodStderr,
    /// After `initialize` it writes lines that are not JSON without end.
    FloodJunk,
    /// After `initialize` it writes half a line. Its next output starts on a new line.
    HalfLine,
    /// It has a tool `long`, whose answer is a line of this many bytes without the line end.
    LongLine(usize),
    /// It answers every `tools/call` twice.
    Twice,
    /// Before every answer it sends two answers with ids that no request has: a number and a text.
    Stranger,
    /// Before every answer it writes a line that is not JSON, an empty line, and an empty line that ends with CRLF.
    Junk,
    /// It waits this long before it reads its input.
    SlowStart(Duration),
}

const USAGE: &str = "usage: mcp-chaos [normal|ignore-eof|ignore-term|die-in-initialize|refuse-initialize|\
    long-initialize BYTES|silent|silent-after-init|exit-after MS|flood-stdout|flood-stderr|flood-junk|half-line|long-line BYTES|twice|stranger|junk|slow-start MS]";

impl Mode {
    /// Reads the command line.
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, String> {
        let mode = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [] | ["normal"] => Self::Normal,
            ["ignore-eof"] => Self::IgnoreEof,
            ["ignore-term"] => Self::IgnoreTerm,
            ["die-in-initialize"] => Self::DieInInitialize,
            ["refuse-initialize"] => Self::RefuseInitialize,
            ["long-initialize", number] => {
                Self::LongInitialize(number.parse().map_err(|_| not_a_number(number))?)
            }
            ["silent"] => Self::Silent,
            ["silent-after-init"] => Self::SilentAfterInit,
            ["exit-after", number] => Self::ExitAfter(milliseconds(number)?),
            ["flood-stdout"] => Self::FloodStdout,
            ["flood-stderr"] => Self::FloodStderr,
            ["flood-junk"] => Self::FloodJunk,
            ["half-line"] => Self::HalfLine,
            ["long-line", number] => Self::LongLine(number.parse().map_err(|_| not_a_number(number))?),
            ["twice"] => Self::Twice,
            ["stranger"] => Self::Stranger,
            ["junk"] => Self::Junk,
            ["slow-start", number] => Self::SlowStart(milliseconds(number)?),
            _ => return Err(USAGE.to_owned()),
        };
        Ok(mode)
    }
}

fn milliseconds(number: &str) -> Result<Duration, String> {
    number.parse().map(Duration::from_millis).map_err(|_| not_a_number(number))
}

fn not_a_number(text: &str) -> String {
    format!("{text}: not a number; {USAGE}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Mode, String> {
        Mode::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn modes_are_parsed_and_wrong_arguments_are_refused() {
        assert_eq!(parse(""), Ok(Mode::Normal));
        assert_eq!(parse("ignore-term"), Ok(Mode::IgnoreTerm));
        assert_eq!(parse("exit-after 200"), Ok(Mode::ExitAfter(Duration::from_millis(200))));
        assert_eq!(parse("long-line 70000"), Ok(Mode::LongLine(70_000)));
        for wrong in ["exit-after", "exit-after soon", "twice 2", "polite"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
