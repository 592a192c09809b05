//! The audit log: one row for each tool call or action, in a hash chain ([`audit_chain`](crate::audit_chain)).
//!
//! Rows are numbered without a gap and are appended by one transaction at a time; the head of the chain, in the
//! settings, changes in the same transaction. Nothing here changes or removes a row; retention removes the oldest
//! ([`audit_retention`](crate::audit_retention)).

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use chrono::{DateTime, Utc};
use emergent_wire::id::SessionId;
use emergent_wire::{TokenId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::types::Json;

use crate::audit_chain::{AuditAnchor, AuditFault, BrokenAudit, ChainedRow, Head, exact_numbers};
use crate::db::{Connection, Lock};
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::page;
use crate::query::{Table, query};
use crate::row::{Reader, Row};
use crate::settings;
use crate::types::{clean, clean_json, to_microseconds};

/// The setting that holds the head of the chain.
pub(crate) const HEAD: &str = "audit_head";
/// The setting that holds the last row that retention removed.
pub(crate) const ANCHOR: &str = "audit_anchor";
/// The numbers of rows that one statement inserts, largest first: each statement wakes another thread or goes over the network.
const ROWS_AT_ONCE: [usize; 3] = [16, 4, 1];
/// The number of rows that `verify_audit` holds in memory.
const VERIFY_BATCH: i64 = 1000;

pub(crate) const AUDIT: Table = Table {
    name: "tool_audit",
    columns: "seq, at, actor_token_id, actor_name, workspace_id, session_id, tool, outcome, error_code, duration_ms, \
              request, request_id, prev_hash, hash",
};

/// The outcome of an audited call; `started` until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditOutcome {
    /// It has begun, and its output is sent while it runs. A second entry with the same request id has its end. Without
    /// one, the server was killed meanwhile.
    Started,
    /// It succeeded.
    Success,
    /// It was tried and failed.
    Failure,
    /// It was not allowed.
    Denied,
}

impl AuditOutcome {
    /// The name as it is written everywhere.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Success => "success",
            Self::Failure => "failure",
            Self::Denied => "denied",
        }
    }
}

impl fmt::Display for AuditOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for AuditOutcome {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        [Self::Started, Self::Success, Self::Failure, Self::Denied]
            .into_iter()
            .find(|outcome| outcome.as_str() == text)
            .ok_or_else(|| format!("'{text}' is none of 'started' 'success' 'failure' 'denied'"))
    }
}

/// An audited call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// Its start time.
    pub at: DateTime<Utc>,
    /// The caller's token.
    pub actor_token_id: Option<TokenId>,
    /// The name that token had.
    pub actor_name: Option<String>,
    /// The workspace it was done in or to.
    pub workspace_id: Option<WorkspaceId>,
    /// The session it belongs to.
    pub session_id: Option<SessionId>,
    /// The tool or action, such as `bash` or `workspace.create`.
    pub tool: String,
    /// Its outcome; `started` until it ends.
    pub outcome: AuditOutcome,
    /// The error code of a call that did not succeed.
    pub error_code: Option<String>,
    /// The time from its start until this entry.
    pub duration_ms: u64,
    /// A summary of the request, without contents.
    pub request: Value,
    /// The id of the HTTP request.
    pub request_id: Option<String>,
}

/// A row of the audit log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// Its number; the first is 1.
    pub seq: u64,
    /// The call.
    #[serde(flatten)]
    pub entry: AuditEntry,
    /// The hash of the row before, in hexadecimal.
    pub prev_hash: String,
    /// The hash of this row, in hexadecimal.
    pub hash: String,
}

/// The rows to list. The default is all rows.
#[derive(Clone, Debug, Default)]
pub struct AuditFilter {
    /// Of this workspace.
    pub workspace_id: Option<WorkspaceId>,
    /// Of this tool or action.
    pub tool: Option<String>,
    /// That ended this way.
    pub outcome: Option<AuditOutcome>,
    /// Not before this time.
    pub since: Option<DateTime<Utc>>,
    /// Before this time.
    pub until: Option<DateTime<Utc>>,
}

/// A page of the audit log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditPage {
    /// The rows, newest first.
    pub records: Vec<AuditRecord>,
    /// Pass this as the cursor for the next page; none on the last.
    pub next_cursor: Option<String>,
}

impl AuditEntry {
    /// The entry as both engines return it. Its hash is made of this form.
    fn normalized(mut self) -> Self {
        let clean_some = |text: Option<String>| text.map(|text| clean(&text).into_owned());
        self.at = to_microseconds(self.at);
        self.actor_name = clean_some(self.actor_name);
        self.tool = clean(&self.tool).into_owned();
        self.error_code = clean_some(self.error_code);
        // The column is signed.
        self.duration_ms = self.duration_ms.min(i64::MAX.unsigned_abs());
        self.request = exact_numbers(clean_json(self.request));
        self.request_id = clean_some(self.request_id);
        self
    }
}

