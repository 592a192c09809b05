//! Verifies exported rows of the audit log, without the database.
//!
//! An export is a file of JSON lines, one [`AuditRecord`] each, oldest first. Several exports that follow each other
//! verify as one. They may overlap: pruning that was interrupted leaves rows in the log that the next export has again.
//! An overlap is accepted if it ends in the same hash, since then every row in it is the same.
//!
//! With an anchor, the exports must reach the anchor's row and have its hash there: then the exports and the log that
//! is kept form one chain.

use std::fmt;

use crate::audit::AuditRecord;
use crate::audit_chain::{AuditAnchor, AuditFault, BrokenAudit, ChainedRow, Head, parse_hash};
use crate::types::to_microseconds;

/// The longest line of an export.
const MAX_LINE_BYTES: usize = 4 << 20;

/// The first fault of exported rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {fault}")]
pub struct BrokenExport {
    /// The first line that is wrong, counted over all exports from 1.
    pub line: u64,
    /// The fault.
    pub fault: ExportFault,
}

/// A difference between the exported rows and the rows that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportFault {
    /// The line is not a row as the export writes it.
    NotARecord,
    /// The row does not follow the one before it.
    Chain(BrokenAudit),
    /// The row has the number of the anchor, but another hash.
    NotTheAnchor,
    /// The exports end before the row of the anchor, which is this one.
    EndsBeforeAnchor(u64),
    /// The exports repeat rows and end before the last row that they had already reached, which is this one.
    EndsInOverlap(u64),
    /// There is no row at all.
    Empty,
    /// The anchor's hash is not 64 hexadecimal digits.
    BadAnchor,
}

impl fmt::Display for ExportFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotARecord => f.write_str("it is not a row of the audit log as an export writes it"),
            Self::Chain(broken) => broken.fmt(f),
            Self::NotTheAnchor => f.write_str("the row does not have the hash of the log's anchor"),
            Self::EndsBeforeAnchor(seq) => {
                write!(f, "the rows end before row {seq}, the log's anchor: an export is missing")
            }
            Self::EndsInOverlap(seq) => write!(f, "rows are repeated and end before row {seq}"),
            Self::Empty => f.write_str("there are no rows"),
            Self::BadAnchor => f.write_str("the anchor's hash is not 64 hexadecimal digits"),
        }
    }
}

/// Exported rows that form a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// The first row; 1 if nothing is missing before it.
    pub first_seq: u64,
    /// The last row.
    pub last_seq: u64,
    /// The hash of the last row, in hexadecimal.
    pub last_hash: String,
}

/// Verifies exports line by line.
#[derive(Debug)]
pub struct ExportVerifier {
    anchor: Option<Head>,
    first_seq: u64,
    head: Option<Head>,
    /// In an overlap: the row that it must reach.
    must_meet: Option<Head>,
    line: u64,
}

/// Verifies the lines of exports that follow each other, and that they reach the anchor, if one is given.
pub fn verify_export<I>(lines: I, anchor: Option<&AuditAnchor>) -> Result<ExportSummary, BrokenExport>
where
    I: IntoIterator<Item: AsRef<str>>,
{
    let mut verifier = ExportVerifier::new(anchor)?;
    for line in lines {
        verifier.line(line.as_ref())?;
    }
    verifier.finish()
}

impl ExportVerifier {
    /// A verifier that has seen no line.
    pub fn new(anchor: Option<&AuditAnchor>) -> Result<Self, BrokenExport> {
        let bad = BrokenExport { line: 0, fault: ExportFault::BadAnchor };
        let anchor = anchor.map(|anchor| anchor.head().ok_or(bad)).transpose()?;
        Ok(Self { anchor, first_seq: 0, head: None, must_meet: None, line: 0 })
    }

    /// Verifies the next line; an empty one is skipped.
    pub fn line(&mut self, line: &str) -> Result<(), BrokenExport> {
        self.line += 1;
        let line = line.trim();
        if line.is_empty() {
            return Ok(());
        }
        let record = parse(line).ok_or_else(|| self.broken(ExportFault::NotARecord))?;
        self.record(&record).map_err(|fault| self.broken(fault))
    }

