//! Single values of the installation: its id, the check value of the sealing key, the head of the audit chain.

use emergent_wire::id::InstallationId;
use uuid::Uuid;

use crate::db::{Lock, in_transaction, reading, writing};
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::seal::{Place, SealError, SealingKey};
use crate::types::{DbRow, Reader};

const INSTALLATION_ID: &str = "installation_id";
const KEY_CHECK: &str = "sealing_key_check";

/// What the key check seals: the answer to whether a key is the right one.
const KEY_CHECK_TEXT: &[u8] = b"emergent";
const KEY_CHECK_PLACE: Place = Place::new("settings", "value", Uuid::nil());

impl Store {
    /// This installation's id, made at the first call; all callers get the same.
    pub async fn installation_id(&self) -> Result<InstallationId> {
        let text = self.setting_or_insert(INSTALLATION_ID, &InstallationId::generate().to_string()).await?;
        text.parse().map_err(|error: uuid::Error| corrupt(INSTALLATION_ID, error.to_string()))
    }

    /// Takes the id of an installation whose database was lost. The caller checks that this one is new.
    pub async fn adopt_installation(&self, id: InstallationId) -> Result<()> {
        self.put_setting(INSTALLATION_ID, &id.to_string()).await
    }

    /// Refuses a key other than the one that this database's values are sealed with. The first key that comes
    /// is taken for the right one.
    pub async fn check_key(&self, key: &SealingKey) -> Result<()> {
        let check = hex::encode(key.seal(KEY_CHECK_PLACE, KEY_CHECK_TEXT));
        let check = self.setting_or_insert(KEY_CHECK, &check).await?;
        let check = hex::decode(check).map_err(|error| corrupt(KEY_CHECK, error.to_string()))?;
        if *key.open(KEY_CHECK_PLACE, &check)? == KEY_CHECK_TEXT {
            Ok(())
        } else {
            Err(SealError::Damaged.into())
        }
    }

    /// Whether there may be values that are sealed with a key.
    pub async fn has_key(&self) -> Result<bool> {
        Ok(self.setting(KEY_CHECK).await?.is_some())
    }

    /// Takes a new key, as the old one is lost: removes what was sealed with it, which are the variables of workspaces and MCP
    /// servers. Says of how many.
    pub async fn replace_key(&self, key: &SealingKey) -> Result<u64> {
        let check = hex::encode(key.seal(KEY_CHECK_PLACE, KEY_CHECK_TEXT));
        in_transaction!(self.db(), Lock::None, |connection| {
            let removed = sqlx::query(
                "UPDATE agent_workspaces SET environment_sealed = NULL WHERE environment_sealed IS NOT NULL",
            )
            .execute(&mut *connection)
            .await?
            .rows_affected();
            sqlx::query("UPDATE settings SET value = $2 WHERE key = $1")
                .bind(KEY_CHECK)
                .bind(check.as_str())
                .execute(&mut *connection)
                .await?;
            Ok(removed)
        })
    }

    /// The value of a setting.
    pub async fn setting(&self, key: &str) -> Result<Option<String>> {
        reading!(self.db(), |connection| {
            let row = sqlx::query("SELECT value FROM settings WHERE key = $1")
                .bind(key)
                .fetch_optional(&mut *connection)
                .await?;
            row.map(|row| value(&row, key)).transpose()
        })
    }

    /// Sets a setting.
    pub async fn put_setting(&self, key: &str, value: &str) -> Result<()> {
        writing!(self.db(), |connection| {
            sqlx::query(
                "INSERT INTO settings (key, value) VALUES ($1, $2)
                 ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value",
            )
            .bind(key)
            .bind(value)
            .execute(&mut *connection)
            .await?;
        });
        Ok(())
    }

    /// The value of a setting, which is `value` if it had none. One caller's value wins.
    pub async fn setting_or_insert(&self, key: &str, value: &str) -> Result<String> {
        if let Some(found) = self.setting(key).await? {
            return Ok(found);
        }
        writing!(self.db(), |connection| {
            sqlx::query("INSERT INTO settings (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING")
                .bind(key)
                .bind(value)
                .execute(&mut *connection)
                .await?;
        });
        self.setting(key).await?.ok_or_else(|| StoreError::NotFound { kind: "setting", id: key.to_owned() })
    }
}

pub(crate) fn value(row: &impl DbRow, key: &str) -> Result<String> {
    Reader::with_key(row, "settings", key).text("value")
}

pub(crate) fn corrupt(key: &str, reason: String) -> StoreError {
    StoreError::Corrupt { table: "settings", row: key.to_owned(), column: "value", reason }
}
