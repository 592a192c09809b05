//! The end of a command, as an exit code and messages.

use emergent_wire::tools::{BashAnswer, OperationAnswer, OperationStatus};

/// The exit code after a time-out, as coreutils' `timeout` has it.
const EXIT_TIMED_OUT: u8 = 124;
/// The exit code of an end without an exit code or a known signal.
const EXIT_UNKNOWN: u8 = 1;

/// The end of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ending {
    exit_code: Option<i32>,
    signal: Option<String>,
    timed_out: bool,
    oom_killed: bool,
    lost: bool,
    duration_ms: u64,
    notes: Vec<String>,
}

impl From<&BashAnswer> for Ending {
    fn from(answer: &BashAnswer) -> Self {
        Self {
            exit_code: answer.exit_code,
            signal: answer.signal.clone(),
            timed_out: answer.timed_out,
            oom_killed: answer.oom_killed,
            lost: false,
            duration_ms: answer.duration_ms,
            notes: answer.notes.clone(),
        }
    }
}

impl From<&OperationAnswer> for Ending {
    fn from(answer: &OperationAnswer) -> Self {
        Self {
            exit_code: answer.exit_code,
            signal: answer.signal.clone(),
            timed_out: answer.timed_out,
            oom_killed: answer.oom_killed,
            lost: answer.status == OperationStatus::Lost,
            duration_ms: answer.duration_ms,
            notes: answer.notes.clone(),
        }
    }
}

impl Ending {
    /// The exit code of this program.
    pub(super) fn exit_code(&self) -> u8 {
        if self.timed_out {
            return EXIT_TIMED_OUT;
        }
        match (self.exit_code, &self.signal) {
            // The low byte, as `wait` returns it: -1 becomes 255.
            (Some(code), _) => u8::try_from(code & 0xff).unwrap_or(EXIT_UNKNOWN),
            (None, Some(signal)) => signal_number(signal).map_or(EXIT_UNKNOWN, |number| 128 + number),
            (None, None) => EXIT_UNKNOWN,
        }
    }

    /// The messages for the user.
    pub(super) fn messages(&self) -> Vec<String> {
        let mut messages = Vec::new();
        if self.timed_out {
            let seconds = self.duration_ms as f64 / 1000.0;
            messages.push(format!("the command reached its time-out after {seconds:.1} s (--timeout)"));
        } else if self.lost {
            messages.push("the sandbox stopped while the command ran; its exit code is not known".to_owned());
        } else if let (None, Some(signal)) = (self.exit_code, &self.signal) {
            messages.push(format!("the command was ended by {signal}"));
        }
        if self.oom_killed {
            messages.push(
                "out of memory: the workspace reached its memory limit, and a process was killed".to_owned(),
            );
        }
        messages.extend(self.notes.iter().cloned());
        messages
    }
}

/// The number of a signal on Linux, from `SIGKILL`, `KILL` or `9`.
fn signal_number(name: &str) -> Option<u8> {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
        "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    let short = name.strip_prefix("SIG").unwrap_or(name);
    let digits = short.trim_start_matches(|c: char| !c.is_ascii_digit());
    match NAMES.iter().zip(1..).find(|(known, _)| **known == short) {
        Some((_, number)) => Some(number),
        // "9", or "signal 34".
        None => digits.parse().ok().filter(|number| (1..=64).contains(number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ending(exit_code: Option<i32>, signal: Option<&str>) -> Ending {
        Ending { exit_code, signal: signal.map(str::to_owned), ..Ending::default() }
    }

    #[test]
    fn exit_code_is_the_low_byte_of_the_commands_exit_code() {
        for (code, expected) in [(0, 0), (1, 1), (42, 42), (255, 255), (256, 0), (-1, 255)] {
            assert_eq!(ending(Some(code), None).exit_code(), expected, "{code}");
        }
    }

    #[test]
    fn exit_code_after_a_signal_is_128_plus_its_number() {
        for (signal, expected) in [
            ("SIGKILL", 137),
            ("SIGTERM", 143),
            ("SIGSEGV", 139),
            ("SEGV", 139),
            ("9", 137),
            ("signal 34", 162),
        ] {
            assert_eq!(ending(None, Some(signal)).exit_code(), expected, "{signal}");
        }
        assert_eq!(ending(None, Some("SIGNEW")).exit_code(), 1);
        assert_eq!(ending(None, Some("200")).exit_code(), 1);
        assert_eq!(ending(None, None).exit_code(), 1);
    }

    #[test]
    fn time_out_and_out_of_memory_are_reported() {
        let timed_out = Ending { timed_out: true, duration_ms: 1500, ..ending(None, Some("SIGTERM")) };
        assert_eq!(timed_out.exit_code(), 124);
        assert!(timed_out.messages()[0].contains("1.5 s"));
        let oom = Ending { oom_killed: true, ..ending(None, Some("SIGKILL")) };
        assert_eq!(oom.exit_code(), 137);
        assert!(oom.messages().iter().any(|message| message.contains("out of memory")));
        assert!(ending(Some(3), None).messages().is_empty());
    }
}
