//! Settings: single values of the installation, such as its id, the check value of the sealing key, the head of the audit chain.

use std::fmt::Display;

use emergent_wire::id::InstallationId;
use uuid::Uuid;

use crate::db::{Connection, Lock};
use crate::error::{Result, RowKind, StoreError};
use crate::open::Store;
use crate::query::query;
use crate::row::Reader;
use crate::seal::{Place, SealError, SealingKey};

const INSTALLATION_ID: &str = "installation_id";
const KEY_CHECK: &str = "sealing_key_check";

/// The text that the key check seals. A wrong key can't open it.
const KEY_CHECK_TEXT: &[u8] = b"emergent";
const KEY_CHECK_PLACE: Place = Place::new("settings", "value", Uuid::nil());

impl Store {
    /// This installation's id, made at the first call; all callers get the same.
    pub async fn installation_id(&self) -> Result<InstallationId> {
        let text = self.setting_or_insert(INSTALLATION_ID, &InstallationId::generate().to_string()).await?;
        text.parse().map_err(|error: uuid::Error| corrupt(INSTALLATION_ID, error))
    }

    /// Takes the id of an installation whose database was lost. The caller checks that this one is new.
    pub async fn adopt_installation(&self, id: InstallationId) -> Result<()> {
        self.put_setting(INSTALLATION_ID, &id.to_string()).await
    }

    /// Refuses a key other than the one that this database's values are sealed with. The first key that is checked becomes
    /// that key.
    pub async fn check_key(&self, key: &SealingKey) -> Result<()> {
        let check = hex::encode(key.seal(KEY_CHECK_PLACE, KEY_CHECK_TEXT));
        let check = self.setting_or_insert(KEY_CHECK, &check).await?;
        let check = hex::decode(check).map_err(|error| corrupt(KEY_CHECK, error))?;
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

    /// Replaces a lost key. Removes the values that were sealed with it: the variables of workspaces and MCP servers. Gives
    /// the number of workspaces and servers.
    pub async fn replace_key(&self, key: &SealingKey) -> Result<u64> {
        let check = hex::encode(key.seal(KEY_CHECK_PLACE, KEY_CHECK_TEXT));
        self.db()
            .transaction(Lock::None, async |connection| {
                let removed = query(
                "UPDATE agent_workspaces SET environment_sealed = NULL WHERE environment_sealed IS NOT NULL",
            )
            .execute(connection)
            .await?;
                query("UPDATE settings SET value = $2 WHERE key = $1")
                    .bind(KEY_CHECK)
                    .bind(check.as_str())
                    .execute(connection)
                    .await?;
                Ok(removed)
            })
            .await
    }

    /// The value of a setting.
    pub async fn setting(&self, key: &str) -> Result<Option<String>> {
        read(&mut self.db().reader().await?, key).await
    }

    /// Sets a setting.
    pub async fn put_setting(&self, key: &str, value: &str) -> Result<()> {
        write(&mut self.db().writer().await?, key, value).await
    }

    /// The value of a setting, which is `value` if it had none. One caller's value wins.
    pub async fn setting_or_insert(&self, key: &str, value: &str) -> Result<String> {
        if let Some(found) = self.setting(key).await? {
            return Ok(found);
        }
        query("INSERT INTO settings (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING")
            .bind(key)
            .bind(value)
            .execute(&mut self.db().writer().await?)
            .await?;
        self.setting(key)
            .await?
            .ok_or_else(|| StoreError::NotFound { kind: RowKind::Setting, id: key.to_owned() })
    }
}

/// The value of a setting.
pub(crate) async fn read(connection: &mut Connection, key: &str) -> Result<Option<String>> {
    let row = query("SELECT value FROM settings WHERE key = $1").bind(key).fetch_optional(connection).await?;
    row.map(|row| Reader::with_key(&row, "settings", key).text("value")).transpose()
}

/// Sets a setting.
pub(crate) async fn write(connection: &mut Connection, key: &str, value: &str) -> Result<()> {
    query(
        "INSERT INTO settings (key, value) VALUES ($1, $2)
         ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value",
    )
    .bind(key)
    .bind(value)
    .execute(connection)
    .await?;
    Ok(())
}

/// The error of a setting that has another form than this program writes.
pub(crate) fn corrupt(key: &str, reason: impl Display) -> StoreError {
    let (row, reason) = (key.to_owned(), reason.to_string());
    StoreError::Corrupt { table: "settings", row, column: "value", reason }
}
