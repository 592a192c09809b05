//! Retention of the audit log: export of the oldest rows, and their removal.
//!
//! ```text
//!   exported and removed      anchor   kept
//! 1 ─── 2 ─── 3 ─── … ─── n-1 ─── n ◀── n+1 ─── … ─── head
//! ```
//!
//! *Pruning* removes rows from the beginning of the log in batches. Each batch is one transaction that also moves the
//! anchor ([`audit_chain`](crate::audit_chain)) to the last removed row. So the log is valid after every batch, and
//! a server that is killed between two batches has only removed fewer rows. A batch holds the lock of the audit log,
//! as an append does: an append waits for one batch at most, and two servers remove batches in turn.
//!
//! A batch checks the chain of its rows before it removes them. Pruning never destroys the evidence of a change: it
//! fails, and the rows stay.

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use crate::audit::{ANCHOR, AUDIT, AuditRecord, AuditRow, recorded_anchor, recorded_head, recorded_start};
use crate::audit_chain::{AuditAnchor, AuditFault, BrokenAudit, Head};
use crate::db::Lock;
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::query::query;
use crate::row::Row;
use crate::settings;
use crate::types::to_microseconds;

/// The number of rows that one transaction removes. Appends wait for it, and it takes a few milliseconds.
const PRUNE_BATCH: i64 = 500;
/// The most rows that one call exports.
const MAX_EXPORT: u32 = 1000;

/// The oldest rows of the log. The range ends before the first row that is not in it, so it has no gap even if times
/// are out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditRange {
    /// Rows that are older than this.
    pub before: DateTime<Utc>,
    /// No row after this one, such as the last that was exported.
    pub through: Option<u64>,
}

impl AuditRange {
    fn contains(&self, row: &AuditRow) -> bool {
        row.entry.at < to_microseconds(self.before) && self.through.is_none_or(|last| row.seq <= last)
    }
}

/// The rows that one call has pruned. The caller appends it to the log as an entry of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrunedRange {
    /// The number of removed rows.
    pub removed: u64,
    /// The first of them.
    pub first_seq: u64,
    /// The last of them. Another server that pruned at the same time may have removed some in between.
    pub anchor: AuditAnchor,
    /// Whether the whole range was removed. If not, an error ended the pruning early; it is in the log.
    pub complete: bool,
}

impl PrunedRange {
    /// For [`AuditEntry::request`](crate::AuditEntry::request). It puts the anchor's hash into the chain, so that a later change
    /// of the anchor contradicts a row of the log.
    pub fn summary(&self) -> Value {
        json!({
            "removed": self.removed,
            "first_seq": self.first_seq,
            "last_seq": self.anchor.seq,
            "last_hash": self.anchor.hash,
            "complete": self.complete,
        })
    }
}

/// Checks the rows of a batch that are in the range. `start` is the head before them; returns the head after them.
fn check_rows_in_range(start: Head, recorded: Head, range: &AuditRange, rows: &[Row]) -> Result<Head> {
    let mut head = start;
    for row in rows {
        let row = AuditRow::following(head, row)?;
        if !range.contains(&row) {
            break;
        }
        head = row.check(head).map_err(|broken| StoreError::AuditBroken(broken.after_start(start)))?;
    }
    let broken = |seq, fault| Err(StoreError::AuditBroken(BrokenAudit { seq, fault }));
    if head.seq > recorded.seq {
        return broken(recorded.seq + 1, AuditFault::Beyond);
    }
    if head.seq == recorded.seq && head != recorded {
        return broken(head.seq, AuditFault::WrongHead);
    }
    Ok(head)
}

impl Store {
    /// The last row that retention removed; none if every row is there.
    pub async fn audit_anchor(&self) -> Result<Option<AuditAnchor>> {
        recorded_anchor(&mut self.db().reader().await?).await
    }

    /// Returns the rows of the range after row `after`, oldest first, and at most `limit` (up to 1000) of them. Without
    /// `after`, it begins with the oldest row. The list is empty if no row is left. Each row is one line of the export
    /// ([`AuditRecord::to_line`]).
    pub async fn export_audit(
        &self,
        after: Option<u64>,
        range: &AuditRange,
        limit: u32,
    ) -> Result<Vec<AuditRecord>> {
        let rows = AUDIT
            .select("WHERE seq > $1 ORDER BY seq LIMIT $2")
            .bind(after.map_or(i64::MIN, |after| i64::try_from(after).unwrap_or(i64::MAX)))
            .bind(i64::from(limit.clamp(1, MAX_EXPORT)))
            .fetch_all(&mut self.db().reader().await?)
            .await?;
        let rows = rows.iter().map(AuditRow::from_row).collect::<Result<Vec<_>>>()?;
        // Another server has pruned rows that this export has not read yet.
        if let (Some(after), Some(first)) = (after, rows.first())
            && first.seq != after + 1
        {
            let missing = BrokenAudit { seq: after + 1, fault: AuditFault::Missing };
            return Err(StoreError::AuditBroken(missing));
        }
        Ok(rows.into_iter().take_while(|row| range.contains(row)).map(AuditRow::into_record).collect())
    }

    /// Removes the rows of the range. Returns None if there are none. Fails with [`StoreError::AuditBroken`] before it
    /// removes a row that is not as it was written.
    pub async fn prune_audit(&self, range: &AuditRange, now: DateTime<Utc>) -> Result<Option<PrunedRange>> {
        let mut pruned: Option<PrunedRange> = None;
        loop {
            match (self.prune_batch(range, now).await, pruned.as_mut()) {
                (Ok(None), _) => return Ok(pruned),
                (Ok(Some(batch)), None) => pruned = Some(batch),
                (Ok(Some(batch)), Some(pruned)) => {
                    pruned.removed += batch.removed;
                    pruned.anchor = batch.anchor;
                }
                (Err(error), None) => return Err(error),
                (Err(error), Some(pruned)) => {
                    // The result must still report the removed rows. The next call fails with the same error.
                    tracing::warn!(
                        last_seq = pruned.anchor.seq,
                        error = &error as &dyn std::error::Error,
                        "not all old rows of the audit log were removed; it will be tried again"
                    );
                    pruned.complete = false;
                    return Ok(Some(pruned.clone()));
                }
            }
        }
    }

    async fn prune_batch(&self, range: &AuditRange, now: DateTime<Utc>) -> Result<Option<PrunedRange>> {
        self.db()
            .transaction(Lock::Audit, async |connection| {
                let start = recorded_start(connection).await?;
                let recorded = recorded_head(connection).await?.unwrap_or(Head::EMPTY);
                let first = i64::try_from(start.seq).unwrap_or(i64::MAX);
                let rows = AUDIT
                    .select("WHERE seq > $1 ORDER BY seq LIMIT $2")
                    .bind(first)
                    .bind(PRUNE_BATCH)
                    .fetch_all(connection)
                    .await?;
                let end = check_rows_in_range(start, recorded, range, &rows)?;
                if end == start {
                    return Ok(None);
                }
                query("DELETE FROM tool_audit WHERE seq > $1 AND seq <= $2")
                    .bind(first)
                    .bind(end.seq)
                    .execute(connection)
                    .await?;
                let anchor = AuditAnchor::new(end, to_microseconds(now));
                settings::write(connection, ANCHOR, &anchor.to_text()).await?;
                let (removed, first_seq) = (end.seq - start.seq, start.seq + 1);
                Ok(Some(PrunedRange { removed, first_seq, anchor, complete: true }))
            })
            .await
    }
}
