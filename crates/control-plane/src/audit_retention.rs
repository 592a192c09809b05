//! Retention of the audit log: rows that are older than the setting are exported to a file and then removed.
//!
//! ```text
//! rows ──export──▶ temporary file ──fsync, rename──▶ audit/FIRST-LAST.jsonl ──then──▶ rows removed ──▶ row `audit.prune`
//! ```
//!
//! A row is removed only after its export is on the disk. After a crash in between, the same rows are exported again. Two servers on
//! one database can export the same rows, too. Exports may therefore overlap, which `emergent audit verify --export` accepts. The
//! server never removes exports: the operator moves them to an archive.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use emergent_host::files::{create_temporary, ensure_private_directory, remove_if_there};
use emergent_store::{AuditEntry, AuditOutcome, AuditRange, AuditRecord, PrunedRange, Store, StoreError};

use crate::audit::Audit;

/// The number of rows that are read at once.
const PAGE: u32 = 500;
/// The directory of exports, below the data directory.
const EXPORTS: &str = "audit";
/// A temporary file that is older than this was left by a crash.
const MAX_EXPORT_TIME: Duration = Duration::from_secs(3600);

/// The error of exporting and removing rows.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RetentionError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the rows can't be exported to {}", path.display())]
    Export { path: PathBuf, source: io::Error },
}

/// Exports and removes the rows that are older than `retention_days`. 0 keeps all rows.
pub(crate) async fn prune(
    store: &Store,
    audit: &Audit,
    data_dir: &Path,
    retention_days: u32,
    now: DateTime<Utc>,
) -> Result<Option<PrunedRange>, RetentionError> {
    if retention_days == 0 {
        return Ok(None);
    }
    let before = now - TimeDelta::days(i64::from(retention_days));
    let range = AuditRange { before, through: None };
    let Some((file, last)) = export(store, &data_dir.join(EXPORTS), &range).await? else {
        return Ok(None);
    };
    let pruned = store.prune_audit(&AuditRange { before, through: Some(last) }, now).await?;
    if let Some(pruned) = &pruned {
        tracing::info!(rows = pruned.removed, export = %file.display(), "old rows of the audit log were exported and removed");
        audit.record(entry_of(pruned, now)).await;
    }
    Ok(pruned)
}

/// Writes the rows of a range to a file. Returns its path and the number of the last row, or None if there are no rows.
async fn export(
    store: &Store,
    directory: &Path,
    range: &AuditRange,
) -> Result<Option<(PathBuf, u64)>, RetentionError> {
    let rows = store.export_audit(None, range, PAGE).await?;
    let Some(first) = rows.first().map(|row| row.seq) else {
        return Ok(None);
    };
    let failed = |source| RetentionError::Export { path: directory.to_owned(), source };
    let (unfinished, file) = create_export(directory).map_err(failed)?;
    let written = write(store, file, rows, range).await;
    let finished = written.and_then(|last| {
        let path = directory.join(format!("{first:012}-{last:012}.jsonl"));
        rename_durably(directory, &unfinished, &path).map_err(failed)?;
        Ok(Some((path, last)))
    });
    if finished.is_err() {
        let _ = remove_if_there(&unfinished);
    }
    finished
}

/// Creates a temporary file. Removes those that crashes have left.
fn create_export(directory: &Path) -> io::Result<(PathBuf, File)> {
    ensure_private_directory(directory)?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let is_unfinished = entry.path().extension().is_some_and(|ending| ending == "new");
        let age = entry.metadata()?.modified()?.elapsed().unwrap_or_default();
        if is_unfinished && age > MAX_EXPORT_TIME {
            remove_if_there(&entry.path())?;
        }
    }
    create_temporary(&directory.join("export"))
}

