//! `emergent audit`: lists, verifies and exports the audit log.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use chrono::{DateTime, Utc};
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use emergent_control_plane::{AuditAnchor, ExportVerifier};
use serde::Deserialize;
use serde_json::Value;

use crate::client::calls;
use crate::connection::ConnectionArgs;
use crate::context::Context;
use crate::output::{self, Table, shorten};
use crate::values;

/// The number of records that one call exports.
const EXPORT_PAGE: usize = 1000;

/// List the audit log of all calls, verify that it is unchanged, and export it
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent audit list --since 1h
  emergent audit verify
  emergent audit export --before 30d --output audit.jsonl")]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: AuditCommand,
}

#[derive(Subcommand, Debug)]
enum AuditCommand {
    List(ListArgs),
    Verify(VerifyArgs),
    Export(ExportArgs),
}

/// Verify the hash chain over all records; exits with 1 when it is broken
///
/// The server removes old records after it has exported them (`audit.retention_days`). With --export the exported files are
/// verified too: each file is complete and unchanged, and the server's log continues where they end.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent audit verify
  emergent audit verify --export /var/lib/emergent/audit/*.jsonl")]
struct VerifyArgs {
    /// Files with exported records, oldest first
    #[arg(long, value_name = "FILE", num_args = 1..)]
    export: Vec<PathBuf>,
}

/// Export records as JSON, one object on each line, oldest first
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent audit export --output audit.jsonl
  emergent audit export --before 30d > old.jsonl")]
struct ExportArgs {
    /// Only records before this time: a timestamp such as 2025-06-01T12:00:00Z, or a duration ago such as 30d
    #[arg(long, value_name = "WHEN", value_parser = values::parse_timestamp)]
    before: Option<String>,
    /// The file to create; an existing file is not overwritten [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// List audit records, newest first
#[derive(Args, Debug, Default)]
#[command(after_help = "\
Examples:
  emergent audit list
  emergent audit list --workspace 3fa2c9d1 --tool bash
  emergent audit list --outcome denied --since 7d --all
  emergent audit list --since 2025-06-01T00:00:00Z --until 2025-06-02T00:00:00Z --json")]
struct ListArgs {
    /// Only this workspace: its id, or a unique prefix or suffix of it. A destroyed workspace needs its whole id
    #[arg(long, value_name = "ID")]
    workspace: Option<String>,
    /// Only this tool or action, such as bash or workspace.create
    #[arg(long)]
    tool: Option<String>,
    /// Only records with this outcome; 'started' is the beginning of a call whose output is sent while it runs
    #[arg(long, value_parser = PossibleValuesParser::new(["started", "success", "failure", "denied"]))]
    outcome: Option<String>,
    /// Only records since this time: a timestamp such as 2025-06-01T12:00:00Z, or a duration ago such as 2h
    #[arg(long, value_name = "WHEN", value_parser = values::parse_timestamp)]
    since: Option<String>,
    /// Only records before this time: a timestamp, or a duration ago
    #[arg(long, value_name = "WHEN", value_parser = values::parse_timestamp)]
    until: Option<String>,
    /// Records on each page [default: the server's page size]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// All pages; with --json one JSON document for each page
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
    #[serde(default)]
    anchor: Option<AuditAnchor>,
}

/// Runs one of the commands.
pub(crate) async fn run(args: AuditArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    match args.command {
        AuditCommand::List(args) => list(&context, &args).await,
        AuditCommand::Verify(args) => verify(&context, &args).await,
        AuditCommand::Export(args) => export(&context, &args).await,
    }
}

async fn list(context: &Context, args: &ListArgs) -> Result<u8> {
    let workspace = match &args.workspace {
        Some(given) => Some(context.workspace_id(given).await?),
        None => None,
    };
    let mut cursor: Option<String> = None;
    loop {
        let call = calls::list_audit_records()
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
                output::note("there are more records; --all shows them");
            }
            return Ok(0);
        }
        cursor = next;
    }
}

/// A cursor as the text of a query parameter. The server gives a string or a number.
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

async fn export(context: &Context, args: &ExportArgs) -> Result<u8> {
    let mut file: Box<dyn Write> = match &args.output {
        None => Box::new(std::io::stdout().lock()),
        Some(path) => {
            let options = File::options().write(true).create_new(true).mode(0o600).to_owned();
            let file = options.open(path).with_context(|| format!("{} can't be made", path.display()))?;
            Box::new(std::io::BufWriter::new(file))
        }
    };
    let (mut after, mut count) = (None, 0);
    loop {
        let call = calls::export_audit_records().query("before", args.before.as_ref());
        let page = context.client.call(call.query("after", after).query("limit", Some(EXPORT_PAGE))).await?;
        file.write_all(page.text.as_bytes())?;
        let lines = page.text.lines().count();
        count += lines;
        let Some(last) = page.text.lines().last() else { break };
        let last: Record =
            serde_json::from_str(last).context("the server's answer is not an audit record")?;
        after = Some(last.seq);
        // Each export call adds a record, so waiting for an empty page would never end.
        if lines < EXPORT_PAGE {
            break;
        }
    }
    file.flush()?;
    if let Some(path) = &args.output {
        output::note(format!("wrote {count} records to {}", path.display()));
    }
    Ok(0)
}

/// Verifies exported files. They must end where the server's log begins. Returns the number of the last record.
fn verify_files(files: &[PathBuf], anchor: Option<&AuditAnchor>) -> Result<u64> {
    let mut verifier = ExportVerifier::new(anchor)?;
    for path in files {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        for line in BufReader::new(file).lines() {
            let line = line.with_context(|| path.display().to_string())?;
            verifier.line(&line).with_context(|| path.display().to_string())?;
        }
    }
    Ok(verifier.finish()?.last_seq)
}

async fn verify(context: &Context, args: &VerifyArgs) -> Result<u8> {
    let verified = context.client.call(calls::verify_audit_log());
    let answer = crate::progress::during("verifying the records", verified).await?;
    let found: Verification = answer.parse()?;
    context.show(&answer, |found: Verification| {
        if found.ok {
            return output::line(format_args!("ok: {} records, the chain is whole", found.records));
        }
        let at = found.broken_at.map_or_else(String::new, |seq| format!(" at record {seq}"));
        let reason = found.reason.map_or_else(String::new, |reason| format!(": {reason}"));
        output::line(format_args!("BROKEN{at}{reason}"))
    })?;
    if !args.export.is_empty() {
        match verify_files(&args.export, found.anchor.as_ref()) {
            Ok(last) => output::note(format!(
                "ok: the exported records up to {last} are unchanged and belong to this log"
            )),
            Err(error) => {
                output::note(format!("BROKEN export: {error:#}"));
                return Ok(1);
            }
        }
    }
    Ok(u8::from(!found.ok))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_audit_record_is_one_table_row() {
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
