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
use crate::db::{Db, Lock, finish, in_transaction, reading};
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::page;
use crate::settings;
use crate::types::{DbRow, DbTime, DbUuid, Reader, clean, clean_json};

const TABLE: &str = "tool_audit";
/// The setting that holds the head of the chain.
pub(crate) const HEAD: &str = "audit_head";
/// The setting that holds the last row that retention removed.
pub(crate) const ANCHOR: &str = "audit_anchor";
/// How many rows one statement inserts, largest first: each statement wakes another thread or goes over the network.
const ROWS_AT_ONCE: [usize; 3] = [16, 4, 1];
/// How many rows `verify_audit` holds in memory.
const VERIFY_BATCH: i64 = 1000;

macro_rules! columns {
    () => {
        "seq, at, actor_token_id, actor_name, workspace_id, session_id, tool, outcome, error_code, duration_ms, \
         request, request_id, prev_hash, hash"
    };
}
pub(crate) use columns;

/// How an audited call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditOutcome {
    /// It did what was asked.
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
        [Self::Success, Self::Failure, Self::Denied]
            .into_iter()
            .find(|outcome| outcome.as_str() == text)
            .ok_or_else(|| format!("'{text}' is none of 'success' 'failure' 'denied'"))
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// When it began.
    pub at: DateTime<Utc>,
    /// The token of whoever did it.
    pub actor_token_id: Option<TokenId>,
    /// The name that token had.
    pub actor_name: Option<String>,
    /// The workspace it was done in or to.
    pub workspace_id: Option<WorkspaceId>,
    /// The session it belongs to.
    pub session_id: Option<SessionId>,
    /// The tool or action, such as `bash` or `workspace.create`.
    pub tool: String,
    /// How it ended.
    pub outcome: AuditOutcome,
    /// The error code of a call that did not succeed.
    pub error_code: Option<String>,
    /// How long it took.
    pub duration_ms: u64,
    /// What was asked, in short; never contents.
    pub request: Value,
    /// The id of the HTTP request.
    pub request_id: Option<String>,
}

/// A row of the audit log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// Its number; the first is 1.
    pub seq: u64,
    /// What happened.
    #[serde(flatten)]
    pub entry: AuditEntry,
    /// The hash of the row before, in hexadecimal.
    pub prev_hash: String,
    /// The hash of this row, in hexadecimal.
    pub hash: String,
}

/// Which rows to list; all unless said otherwise.
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
    /// The entry as both engines give it back, which is what is hashed.
    fn normalized(mut self) -> Self {
        let clean_some = |text: Option<String>| text.map(|text| clean(&text).into_owned());
        self.at = DbTime::new(self.at).get();
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
        let columns = columns!().split(',').count();
        let row = |row: usize| {
            let values: Vec<String> =
                (1..=columns).map(|value| format!("${}", row * columns + value)).collect();
            format!("({})", values.join(", "))
        };
        let values: Vec<String> = (0..rows).map(row).collect();
        format!("INSERT INTO tool_audit ({}) VALUES {}", columns!(), values.join(", "))
    })
}

pub(crate) struct AuditRow {
    pub(crate) seq: u64,
    pub(crate) entry: AuditEntry,
    prev_hash: Vec<u8>,
    hash: Vec<u8>,
}