    fn record(&mut self, record: &AuditRecord) -> Result<(), ExportFault> {
        let hashes = parse_hash(&record.prev_hash).zip(parse_hash(&record.hash));
        let (prev_hash, hash) = hashes.ok_or(ExportFault::NotARecord)?;
        let before = self.before(record.seq, prev_hash)?;
        let row = ChainedRow { seq: record.seq, entry: &record.entry, prev_hash: &prev_hash, hash: &hash };
        let head = before.check(&row).map_err(ExportFault::Chain)?;
        if let Some(meet) = self.must_meet.filter(|meet| meet.seq == head.seq) {
            if meet != head {
                let broken = BrokenAudit { seq: head.seq, fault: AuditFault::Unlinked };
                return Err(ExportFault::Chain(broken));
            }
            self.must_meet = None;
        }
        for passed in [before, head] {
            if self.anchor.is_some_and(|anchor| anchor.seq == passed.seq && anchor != passed) {
                return Err(ExportFault::NotTheAnchor);
            }
        }
        self.head = Some(head);
        Ok(())
    }

    /// The head that the row must follow.
    fn before(&mut self, seq: u64, prev_hash: [u8; 32]) -> Result<Head, ExportFault> {
        let claimed = match seq {
            0 => return Err(ExportFault::Chain(BrokenAudit { seq, fault: AuditFault::Unlinked })),
            1 => Head::EMPTY,
            seq => Head { seq: seq - 1, hash: prev_hash },
        };
        match self.head {
            None => {
                self.first_seq = seq;
                Ok(claimed)
            }
            // The next export begins with rows that were there already.
            Some(head) if (self.first_seq..=head.seq).contains(&seq) && self.must_meet.is_none() => {
                self.must_meet = Some(head);
                Ok(claimed)
            }
            Some(head) => Ok(head),
        }
    }

    /// Ends the verification.
    pub fn finish(self) -> Result<ExportSummary, BrokenExport> {
        let Some(head) = self.head else { return Err(self.broken(ExportFault::Empty)) };
        if let Some(meet) = self.must_meet {
            return Err(self.broken(ExportFault::EndsInOverlap(meet.seq)));
        }
        if let Some(anchor) = self.anchor.filter(|anchor| anchor.seq > head.seq) {
            return Err(self.broken(ExportFault::EndsBeforeAnchor(anchor.seq)));
        }
        Ok(ExportSummary { first_seq: self.first_seq, last_seq: head.seq, last_hash: hex::encode(head.hash) })
    }

    fn broken(&self, fault: ExportFault) -> BrokenExport {
        BrokenExport { line: self.line, fault }
    }
}

