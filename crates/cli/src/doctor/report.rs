//! The result of a check, and the report of all results.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::output::{self, Table, one_line};

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Level {
    /// It works.
    Ok,
    /// The server works without it, with fewer features.
    Warn,
    /// The server, or its main provider, does not work.
    Fail,
    /// It was not checked, because something that it needs does not work.
    Skip,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    what: String,
    status: Level,
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Check {
    fn new(what: &str, status: Level, detail: impl Display, fix: Option<String>) -> Self {
        Self { what: what.to_owned(), status, detail: one_line(&detail.to_string()), fix }
    }

    /// It works.
    pub(super) fn ok(what: &str, detail: impl Display) -> Self {
        Self::new(what, Level::Ok, detail, None)
    }

    /// The server has fewer features without it.
    pub(super) fn warn(what: &str, detail: impl Display, fix: impl Into<String>) -> Self {
        Self::new(what, Level::Warn, detail, Some(fix.into()))
    }

    /// The server does not work without it.
    pub(super) fn fail(what: &str, detail: impl Display, fix: impl Into<String>) -> Self {
        Self::new(what, Level::Fail, detail, Some(fix.into()))
    }

    /// Not checked, for this reason.
    pub(super) fn skip(what: &str, because: impl Display) -> Self {
        Self::new(what, Level::Skip, format!("not checked: {because}"), None)
    }

    /// Whether it works.
    #[cfg(test)]
    pub(super) fn is_ok(&self) -> bool {
        self.status == Level::Ok
    }
}

/// Runs a check. It fails at the time limit.
pub(super) async fn within(
    what: &str,
    limit: Duration,
    check: impl Future<Output = Vec<Check>>,
) -> Vec<Check> {
    match tokio::time::timeout(limit, check).await {
        Ok(checks) => checks,
        Err(_) => vec![Check::fail(
            what,
            format!("no answer within {} s", limit.as_secs()),
            "look for a hung disk, a hung network file system or an overloaded machine, and try again",
        )],
    }
}

/// Runs a check that blocks its thread. It fails at the time limit.
pub(super) async fn blocking(
    what: &str,
    limit: Duration,
    check: impl FnOnce() -> Vec<Check> + Send + 'static,
) -> Vec<Check> {
    let work = async {
        let done = tokio::task::spawn_blocking(check).await;
        done.unwrap_or_else(|error| {
            vec![Check::fail(what, error, "report this: it is a defect of the doctor")]
        })
    };
    within(what, limit, work).await
}

/// The exit code: 1 if a check failed.
pub(super) fn exit_code(checks: &[Check]) -> u8 {
    u8::from(checks.iter().any(|check| check.status == Level::Fail))
}

/// Writes the report to stdout.
pub(super) fn print(checks: &[Check], json: bool) -> Result<()> {
    if json {
        #[derive(Serialize)]
        struct Report<'a> {
            ok: bool,
            checks: &'a [Check],
        }
        let report = Report { ok: exit_code(checks) == 0, checks };
        return output::line(serde_json::to_string_pretty(&report)?);
    }
    output::bytes(render(checks).as_bytes())
}

fn render(checks: &[Check]) -> String {
    let mut table = Table::default();
    for check in checks {
        let status = match check.status {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
            Level::Skip => "skip",
        };
        table.row([status.to_owned(), check.what.clone(), check.detail.clone()]);
    }
    let mut text = String::new();
    for (line, check) in table.render().lines().zip(checks) {
        text.push_str(line);
        text.push('\n');
        if let Some(fix) = &check.fix {
            text.push_str(&format!("      fix: {fix}\n"));
        }
    }
    let count = |level: Level| checks.iter().filter(|check| check.status == level).count();
    match (count(Level::Fail), count(Level::Warn)) {
        (0, 0) => text.push_str("everything works\n"),
        (0, warnings) => text.push_str(&format!("it works, with {warnings} warning(s)\n")),
        (failures, _) => text.push_str(&format!("{failures} problem(s) must be fixed\n")),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_warning_and_failure_has_its_fix_on_the_next_line() {
        let checks = [
            Check::ok("one", "fine"),
            Check::warn("second", "not\nfine", "do this"),
            Check::fail("three", "bad", "do that"),
            Check::skip("four", "three is bad"),
        ];
        assert_eq!(
            render(&checks),
            "ok    one     fine\nwarn  second  not fine\n      fix: do this\nFAIL  three   bad\n      fix: do that\n\
             skip  four    not checked: three is bad\n1 problem(s) must be fixed\n"
        );
        assert_eq!(exit_code(&checks), 1);
        assert_eq!(exit_code(&checks[..2]), 0);
        let json = serde_json::to_value(&checks[1]).unwrap();
        let expected =
            serde_json::json!({"what": "second", "status": "warn", "detail": "not fine", "fix": "do this"});
        assert_eq!(json, expected);
    }

    #[tokio::test]
    async fn check_that_reaches_its_time_limit_fails() {
        let checks = within("x", Duration::from_millis(1), std::future::pending()).await;
        assert_eq!(exit_code(&checks), 1);
    }
}