impl AuditRow {
    pub(crate) fn from_row(row: &impl DbRow) -> Result<Self> {
        let seq = Reader::with_key(row, TABLE, "(unknown)").unsigned("seq")?;
        let row = Reader::with_key(row, TABLE, seq);
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
    pub(crate) fn following(head: Head, row: &impl DbRow) -> Result<Self> {
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
macro_rules! recorded_head {
    ($connection:expr) => {{
        let row = sqlx::query("SELECT value FROM settings WHERE key = $1")
            .bind($crate::audit::HEAD)
            .fetch_optional(&mut *$connection)
            .await?;
        row.map(|row| $crate::audit::read_head(&row)).transpose()?
    }};
}

/// The recorded anchor.
macro_rules! recorded_anchor {
    ($connection:expr) => {{
        let row = sqlx::query("SELECT value FROM settings WHERE key = $1")
            .bind($crate::audit::ANCHOR)
            .fetch_optional(&mut *$connection)
            .await?;
        row.map(|row| $crate::audit::read_anchor(&row)).transpose()?
    }};
}

/// The head that the first kept row follows.
macro_rules! recorded_start {
    ($connection:expr) => {
        recorded_anchor!($connection).as_ref().and_then(AuditAnchor::head).unwrap_or(Head::EMPTY)
    };
}
pub(crate) use {recorded_anchor, recorded_head, recorded_start};

pub(crate) fn read_head(row: &impl DbRow) -> Result<Head> {
    let head = Head::from_text(&settings::value(row, HEAD)?);
    head.ok_or_else(|| settings::corrupt(HEAD, "it is not a row number and a hash".into()))
}

pub(crate) fn read_anchor(row: &impl DbRow) -> Result<AuditAnchor> {
    let anchor = AuditAnchor::from_text(&settings::value(row, ANCHOR)?);
    anchor.ok_or_else(|| settings::corrupt(ANCHOR, "it is not a row number, a hash and a time".into()))
}

/// Goes through the whole log.
macro_rules! verify_chain {
    ($connection:expr) => {{
        let recorded = recorded_head!($connection);
        let start = recorded_start!($connection);
        let mut head = start;
        // From the very first: a row 0 or -1 would be somebody else's.
        let mut after = i64::MIN;
        loop {
            let rows = sqlx::query(concat!(
                "SELECT ",
                columns!(),
                " FROM tool_audit WHERE seq > $1 ORDER BY seq LIMIT $2"
            ))
            .bind(after)
            .bind(VERIFY_BATCH)
            .fetch_all(&mut *$connection)
            .await?;
            if rows.is_empty() {
                let end = head.check_end(recorded);
                break end.map_err(|broken| StoreError::AuditBroken(broken.after_start(start)));
            }
            head = check_rows(start, head, &rows)?;
            after = i64::try_from(head.seq).unwrap_or(i64::MAX);
        }
    }};
}

fn check_rows(start: Head, mut head: Head, rows: &[impl DbRow]) -> Result<Head> {
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
        in_transaction!(self.db(), Lock::Audit, |connection| {
            let mut head = recorded_head!(connection).unwrap_or(Head::EMPTY);
            let mut left = entries.as_slice();
            while let Some(size) = ROWS_AT_ONCE.into_iter().find(|size| *size <= left.len()) {
                let (now, later) = left.split_at(size);
                let mut insert = sqlx::query(insert_of(size));
                for entry in now {
                    let next = head.next(entry);
                    insert = insert
                        .bind(i64::try_from(next.seq).unwrap_or(i64::MAX))
                        .bind(DbTime::new(entry.at))
                        .bind(entry.actor_token_id.map(|id| DbUuid(id.0)))
                        .bind(entry.actor_name.as_deref())
                        .bind(entry.workspace_id.map(|id| DbUuid(id.0)))
                        .bind(entry.session_id.map(|id| DbUuid(id.0)))
                        .bind(entry.tool.as_str())
                        .bind(entry.outcome.as_str())
                        .bind(entry.error_code.as_deref())
                        .bind(i64::try_from(entry.duration_ms).unwrap_or(i64::MAX))
                        .bind(Json(&entry.request))
                        .bind(entry.request_id.as_deref())
                        .bind(head.hash.to_vec())
                        .bind(next.hash.to_vec());
                    head = next;
                }
                insert.execute(&mut *connection).await?;
                left = later;
            }
            sqlx::query(
                "INSERT INTO settings (key, value) VALUES ($1, $2)
                 ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value",
            )
            .bind(HEAD)
            .bind(head.to_text())
            .execute(&mut *connection)
            .await?;
            Ok(head.seq)
        })
    }

    /// Reads the whole log and gives the number of its last row, which counts the rows that retention removed too,
    /// or [`StoreError::AuditBroken`] with the first row that is not as it was written. Rows that are appended
    /// meanwhile are not looked at.
    pub async fn verify_audit(&self) -> Result<u64> {
        match self.db() {
            Db::Sqlite { read, .. } => {
                let transaction = read.begin().await?;
                finish!(transaction, |connection| verify_chain!(connection))
            }
            Db::Postgres(pool) => {
                // One state of the log and of its head, however long it takes.
                let transaction = pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
                finish!(transaction, |connection| verify_chain!(connection))
            }
        }
    }

    /// A page of at most `limit` (up to 500) rows, newest first.
    pub async fn audit_page(
        &self,
        filter: &AuditFilter,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<AuditPage> {
        let before = cursor.map(page::parse_seq_cursor).transpose()?;
        let mut records: Vec<AuditRecord> = reading!(self.db(), |connection| {
            let rows = sqlx::query(concat!(
                "SELECT ",
                columns!(),
                " FROM tool_audit
                 WHERE ($1 IS NULL OR workspace_id = $1)
                   AND ($2 IS NULL OR tool = $2)
                   AND ($3 IS NULL OR outcome = $3)
                   AND ($4 IS NULL OR at >= $4)
                   AND ($5 IS NULL OR at < $5)
                   AND ($6 IS NULL OR seq < $6)
                 ORDER BY seq DESC LIMIT $7"
            ))
            .bind(filter.workspace_id.map(|id| DbUuid(id.0)))
            .bind(filter.tool.as_deref().map(clean))
            .bind(filter.outcome.map(AuditOutcome::as_str))
            .bind(filter.since.map(DbTime::new))
            .bind(filter.until.map(DbTime::new))
            .bind(before)
            .bind(page::rows_wanted(limit))
            .fetch_all(&mut *connection)
            .await?;
            let read = rows.iter().map(|row| Ok(AuditRow::from_row(row)?.into_record()));
            read.collect::<Result<_>>()?
        });
        let next_cursor = page::cut(&mut records, limit, |last| page::seq_cursor(last.seq));
        Ok(AuditPage { records, next_cursor })
    }
}