/// An insertion of so many rows; one of [`ROWS_AT_ONCE`].
fn insert_of(rows: usize) -> &'static str {
    static ALL: [OnceLock<String>; ROWS_AT_ONCE.len()] = [const { OnceLock::new() }; ROWS_AT_ONCE.len()];
    let which = ROWS_AT_ONCE.iter().position(|size| *size == rows).unwrap_or_default();
    ALL[which].get_or_init(|| {
        let columns = AUDIT.columns.split(',').count();
        let row = |row: usize| {
            let values: Vec<String> =
                (1..=columns).map(|value| format!("${}", row * columns + value)).collect();
            format!("({})", values.join(", "))
        };
        let values: Vec<String> = (0..rows).map(row).collect();
        format!("INSERT INTO tool_audit ({}) VALUES {}", AUDIT.columns, values.join(", "))
    })
}

pub(crate) struct AuditRow {
    pub(crate) seq: u64,
    pub(crate) entry: AuditEntry,
    prev_hash: Vec<u8>,
    hash: Vec<u8>,
}

impl AuditRow {
    pub(crate) fn from_row(row: &Row) -> Result<Self> {
        let seq = Reader::with_key(row, AUDIT.name, "(unreadable seq)").unsigned("seq")?;
        let row = Reader::with_key(row, AUDIT.name, seq);
        let entry = AuditEntry {
            at: row.time("at")?,
            actor_token_id: row.uuid_or_null("actor_token_id")?.map(TokenId),
            actor_name: row.text_or_null("actor_name")?,
            workspace_id: row.uuid_or_null("workspace_id")?.map(WorkspaceId),
            session_id: row.uuid_or_null("session_id")?.map(SessionId),
            tool: row.text("tool")?,
            outcome: row.name("outcome")?,
            error_code: row.text_or_null("error_code")?,
            duration_ms: row.unsigned("duration_ms")?,
            request: row.json("request")?,
            request_id: row.text_or_null("request_id")?,
        };
        Ok(Self { seq, entry, prev_hash: row.bytes("prev_hash")?, hash: row.bytes("hash")? })
    }

    /// Reads the row that should follow `head`.
    pub(crate) fn following(head: Head, row: &Row) -> Result<Self> {
        Self::from_row(row).map_err(|error| match error {
            // A value that this program never writes is a change like any other.
            StoreError::Corrupt { .. } => {
                StoreError::AuditBroken(BrokenAudit { seq: head.seq + 1, fault: AuditFault::Changed })
            }
            other => other,
        })
    }

    pub(crate) fn check(&self, head: Head) -> std::result::Result<Head, BrokenAudit> {
        let Self { seq, entry, prev_hash, hash } = self;
        head.check(&ChainedRow { seq: *seq, entry, prev_hash, hash })
    }

    pub(crate) fn into_record(self) -> AuditRecord {
        AuditRecord {
            seq: self.seq,
            entry: self.entry,
            prev_hash: hex::encode(self.prev_hash),
            hash: hex::encode(self.hash),
        }
    }
}

/// The recorded head.
pub(crate) async fn recorded_head(connection: &mut Connection) -> Result<Option<Head>> {
    let text = settings::read(connection, HEAD).await?;
    text.map(|text| {
        let head = Head::from_text(&text);
        head.ok_or_else(|| settings::corrupt(HEAD, "it is not a row number and a hash"))
    })
    .transpose()
}

/// The recorded anchor.
pub(crate) async fn recorded_anchor(connection: &mut Connection) -> Result<Option<AuditAnchor>> {
    let text = settings::read(connection, ANCHOR).await?;
    text.map(|text| {
        let anchor = AuditAnchor::from_text(&text);
        anchor.ok_or_else(|| settings::corrupt(ANCHOR, "it is not a row number, a hash and a time"))
    })
    .transpose()
}

/// The head that the first kept row follows.
pub(crate) async fn recorded_start(connection: &mut Connection) -> Result<Head> {
    let anchor = recorded_anchor(connection).await?;
    Ok(anchor.as_ref().and_then(AuditAnchor::head).unwrap_or(Head::EMPTY))
}