/// Writes these rows and all later ones of the range. Returns the number of the last row.
async fn write(
    store: &Store,
    file: File,
    mut rows: Vec<AuditRecord>,
    range: &AuditRange,
) -> Result<u64, RetentionError> {
    let failed = |source| RetentionError::Export { path: PathBuf::from(EXPORTS), source };
    let mut file = BufWriter::new(file);
    let mut last = 0;
    while let Some(row) = rows.last() {
        last = row.seq;
        rows.iter().try_for_each(|row| writeln!(file, "{}", row.to_line())).map_err(failed)?;
        rows = store.export_audit(Some(last), range, PAGE).await?;
    }
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)?;
    Ok(last)
}

fn rename_durably(directory: &Path, unfinished: &Path, finished: &Path) -> io::Result<()> {
    fs::rename(unfinished, finished)?;
    File::open(directory)?.sync_all()
}

/// The audit entry of the removal. It has the hash of the last removed row, so a later change of the anchor contradicts the log.
fn entry_of(pruned: &PrunedRange, now: DateTime<Utc>) -> AuditEntry {
    AuditEntry {
        at: now,
        actor_token_id: None,
        actor_name: Some("emergent".to_owned()),
        workspace_id: None,
        session_id: None,
        tool: "audit.prune".to_owned(),
        outcome: if pruned.complete { AuditOutcome::Success } else { AuditOutcome::Failure },
        error_code: None,
        duration_ms: 0,
        request: pruned.summary(),
        request_id: None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use emergent_store::verify_export;

    use super::*;

    fn entry(at: DateTime<Utc>) -> AuditEntry {
        let pruned = PrunedRange { removed: 0, first_seq: 0, anchor: anchor(), complete: true };
        AuditEntry { tool: "bash".to_owned(), ..entry_of(&pruned, at) }
    }

    fn anchor() -> emergent_store::AuditAnchor {
        emergent_store::AuditAnchor { seq: 0, hash: String::new(), at: Utc::now() }
    }

    fn exports(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory.join(EXPORTS)).into_iter().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn old_rows_are_exported_before_they_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let database = emergent_store::StoreConfig::Sqlite(directory.path().join("emergent.db"));
        let store = Store::open(database).await.unwrap();
        let audit = Audit::start(store.clone());
        let now = Utc::now();
        let old = (0..1200).map(|n| entry(now - TimeDelta::days(40) + TimeDelta::seconds(n)));
        store.append_audits(old.chain([entry(now)]).collect()).await.unwrap();
        let path = directory.path();

        assert!(prune(&store, &audit, path, 0, now).await.unwrap().is_none(), "0 keeps all rows");
        assert!(prune(&store, &audit, path, 90, now).await.unwrap().is_none(), "none is that old");
        assert!(exports(path).is_empty());
        // Rows that can't be exported are not removed.
        fs::write(path.join(EXPORTS), "in the way").unwrap();
        assert!(matches!(prune(&store, &audit, path, 30, now).await, Err(RetentionError::Export { .. })));
        assert_eq!(store.audit_anchor().await.unwrap(), None);
        fs::remove_file(path.join(EXPORTS)).unwrap();

        let pruned = prune(&store, &audit, path, 30, now).await.unwrap().unwrap();
        assert_eq!((pruned.removed, pruned.first_seq, pruned.complete), (1200, 1, true));
        assert_eq!(exports(path), ["000000000001-000000001200.jsonl"]);
        let text = fs::read_to_string(path.join(EXPORTS).join(&exports(path)[0])).unwrap();
        let anchor = store.audit_anchor().await.unwrap();
        assert_eq!(verify_export(text.lines(), anchor.as_ref()).unwrap().last_seq, 1200);
        // The log goes on and has an entry of the removal.
        assert_eq!(store.verify_audit().await.unwrap(), 1202);
        let page = store.audit_page(&emergent_store::AuditFilter::default(), None, 10).await.unwrap();
        assert_eq!(
            page.records.iter().map(|row| row.entry.tool.as_str()).collect::<Vec<_>>(),
            ["audit.prune", "bash"]
        );
        assert_eq!(page.records[0].entry.request["last_hash"], pruned.anchor.hash.as_str());
        assert!(prune(&store, &audit, path, 30, now).await.unwrap().is_none());
        store.close().await;
    }
}
