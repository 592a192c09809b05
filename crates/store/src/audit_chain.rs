//! The hash chain of the audit log, without the database.
//!
//! ```text
//! hash(n) = SHA-256( hash(n-1) ‖ encoding of row n ),  hash(0) = 32 zero bytes
//! ```
//!
//! The encoding has every column in a fixed order, each with its length, so no two rows have the same one. The
//! sequence number and hash of the last row, the head, are kept outside the table; so a row that was changed,
//! removed, put elsewhere or cut off the end is found. A program that can write the whole
//! database can also compute a new chain. To detect that, keep a copy of the head elsewhere.
//!
//! Retention removes rows from the begin of the log. The sequence number and hash of the last removed row, the
//! *anchor*, are kept outside the table too: the chain begins there, so the first kept row must name the anchor's
//! hash as its `prev_hash`. Exports of the removed rows end at the anchor
//! ([`ExportVerifier`](crate::ExportVerifier)).

use std::fmt;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::audit::AuditEntry;

pub(crate) type Hash = [u8; 32];

/// The first fault of the audit log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at row {seq}: {fault}")]
pub struct BrokenAudit {
    /// The first row that is not as it was written.
    pub seq: u64,
    /// The fault.
    pub fault: AuditFault,
}

/// A difference between the audit log and the log that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditFault {
    /// The row's content does not match its hash.
    Changed,
    /// The row does not follow the one before it: one of the two was replaced or moved.
    Unlinked,
    /// The row is missing between others.
    Missing,
    /// The row and all after it are missing: the log was cut off.
    CutOff,
    /// The row is beyond the recorded end of the log.
    Beyond,
    /// The recorded end of the log is missing or not the last row's.
    WrongHead,
    /// The row does not follow the last row that retention removed: the anchor was changed, or the row was.
    WrongAnchor,
}

impl fmt::Display for AuditFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Changed => "its content was changed after it was written",
            Self::Unlinked => "it does not follow the row before it; one of them was replaced or moved",
            Self::Missing => "it is missing",
            Self::CutOff => "it and all rows after it are missing",
            Self::Beyond => "it is beyond the recorded end of the log",
            Self::WrongHead => "the recorded end of the log does not belong to it",
            Self::WrongAnchor => "it does not follow the recorded last row that retention removed",
        })
    }
}

/// The end of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) seq: u64,
    pub(crate) hash: Hash,
}

impl Head {
    /// The head of an empty log.
    pub(crate) const EMPTY: Self = Self { seq: 0, hash: [0; 32] };

    /// The head after one more row.
    pub(crate) fn next(&self, entry: &AuditEntry) -> Self {
        let seq = self.seq + 1;
        let hash = row_hash(&self.hash, seq, entry);
        Self { seq, hash }
    }

    pub(crate) fn to_text(self) -> String {
        format!("{}:{}", self.seq, hex::encode(self.hash))
    }

    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let (seq, digits) = text.split_once(':')?;
        // The column is signed.
        let seq = seq.parse().ok().filter(|seq| *seq < i64::MAX.unsigned_abs())?;
        Some(Self { seq, hash: parse_hash(digits)? })
    }

    /// Checks the next row of the log against the rows before it.
    pub(crate) fn check(&self, row: &ChainedRow<'_>) -> Result<Self, BrokenAudit> {
        let seq = self.seq + 1;
        let fault = |fault| Err(BrokenAudit { seq, fault });
        if row.seq > seq {
            return fault(AuditFault::Missing);
        }
        if row.seq < seq || row.prev_hash != self.hash {
            return fault(AuditFault::Unlinked);
        }
        let next = self.next(row.entry);
        if row.hash != next.hash {
            return fault(AuditFault::Changed);
        }
        Ok(next)
    }

    /// Checks the recorded head against the last row of the log, which is `self`.
    pub(crate) fn check_end(&self, recorded: Option<Head>) -> Result<u64, BrokenAudit> {
        let broken = |seq, fault| Err(BrokenAudit { seq, fault });
        match recorded.unwrap_or(Head::EMPTY) {
            head if head == *self => Ok(self.seq),
            head if head.seq > self.seq => broken(self.seq + 1, AuditFault::CutOff),
            head if head.seq == self.seq || recorded.is_none() => broken(self.seq, AuditFault::WrongHead),
            head => broken(head.seq + 1, AuditFault::Beyond),
        }
    }
}

