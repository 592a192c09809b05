//! Parsers and formatters of values on the command line: durations, timestamps, variables, resource limits, shell words.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use chrono::{DateTime, SecondsFormat, Utc};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use emergent_wire::workspace::RequestedLimits;
use emergent_wire::{ByteSize, CpuCount};

/// Parses a duration: `90` and `90s` are seconds; the other units are `500ms`, `5m`, `2h` and `7d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ms: u64 = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => {
            return Err(
                "write a number of seconds, or a number with a unit: 500ms, 90s, 5m, 2h, 7d".to_owned()
            );
        }
    };
    let number: u64 = number.parse().map_err(|_| format!("'{text}' does not start with a number"))?;
    number.checked_mul(unit_ms).map(Duration::from_millis).ok_or_else(|| format!("'{text}' is too long"))
}

/// A duration in whole milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Parses a timestamp: RFC 3339, or a duration before now such as `2h`.
pub(crate) fn parse_timestamp(text: &str) -> Result<String, String> {
    let at = match text.parse::<DateTime<Utc>>() {
        Ok(at) => at,
        Err(_) => {
            let ago = duration(text).map_err(
                |_| "write a timestamp such as 2025-06-01T12:00:00Z, or a duration ago: 30m, 2h, 7d",
            )?;
            let ago = chrono::Duration::from_std(ago).map_err(|error| error.to_string())?;
            Utc::now().checked_sub_signed(ago).ok_or("the duration is too long")?
        }
    };
    Ok(at.to_rfc3339_opts(SecondsFormat::Millis, true))
}

/// The time since a timestamp, in the largest unit in which it is at least two.
pub(crate) fn age(since: DateTime<Utc>, now: DateTime<Utc>) -> String {
    format_seconds((now - since).num_seconds())
}

/// A number of seconds, in the largest unit in which it is at least two.
fn format_seconds(seconds: i64) -> String {
    match seconds.max(0) {
        s @ 0..=119 => format!("{s}s"),
        s @ 120..=7199 => format!("{}m", s / 60),
        s @ 7200..=172_799 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}

/// A number of bytes, in the largest unit in which it is at least one.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        b @ 0..1024 => format!("{b} B"),
        b if b < 1 << 20 => format!("{:.0} KiB", b as f64 / 1024.0),
        b if b < 1 << 30 => format!("{:.0} MiB", b as f64 / f64::from(1 << 20)),
        b => format!("{:.1} GiB", b as f64 / f64::from(1 << 30)),
    }
}

/// A timestamp in UTC, to the second.
pub(crate) fn timestamp(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// Parses `NAME=VALUE`. `NAME` alone gets the value of this process's variable.
pub(crate) fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        None => std::env::var(text)
            .map(|value| (text.to_owned(), value))
            .map_err(|_| format!("'{text}' is neither NAME=VALUE nor the name of an environment variable")),
    }
}

/// The variables of a request: those of the file, overridden by those of the command line.
pub(crate) fn environment(
    file: Option<&Path>,
    given: &[(String, String)],
) -> Result<BTreeMap<String, String>> {
    let mut variables = BTreeMap::new();
    if let Some(path) = file {
        let text = std::fs::read_to_string(path).with_context(|| format!("can't read {}", path.display()))?;
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, value) = variable(line)
                .map_err(|problem| anyhow!("{} line {}: {problem}", path.display(), index + 1))?;
            variables.insert(name, value);
        }
    }
    variables.extend(given.iter().cloned());
    Ok(variables)
}

/// A parser for a fixed set of names. Help and shell completions list them.
pub(crate) fn one_of<T>(names: impl IntoIterator<Item = &'static str>) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse::<T>())
}

/// The resource limits of a sandbox.
#[derive(Args, Debug, Default)]
pub(crate) struct LimitArgs {
    /// CPUs, such as 2 or 0.5
    #[arg(long, value_name = "COUNT")]
    pub(crate) cpu: Option<CpuCount>,
    /// Memory, such as 512M or 4G
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<ByteSize>,
    /// Disk space, such as 10G
    #[arg(long, value_name = "SIZE")]
    pub(crate) disk: Option<ByteSize>,
}

impl LimitArgs {
    /// The limits for a request. `None` if none is given.
    pub(crate) fn requested(&self) -> Option<RequestedLimits> {
        let limits = RequestedLimits { cpu: self.cpu, memory: self.memory, disk: self.disk };
        Some(limits).filter(|limits| *limits != RequestedLimits::default())
    }
}

/// The text as one word of a shell command, quoted if necessary.
pub(crate) fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_without_a_unit_are_seconds() {
        for (text, ms) in [
            ("90", 90_000),
            ("90s", 90_000),
            ("500ms", 500),
            ("5m", 300_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(duration(text).map(millis), Ok(ms), "{text}");
        }
        for text in ["", "s", "-5", "1.5h", "5 m", "5w", "99999999999999999999", "18446744073709551615d"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn timestamps_are_absolute_or_durations_ago() {
        assert_eq!(parse_timestamp("2025-06-01T12:00:00+02:00").unwrap(), "2025-06-01T10:00:00.000Z");
        let hour_ago: DateTime<Utc> = parse_timestamp("1h").unwrap().parse().unwrap();
        assert!(((Utc::now() - hour_ago).num_seconds() - 3600).abs() < 60);
        for text in ["yesterday", "", "99999999999d"] {
            assert!(parse_timestamp(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ages_use_the_largest_unit_that_gives_two_or_more() {
        for (seconds, text) in [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (7200, "2h"),
            (172_800, "2d"),
            (1 << 40, "12725829d"),
        ] {
            assert_eq!(format_seconds(seconds), text);
        }
    }

    #[test]
    fn sizes_use_the_largest_unit_that_gives_one_or_more() {
        let texts = [0, 1023, 10 << 10, 700 << 20, 3 << 29].map(size);
        assert_eq!(texts, ["0 B", "1023 B", "10 KiB", "700 MiB", "1.5 GiB"]);
    }

    #[test]
    fn variables_of_the_command_line_override_those_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("env");
        std::fs::write(&file, "# comment\n\nA=1=2\nB=file\n").unwrap();
        let variables = environment(Some(&file), &[("B".into(), "flag".into())]).unwrap();
        let expected = [("A", "1=2"), ("B", "flag")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(variables, BTreeMap::from(expected));
        std::fs::write(&file, "A=1\nEMERGENT_NOT_SET_ANYWHERE\n").unwrap();
        let error = environment(Some(&file), &[]).unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
        assert_eq!(variable("X=").unwrap(), ("X".to_owned(), String::new()));
    }

    #[test]
    fn shell_words_are_unchanged_after_a_shell_parsed_them() {
        for word in ["plain/path-1", "with space", "it's", "$(rm)", ""] {
            let output = std::process::Command::new("sh")
                .args(["-c", &format!("printf %s {}", shell_word(word))])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }
}
