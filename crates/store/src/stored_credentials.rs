//! Removes credentials from git URLs that earlier versions stored.
//!
//! Runs once, in the transaction of migration 5. It looks at every text of `agent_workspaces` that can hold a git
//! URL: `repository_url` itself, and `error`, `metadata` and `placement`, which quote git's messages. It leaves
//! `mcp_config` alone, as a server's arguments are used as they are at each start, and the sealed environment. Rows
//! of the audit log can't change without breaking the chain.
//!
//! A workspace whose `repository_url` had a credential is marked ([`CREDENTIAL_IN_CLONE`]): the remote in its clone has it too,
//! and only its sandbox can change that. A credential that was stored in the clear may be in backups too, so its owner must
//! replace it. The number of changed rows is logged; values are never logged.

use emergent_wire::git_url::{GitUrl, redact_urls};
use serde_json::Value;
use sqlx::types::Json;
use uuid::Uuid;

use crate::db::Connection;
use crate::error::Result;
use crate::query::query;
use crate::row::{Reader, Row};
use crate::workspace_rows::WORKSPACES;

/// A field of a workspace's metadata: true while the remote of its clone may hold a credential.
pub const CREDENTIAL_IN_CLONE: &str = "credential_in_clone";
/// The number of rows in memory at once.
const BATCH: i64 = 200;

/// The new values of one row. A column without a credential is `None`.
struct CleanedRow {
    id: Uuid,
    repository_url: Option<String>,
    error: Option<String>,
    metadata: Option<Value>,
    placement: Option<Value>,
}

impl CleanedRow {
    /// The row without credentials. A damaged column must not keep the server from starting: it is logged and left as
    /// it is.
    fn from_row(row: &Row) -> Result<Self> {
        let row = Reader::by_id(row, WORKSPACES.name);
        let changed = |text: &str, clean: &str| (text != clean).then(|| clean.to_owned());
        let url = log_damage(row.text_or_null("repository_url"));
        let error = log_damage(row.text_or_null("error"));
        let json = |column| log_damage(row.json_or_null::<Value>(column));
        let repository_url = url.and_then(|url| changed(&url, &GitUrl::without_credentials(&url)));
        let metadata = match json("metadata") {
            Some(metadata) if repository_url.is_some() => Some(marked(redact_json(metadata))),
            metadata => metadata.as_ref().and_then(cleaned_json),
        };
        Ok(Self {
            id: row.uuid("id")?,
            repository_url,
            error: error.and_then(|error| changed(&error, &redact_urls(&error))),
            metadata,
            placement: json("placement").as_ref().and_then(cleaned_json),
        })
    }

    async fn write(self, connection: &mut Connection) -> Result<()> {
        query(
            "UPDATE agent_workspaces SET repository_url = COALESCE($2, repository_url),
                 error = COALESCE($3, error), metadata = COALESCE($4, metadata),
                 placement = COALESCE($5, placement)
             WHERE id = $1",
        )
        .bind(self.id)
        .bind(self.repository_url)
        .bind(self.error)
        .bind(self.metadata.map(Json))
        .bind(self.placement.map(Json))
        .execute(connection)
        .await?;
        Ok(())
    }

    fn is_changed(&self) -> bool {
        self.repository_url.is_some()
            || self.error.is_some()
            || self.metadata.is_some()
            || self.placement.is_some()
    }
}

fn log_damage<T>(value: Result<Option<T>>) -> Option<T> {
    value.unwrap_or_else(|error| {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "a damaged value was not searched for credentials"
        );
        None
    })
}

/// The metadata of a workspace whose clone has to be cleaned.
fn marked(mut metadata: Value) -> Value {
    if let Value::Object(fields) = &mut metadata {
        fields.insert(CREDENTIAL_IN_CLONE.to_owned(), Value::Bool(true));
    }
    metadata
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
pub(crate) async fn remove_stored_credentials(connection: &mut Connection) -> Result<()> {
    let mut after: Option<Uuid> = None;
    let mut removed: u64 = 0;
    loop {
        let rows = query(
            "SELECT id, repository_url, error, metadata, placement FROM agent_workspaces
             WHERE $1 IS NULL OR id > $1 ORDER BY id LIMIT $2",
        )
        .bind(after)
        .bind(BATCH)
        .fetch_all(connection)
        .await?;
        if rows.is_empty() {
            break;
        }
        for row in &rows {
            let row = CleanedRow::from_row(row)?;
            after = Some(row.id);
            if row.is_changed() {
                removed += 1;
                row.write(connection).await?;
            }
        }
    }
    if removed > 0 {
        tracing::warn!(
            rows = removed,
            "removed user names, passwords and tokens from git URLs in the database: they were stored in the clear, \
             so replace them at their git hosts. Audit rows and snapshots may still hold them"
        );
    }
    Ok(())
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