impl BrokenAudit {
    /// Blames the anchor when the first row after `start` does not follow it.
    pub(crate) fn after_start(self, start: Head) -> Self {
        let is_link = !matches!(self.fault, AuditFault::Missing | AuditFault::Changed | AuditFault::CutOff);
        if start.seq > 0 && self.seq <= start.seq + 1 && is_link {
            return Self { fault: AuditFault::WrongAnchor, ..self };
        }
        self
    }
}

/// The start of the kept part of the log: the last row that retention removed. Rows are numbered from 1, so `seq`
/// is also the number of rows that were removed in all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditAnchor {
    /// The number of that row.
    pub seq: u64,
    /// Its hash, in hexadecimal.
    pub hash: String,
    /// The time of its removal.
    pub at: DateTime<Utc>,
}

impl AuditAnchor {
    pub(crate) fn new(head: Head, at: DateTime<Utc>) -> Self {
        Self { seq: head.seq, hash: hex::encode(head.hash), at }
    }

    /// The head that the kept rows follow; none if the hash is no hash.
    pub(crate) fn head(&self) -> Option<Head> {
        Some(Head { seq: self.seq, hash: parse_hash(&self.hash)? })
    }

    pub(crate) fn to_text(&self) -> String {
        format!("{}:{}:{}", self.seq, self.hash, self.at.timestamp_micros())
    }

    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let (head, micros) = text.rsplit_once(':')?;
        let at = DateTime::from_timestamp_micros(micros.parse().ok()?)?;
        Some(Self::new(Head::from_text(head)?, at))
    }
}

/// Reads a hash in hexadecimal.
pub(crate) fn parse_hash(digits: &str) -> Option<Hash> {
    let mut hash = [0; 32];
    hex::decode_to_slice(digits, &mut hash).ok()?;
    Some(hash)
}

/// A row as it was found in the log.
pub(crate) struct ChainedRow<'a> {
    pub(crate) seq: u64,
    pub(crate) entry: &'a AuditEntry,
    pub(crate) prev_hash: &'a [u8],
    pub(crate) hash: &'a [u8],
}

fn row_hash(prev: &Hash, seq: u64, entry: &AuditEntry) -> Hash {
    let mut encoding = Encoding(Sha256::new());
    encoding.0.update(prev);
    encoding.field(Some(b"emergent audit row 1"));
    encoding.field(Some(&seq.to_be_bytes()));
    encoding.field(Some(&entry.at.timestamp_micros().to_be_bytes()));
    encoding.field(entry.actor_token_id.as_ref().map(|id| id.0.as_bytes().as_slice()));
    encoding.field(entry.actor_name.as_deref().map(str::as_bytes));
    encoding.field(entry.workspace_id.as_ref().map(|id| id.0.as_bytes().as_slice()));
    encoding.field(entry.session_id.as_ref().map(|id| id.0.as_bytes().as_slice()));
    encoding.field(Some(entry.tool.as_bytes()));
    encoding.field(Some(entry.outcome.as_str().as_bytes()));
    encoding.field(entry.error_code.as_deref().map(str::as_bytes));
    encoding.field(Some(&entry.duration_ms.to_be_bytes()));
    encoding.field(Some(canonical(&entry.request).as_bytes()));
    encoding.field(entry.request_id.as_deref().map(str::as_bytes));
    encoding.0.finalize().into()
}

struct Encoding(Sha256);

impl Encoding {
    fn field(&mut self, value: Option<&[u8]>) {
        match value {
            None => self.0.update([0]),
            Some(bytes) => {
                self.0.update([1]);
                self.0.update((bytes.len() as u64).to_be_bytes());
                self.0.update(bytes);
            }
        }
    }
}

/// JSON with its fields in order, as the engines don't keep the order they were written in.
fn canonical(value: &Value) -> String {
    let mut out = String::new();
    write_canonical(&mut out, value);
    out
}

fn write_canonical(out: &mut String, value: &Value) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_canonical(out, item);
            }
            out.push(']');
        }
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_unstable_by_key(|(name, _)| *name);
            out.push('{');
            for (index, (name, value)) in fields.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                out.push_str(&Value::from(name.as_str()).to_string());
                out.push(':');
                write_canonical(out, value);
            }
            out.push('}');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

/// JSON whose numbers read back the same from both engines: those that are not integers of 64 bits become text,
/// as PostgreSQL keeps numbers as decimals.
pub(crate) fn exact_numbers(value: Value) -> Value {
    match value {
        Value::Number(number) if !number.is_i64() && !number.is_u64() => Value::String(number.to_string()),
        Value::Array(items) => items.into_iter().map(exact_numbers).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (name, exact_numbers(value))).collect()
        }
        other => other,
    }
}