/// Checks the whole log.
async fn verify_chain(connection: &mut Connection) -> Result<u64> {
    let recorded = recorded_head(connection).await?;
    let start = recorded_start(connection).await?;
    let mut head = start;
    // The smallest number, because a row 0 or -1 is not the server's own.
    let mut after = i64::MIN;
    loop {
        let rows = AUDIT
            .select("WHERE seq > $1 ORDER BY seq LIMIT $2")
            .bind(after)
            .bind(VERIFY_BATCH)
            .fetch_all(connection)
            .await?;
        if rows.is_empty() {
            let end = head.check_end(recorded);
            return end.map_err(|broken| StoreError::AuditBroken(broken.after_start(start)));
        }
        head = check_rows(start, head, &rows)?;
        after = i64::try_from(head.seq).unwrap_or(i64::MAX);
    }
}

fn check_rows(start: Head, mut head: Head, rows: &[Row]) -> Result<Head> {
    for row in rows {
        let checked = AuditRow::following(head, row)?.check(head);
        head = checked.map_err(|broken| StoreError::AuditBroken(broken.after_start(start)))?;
    }
    Ok(head)
}

impl Store {
    /// Appends one row and gives its number.
    pub async fn append_audit(&self, entry: AuditEntry) -> Result<u64> {
        self.append_audits(vec![entry]).await
    }

    /// Appends rows in one transaction and gives the number of the last row of the log.
    ///
    /// On SQLite the rows are safe from a killed process at once, and from a power loss with the next write of another
    /// kind or a moment later: waiting for the disk would make every call several times as long.
    pub async fn append_audits(&self, entries: Vec<AuditEntry>) -> Result<u64> {
        let entries: Vec<_> = entries.into_iter().map(AuditEntry::normalized).collect();
        self.db()
            .transaction(Lock::Audit, async |connection| {
                let mut head = recorded_head(connection).await?.unwrap_or(Head::EMPTY);
                let mut left = entries.as_slice();
                while let Some(size) = ROWS_AT_ONCE.into_iter().find(|size| *size <= left.len()) {
                    let (now, later) = left.split_at(size);
                    let mut insert = query(insert_of(size));
                    for entry in now {
                        let next = head.next(entry);
                        insert = insert
                            .bind(next.seq)
                            .bind(entry.at)
                            .bind(entry.actor_token_id.map(|id| id.0))
                            .bind(entry.actor_name.as_deref())
                            .bind(entry.workspace_id.map(|id| id.0))
                            .bind(entry.session_id.map(|id| id.0))
                            .bind(entry.tool.as_str())
                            .bind(entry.outcome.as_str())
                            .bind(entry.error_code.as_deref())
                            .bind(entry.duration_ms)
                            .bind(Json(&entry.request))
                            .bind(entry.request_id.as_deref())
                            .bind(head.hash.as_slice())
                            .bind(next.hash.as_slice());
                        head = next;
                    }
                    insert.execute(connection).await?;
                    left = later;
                }
                settings::write(connection, HEAD, &head.to_text()).await?;
                Ok(head.seq)
            })
            .await
    }

    /// Reads the whole log and gives the number of its last row, which counts the rows that retention removed too,
    /// or [`StoreError::AuditBroken`] with the first row that is not as it was written. Rows that are appended
    /// meanwhile are not looked at.
    pub async fn verify_audit(&self) -> Result<u64> {
        // One state of the log and of its head, however long it takes.
        self.db().read_transaction(async |connection| verify_chain(connection).await).await
    }

    /// A page of at most `limit` (up to 500) rows, newest first.
    pub async fn audit_page(
        &self,
        filter: &AuditFilter,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<AuditPage> {
        let before = cursor.map(page::parse_seq_cursor).transpose()?;
        let rows = AUDIT
            .select(
                "WHERE ($1 IS NULL OR workspace_id = $1)
                   AND ($2 IS NULL OR tool = $2)
                   AND ($3 IS NULL OR outcome = $3)
                   AND ($4 IS NULL OR at >= $4)
                   AND ($5 IS NULL OR at < $5)
                   AND ($6 IS NULL OR seq < $6)
                 ORDER BY seq DESC LIMIT $7",
            )
            .bind(filter.workspace_id.map(|id| id.0))
            .bind(filter.tool.as_deref().map(clean))
            .bind(filter.outcome.map(AuditOutcome::as_str))
            .bind(filter.since)
            .bind(filter.until)
            .bind(before)
            .bind(page::rows_wanted(limit))
            .fetch_all(&mut self.db().reader().await?)
            .await?;
        let read = rows.iter().map(|row| Ok(AuditRow::from_row(row)?.into_record()));
        let mut records = read.collect::<Result<Vec<_>>>()?;
        let next_cursor = page::cut(&mut records, limit, |last| page::seq_cursor(last.seq));
        Ok(AuditPage { records, next_cursor })
    }
}
