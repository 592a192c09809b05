//! `emergent audit`: who did what, and whether the record of it is whole.

use anyhow::Result;
use chrono::{DateTime, Utc};
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::Value;

use crate::client::Call;
use crate::connection::ConnectionArgs;
use crate::context::Context;
use crate::output::{self, Table, shorten};
use crate::values;

/// See who did what, and check that nobody changed the record of it
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent audit list --since 1h
  emergent audit verify")]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: AuditCommand,
}

#[derive(Subcommand, Debug)]
enum AuditCommand {
    List(ListArgs),
    /// Check the hash chain over all records; exits with 1 when it is broken
    #[command(after_help = "Examples:\n  emergent audit verify\n  emergent audit verify --json")]
    Verify,
}

/// List what was done
#[derive(Args, Debug, Default)]
#[command(after_help = "\
Examples:
  emergent audit list
  emergent audit list --workspace 3fa2c9d1 --tool bash
  emergent audit list --outcome denied --since 7d --all
  emergent audit list --since 2025-06-01T00:00:00Z --until 2025-06-02T00:00:00Z --json")]
struct ListArgs {
    /// Only in this workspace: its id, or a unique piece of its beginning or end (a destroyed one: its whole id)
    #[arg(long, value_name = "ID")]
    workspace: Option<String>,
    /// Only this tool or action, such as bash or workspace.create
    #[arg(long)]
    tool: Option<String>,
    /// Only what ended so
    #[arg(long, value_parser = PossibleValuesParser::new(["success", "failure", "denied"]))]
    outcome: Option<String>,
    /// Not before: a time such as 2025-06-01T12:00:00Z, or how long ago, such as 2h
    #[arg(long, value_name = "WHEN", value_parser = values::moment)]
    since: Option<String>,
    /// Before: a time, or how long ago
    #[arg(long, value_name = "WHEN", value_parser = values::moment)]
    until: Option<String>,
    /// How many at a time [default: as many as the server gives]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// All of them; with --json one page after the other
    #[arg(long)]
    all: bool,
}

#[derive(Debug, Deserialize)]
struct Page {
    records: Vec<Record>,
    next_cursor: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Record {
    seq: u64,
    at: DateTime<Utc>,
    #[serde(default)]
    actor_name: Option<String>,
    #[serde(default)]
    workspace_id: Option<String>,
    tool: String,
    outcome: String,
    #[serde(default)]
    error_code: Option<String>,
    duration_ms: u64,
    #[serde(default)]
    request: Value,
}

#[derive(Debug, Deserialize)]
struct Verification {
    ok: bool,
    records: u64,
    broken_at: Option<u64>,
    reason: Option<String>,
}

/// Runs one of the commands.
pub(crate) async fn run(args: AuditArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    match args.command {
        AuditCommand::List(args) => list(&context, &args).await,
        AuditCommand::Verify => verify(&context).await,
    }
}

async fn list(context: &Context, args: &ListArgs) -> Result<u8> {
    let workspace = match &args.workspace {
        Some(given) => Some(context.workspace_id(given).await?),
        None => None,
    };
    let mut cursor: Option<String> = None;
    loop {
        let call = Call::get(&["audit"])
            .query("workspace_id", workspace)
            .query("tool", args.tool.as_ref())
            .query("outcome", args.outcome.as_ref())
            .query("since", args.since.as_ref())
            .query("until", args.until.as_ref())
            .query("limit", args.limit)
            .query("cursor", cursor.as_ref());
        let answer = context.client.call(call).await?;
        let page: Page = answer.parse()?;
        context.show(&answer, |page: Page| table(&page.records).print())?;
        let next = page.next_cursor.as_ref().and_then(cursor_text);
        if !args.all || next.is_none() || next == cursor {
            if !context.json && next.is_some() {
                output::note("there is more; --all shows everything");
            }
            return Ok(0);
        }
        cursor = next;
    }
}

/// A cursor is whatever the server says, a text or a number.
fn cursor_text(cursor: &Value) -> Option<String> {
    match cursor {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

fn table(records: &[Record]) -> Table {
    let mut table = Table::with_head(["SEQ", "AT", "WHO", "TOOL", "OUTCOME", "MS", "WORKSPACE", "REQUEST"]);
    for record in records {
        let outcome = match &record.error_code {
            Some(code) => format!("{} ({code})", record.outcome),
            None => record.outcome.clone(),
        };
        table.row([
            record.seq.to_string(),
            record.at.format("%Y-%m-%d %H:%M:%S").to_string(),
            record.actor_name.clone().unwrap_or_else(|| "-".to_owned()),
            record.tool.clone(),
            outcome,
            record.duration_ms.to_string(),
            record.workspace_id.clone().unwrap_or_else(|| "-".to_owned()),
            shorten(&request(&record.request), 80),
        ]);
    }
    table
}

/// The summary of a request on one line.
fn request(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| match value {
                Value::String(text) => format!("{name}={text}"),
                other => format!("{name}={other}"),
            };
            fields.iter().map(field).collect::<Vec<_>>().join(" ")
        }
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

async fn verify(context: &Context) -> Result<u8> {
    // Every record is read and hashed: this takes its time.
    let call = Call::get(&["audit", "verify"]).within(crate::client::ACT);
    let checked = context.client.call(call);
    let answer = crate::progress::during("checking the records", checked).await?;
    let found: Verification = answer.parse()?;
    context.show(&answer, |found: Verification| {
        if found.ok {
            return output::line(format_args!("ok: {} records, the chain is whole", found.records));
        }
        let place = found.broken_at.map_or_else(String::new, |seq| format!(" at record {seq}"));
        let reason = found.reason.map_or_else(String::new, |reason| format!(": {reason}"));
        output::line(format_args!("BROKEN{place}{reason}"))
    })?;
    Ok(u8::from(!found.ok))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_one_line_each() {
        let page: Page = serde_json::from_value(serde_json::json!({
            "records": [{
                "seq": 7, "at": "2025-06-01T12:00:00Z", "actor_name": "admin", "workspace_id": null, "tool": "bash",
                "outcome": "failure", "error_code": "wrong_state", "duration_ms": 3,
                "request": {"command": "a\nb", "background": false}, "request_id": "r", "hash": "h"
            }],
            "next_cursor": 6
        }))
        .unwrap();
        let text = table(&page.records).render();
        assert_eq!(
            text.lines().nth(1).unwrap(),
            "7    2025-06-01 12:00:00  admin  bash  failure (wrong_state)  3   -          background=false command=a b"
        );
        assert_eq!(cursor_text(&page.next_cursor.unwrap()).as_deref(), Some("6"));
        assert_eq!(cursor_text(&Value::Null), None);
    }
}
