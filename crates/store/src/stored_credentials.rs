//! Removes credentials from git URLs that earlier versions stored.
//!
//! Runs once, in the transaction of migration 5. It looks at every text of `agent_workspaces` that can hold a git
//! URL: `repository_url` itself, and `error`, `metadata` and `placement`, which quote git's messages. It leaves
//! `mcp_config` alone, as a server's arguments are used as they are at each start, and the sealed environment. Rows
//! of the audit log can't change without breaking the chain.
//!
//! A credential that was stored in the clear may be in backups too, so its owner must replace it. The number of
//! changed rows is logged and kept in the settings until the server has reported it; values are never logged.

use emergent_wire::git_url::{GitUrl, redact_urls};
use serde_json::Value;
use uuid::Uuid;

use crate::db::{reading, writing};
use crate::error::Result;
use crate::open::Store;
use crate::settings;
use crate::types::{DbRow, Reader};

/// The setting with the number of rows that were changed.
pub(crate) const REMOVED: &str = "stored_credentials_removed";
/// How many rows are in memory at once.
pub(crate) const BATCH: i64 = 200;

/// What is to be written to one row; columns without a credential are none.
pub(crate) struct CleanedRow {
    pub(crate) id: Uuid,
    pub(crate) repository_url: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) metadata: Option<Value>,
    pub(crate) placement: Option<Value>,
}

impl CleanedRow {
    /// The row without credentials. A damaged column is left as it is: it must not keep the server from starting.
    pub(crate) fn from_row(row: &impl DbRow) -> Result<Self> {
        let row = Reader::by_id(row, "agent_workspaces");
        let changed = |text: &str, clean: &str| (text != clean).then(|| clean.to_owned());
        let url = row.text_or_null("repository_url").unwrap_or_default();
        let error = row.text_or_null("error").unwrap_or_default();
        let json = |column| row.json_or_null::<Value>(column).unwrap_or_default();
        Ok(Self {
            id: row.uuid("id")?,
            repository_url: url.and_then(|url| changed(&url, &GitUrl::without_credentials(&url))),
            error: error.and_then(|error| changed(&error, &redact_urls(&error))),
            metadata: json("metadata").as_ref().and_then(cleaned_json),
            placement: json("placement").as_ref().and_then(cleaned_json),
        })
    }

    pub(crate) fn is_changed(&self) -> bool {
        self.repository_url.is_some()
            || self.error.is_some()
            || self.metadata.is_some()
            || self.placement.is_some()
    }
}

fn cleaned_json(value: &Value) -> Option<Value> {
    let clean = redact_json(value.clone());
    (clean != *value).then_some(clean)
}

fn redact_json(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(redact_urls(&text).into_owned()),
        Value::Array(items) => items.into_iter().map(redact_json).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, redact_json(value))).collect(),
        other => other,
    }
}

/// Removes the credentials of all rows, on a connection that finds the tables without their schema.
macro_rules! remove_stored_credentials {
    ($connection:expr) => {{
        use $crate::stored_credentials::{BATCH, CleanedRow, REMOVED};
        let mut after: Option<$crate::types::DbUuid> = None;
        let mut removed: u64 = 0;
        loop {
            let rows = sqlx::query(
                "SELECT id, repository_url, error, metadata, placement FROM agent_workspaces
                 WHERE $1 IS NULL OR id > $1 ORDER BY id LIMIT $2",
            )
            .bind(after)
            .bind(BATCH)
            .fetch_all(&mut *$connection)
            .await?;
            if rows.is_empty() {
                break;
            }
            for row in &rows {
                let row = CleanedRow::from_row(row)?;
                after = Some($crate::types::DbUuid(row.id));
                if !row.is_changed() {
                    continue;
                }
                removed += 1;
                sqlx::query(
                    "UPDATE agent_workspaces SET repository_url = COALESCE($2, repository_url),
                         error = COALESCE($3, error), metadata = COALESCE($4, metadata),
                         placement = COALESCE($5, placement)
                     WHERE id = $1",
                )
                .bind($crate::types::DbUuid(row.id))
                .bind(row.repository_url)
                .bind(row.error)
                .bind(row.metadata.map(sqlx::types::Json))
                .bind(row.placement.map(sqlx::types::Json))
                .execute(&mut *$connection)
                .await?;
            }
        }
        if removed > 0 {
            sqlx::query(
                "INSERT INTO settings (key, value) VALUES ($1, $2)
                 ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value",
            )
            .bind(REMOVED)
            .bind(removed.to_string())
            .execute(&mut *$connection)
            .await?;
            tracing::warn!(
                rows = removed,
                "removed credentials from git URLs in the database: they were stored in the clear, so replace them \
                 at their git hosts"
            );
        }
    }};
}
pub(crate) use remove_stored_credentials;

impl Store {
    /// From how many workspaces the migration removed credentials that were stored in the clear; none if there
    /// were none, or if [`Store::acknowledge_removed_credentials`] was called since.
    pub async fn removed_credentials(&self) -> Result<Option<u64>> {
        reading!(self.db(), |connection| {
            let row = sqlx::query("SELECT value FROM settings WHERE key = $1")
                .bind(REMOVED)
                .fetch_optional(&mut *connection)
                .await?;
            let text = row.map(|row| settings::value(&row, REMOVED)).transpose()?;
            let damaged = |_| settings::corrupt(REMOVED, "it is not a number".into());
            text.map(|text| text.parse().map_err(damaged)).transpose()
        })
    }

    /// The operator was told of the removed credentials.
    pub async fn acknowledge_removed_credentials(&self) -> Result<()> {
        writing!(self.db(), |connection| {
            sqlx::query("DELETE FROM settings WHERE key = $1")
                .bind(REMOVED)
                .execute(&mut *connection)
                .await?;
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn urls_are_redacted_at_any_depth_and_other_values_are_kept() {
        let value =
            json!({ "warnings": ["clone of https://u:p@host/r failed", 1], "a": { "b": "ssh://u:p@h/r" } });
        let clean = json!({ "warnings": ["clone of https://host/r failed", 1], "a": { "b": "ssh://h/r" } });
        assert_eq!(cleaned_json(&value), Some(clean.clone()));
        assert_eq!(cleaned_json(&clean), None);
    }
}