impl AuditRecord {
    /// The row as a line of an export, without a line break.
    pub fn to_line(&self) -> String {
        // All its fields have a form in JSON.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Reads a line. Content that the hash does not cover is refused: other fields, finer times.
fn parse(line: &str) -> Option<AuditRecord> {
    if line.len() > MAX_LINE_BYTES {
        return None;
    }
    let value: serde_json::Value = serde_json::from_str(line).ok()?;
    let record: AuditRecord = serde_json::from_value(value.clone()).ok()?;
    if record.seq >= i64::MAX.unsigned_abs() {
        return None;
    }
    let is_whole = serde_json::to_value(&record).ok()? == value;
    (is_whole && to_microseconds(record.entry.at) == record.entry.at).then_some(record)
}

#[cfg(test)]
mod tests {
    use chrono::{DateTime, TimeDelta};
    use emergent_wire::WorkspaceId;
    use serde_json::json;

    use super::*;
    use crate::audit::{AuditEntry, AuditOutcome};

    fn lines(count: u64) -> Vec<String> {
        let start = DateTime::from_timestamp_micros(1_800_000_000_000_001).unwrap();
        let mut head = Head::EMPTY;
        (1..=count)
            .map(|seq| {
                let entry = AuditEntry {
                    at: start + TimeDelta::milliseconds(i64::try_from(seq).unwrap()),
                    actor_token_id: None,
                    actor_name: Some("ci ü".into()),
                    workspace_id: Some(WorkspaceId::generate()),
                    session_id: None,
                    tool: "bash".into(),
                    outcome: AuditOutcome::Denied,
                    error_code: None,
                    duration_ms: u64::MAX / 2,
                    request: json!({ "z": [1, u64::MAX, "0.5"], "a": { "c": null, "b": "\n" } }),
                    request_id: None,
                };
                let next = head.next(&entry);
                let (prev_hash, hash) = (hex::encode(head.hash), hex::encode(next.hash));
                head = next;
                AuditRecord { seq, entry, prev_hash, hash }.to_line()
            })
            .collect()
    }

    fn anchor(line: &str) -> AuditAnchor {
        let record: AuditRecord = serde_json::from_str(line).unwrap();
        AuditAnchor { seq: record.seq, hash: record.hash, at: record.entry.at }
    }

    fn fault(lines: &[String], anchor: Option<&AuditAnchor>) -> (u64, ExportFault) {
        let broken = verify_export(lines, anchor).expect_err("nothing was found");
        (broken.line, broken.fault)
    }

    fn chain(seq: u64, fault: AuditFault) -> ExportFault {
        ExportFault::Chain(BrokenAudit { seq, fault })
    }

    #[test]
    fn whole_and_partial_exports_reach_the_anchor() {
        let all = lines(10);
        let summary = verify_export(&all, Some(&anchor(&all[9]))).unwrap();
        assert_eq!((summary.first_seq, summary.last_seq, summary.last_hash), (1, 10, anchor(&all[9]).hash));
        // Interrupted pruning leaves the anchor in the middle. The log continues at the anchor.
        for cut in [0, 4, 9] {
            verify_export(&all, Some(&anchor(&all[cut]))).unwrap();
        }
        let summary = verify_export(&all[4..], Some(&anchor(&all[3]))).unwrap();
        assert_eq!((summary.first_seq, summary.last_seq), (5, 10));
        verify_export(&all[4..], None).unwrap();
    }

    #[test]
    fn exports_that_overlap_verify_if_the_rows_are_the_same() {
        let all = lines(10);
        let overlapping = |from: usize, to: usize| [&all[..7], &all[from..to]].concat();
        assert_eq!(verify_export(overlapping(4, 10), None).unwrap().last_seq, 10);
        assert_eq!(verify_export(overlapping(0, 7), None).unwrap().last_seq, 7);
        assert_eq!(fault(&overlapping(4, 6), None), (9, ExportFault::EndsInOverlap(7)));
        let other = lines(10);
        let mixed = [&all[..7], &other[4..]].concat();
        assert_eq!(fault(&mixed, None), (10, chain(7, AuditFault::Unlinked)));
    }

    #[test]
    fn changes_of_an_export_are_found() {
        let all = lines(6);
        let with = |line: usize, text: String| {
            let mut lines = all.clone();
            lines[line] = text;
            lines
        };
        let changed = with(2, all[2].replace("bash", "read"));
        assert_eq!(fault(&changed, None), (3, chain(3, AuditFault::Changed)));
        let mut removed = all.clone();
        removed.remove(2);
        assert_eq!(fault(&removed, None), (3, chain(3, AuditFault::Missing)));
        let mut swapped = all.clone();
        swapped.swap(2, 3);
        assert_eq!(fault(&swapped, None), (3, chain(3, AuditFault::Missing)));
        let unlinked = with(0, lines(1).remove(0));
        assert_eq!(fault(&unlinked, None), (2, chain(2, AuditFault::Unlinked)));

        for text in [
            "{}".to_owned(),
            "nonsense".to_owned(),
            all[2].replacen('{', r#"{"note":"not hashed","#, 1),
            all[2].replace(".003001Z", ".003001500Z"),
            all[2].replace(r#""session_id":null,"#, ""),
            all[2].replace(r#""seq":3,"#, &format!(r#""seq":{},"#, u64::MAX)),
        ] {
            assert_eq!(fault(&with(2, text.clone()), None), (3, ExportFault::NotARecord), "{text}");
        }
        assert_eq!(fault(&[], None), (0, ExportFault::Empty));
    }

    #[test]
    fn an_anchor_that_the_exports_do_not_reach_is_found() {
        let all = lines(6);
        assert_eq!(fault(&all[..5], Some(&anchor(&all[5]))), (5, ExportFault::EndsBeforeAnchor(6)));
        let other = anchor(&lines(6)[5]);
        assert_eq!(fault(&all, Some(&other)), (6, ExportFault::NotTheAnchor));
        let other = AuditAnchor { seq: 3, ..other };
        assert_eq!(fault(&all[3..], Some(&other)), (1, ExportFault::NotTheAnchor));
        let bad = AuditAnchor { hash: "x".into(), ..other };
        assert_eq!(fault(&all, Some(&bad)), (0, ExportFault::BadAnchor));
    }
}
