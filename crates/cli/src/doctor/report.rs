//! What a check found, and how all of them are shown.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::output::{self, Table, one_line};

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Level {
    /// It works.
    Ok,
    /// The server works without it, but does less.
    Warn,
    /// The server, or its main provider, does not work.
    Fail,
    /// It can't be known before something else works.
    Skip,
}

/// One thing that was checked.
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

    /// The server does less without it.
    pub(super) fn warn(what: &str, detail: impl Display, fix: impl Into<String>) -> Self {
        Self::new(what, Level::Warn, detail, Some(fix.into()))
    }

    /// The server does not work without it.
    pub(super) fn fail(what: &str, detail: impl Display, fix: impl Into<String>) -> Self {
        Self::new(what, Level::Fail, detail, Some(fix.into()))
    }

    /// Not looked at, because of something else.
    pub(super) fn skip(what: &str, because: impl Display) -> Self {
        Self::new(what, Level::Skip, format!("not checked: {because}"), None)
    }

    /// Whether it works.
    #[cfg(test)]
    pub(super) fn is_ok(&self) -> bool {
        self.status == Level::Ok
    }
}

/// The check, or a failure when it takes too long.
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
            "look at what hangs (a dead disk or network file system, an overloaded machine) and try again",
        )],
    }
}

/// The same for a check that blocks its thread.
pub(super) async fn blocking(
    what: &str,
    limit: Duration,
    check: impl FnOnce() -> Vec<Check> + Send + 'static,
) -> Vec<Check> {
    let work = async {
        let done = tokio::task::spawn_blocking(check).await;
        done.unwrap_or_else(|error| {
            vec![Check::fail(what, error, "report this: it is a fault of the doctor")]
        })
    };
    within(what, limit, work).await
}

/// Fails when a check did.
pub(super) fn exit_code(checks: &[Check]) -> u8 {
    u8::from(checks.iter().any(|check| check.status == Level::Fail))
}

/// Writes the result to stdout.
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
        (0, warnings) => text.push_str(&format!("it works; {warnings} thing(s) could be better\n")),
        (failures, _) => text.push_str(&format!("{failures} thing(s) must be fixed\n")),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_that_is_not_ok_has_its_fix_below() {
        let checks = [
            Check::ok("one", "fine"),
            Check::warn("second", "not\nfine", "do this"),
            Check::fail("three", "bad", "do that"),
            Check::skip("four", "three is bad"),
        ];
        assert_eq!(
            render(&checks),
            "ok    one     fine\nwarn  second  not fine\n      fix: do this\nFAIL  three   bad\n      fix: do that\n\
             skip  four    not checked: three is bad\n1 thing(s) must be fixed\n"
        );
        assert_eq!(exit_code(&checks), 1);
        assert_eq!(exit_code(&checks[..2]), 0);
        let json = serde_json::to_value(&checks[1]).unwrap();
        let expected =
            serde_json::json!({"what": "second", "status": "warn", "detail": "not fine", "fix": "do this"});
        assert_eq!(json, expected);
    }

    #[tokio::test]
    async fn what_hangs_is_a_failure() {
        let checks = within("x", Duration::from_millis(1), std::future::pending()).await;
        assert_eq!(exit_code(&checks), 1);
    }
}
