//! The key that secrets are sealed with: read, generated at the first start, or replaced when it is lost.
//!
//! A key is generated only for a database without sealed values. Otherwise a server that has lost its key file would generate another
//! key, and would refuse the right one after the operator has restored it.

use std::path::{Path, PathBuf};

use chrono::Utc;
use emergent_store::{SealError, SealingKey, Store, StoreError};
use secrecy::ExposeSecret;

use crate::config::Settings;

/// Advice for an operator who has lost the key.
const NEW_KEY: &str = "If the key is lost: start once with --new-key, which removes the values that are sealed with it (the \
                       variables of workspaces and MCP servers) and keeps everything else";

/// The error of opening the key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file is gone, but values are sealed with its key.
    #[error(
        "the encryption key is missing: put {} back from a backup, or set EMERGENT_ENCRYPTION_KEY. {NEW_KEY}",
        .0.display()
    )]
    Missing(PathBuf),
    /// The configured key is not the one that the values are sealed with.
    #[error(
        "the encryption key is not the one that the database's values are sealed with: start with the \
         EMERGENT_ENCRYPTION_KEY, or the key file {}, that the server had before. {NEW_KEY}",
        .0.display()
    )]
    Other(PathBuf),
    /// The key can't be read or made.
    #[error("the encryption key can't be used: {0}. {NEW_KEY}")]
    Unusable(SealError),
    /// The database can't be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Opens the key of this installation.
pub(crate) async fn open(settings: &Settings, storage: &Path, store: &Store) -> Result<SealingKey, KeyError> {
    let path = storage.join("encryption-key");
    let key = match &settings.encryption_key {
        Some(key) => SealingKey::from_hex(key.expose_secret()).map_err(KeyError::Unusable)?,
        None => {
            if settings.new_key {
                set_unusable_file_aside(&path).map_err(KeyError::Unusable)?;
            }
            if !path.exists() && store.has_key().await? && !settings.new_key {
                return Err(KeyError::Missing(path));
            }
            SealingKey::load_or_create(&path).map_err(KeyError::Unusable)?
        }
    };
    match store.check_key(&key).await {
        Ok(()) => {}
        Err(StoreError::Seal(SealError::OtherKey)) if settings.new_key => {
            let workspaces = store.replace_key(&key).await?;
            tracing::warn!(workspaces, "the encryption key is a new one: variables of these are removed");
        }
        Err(StoreError::Seal(SealError::OtherKey)) => return Err(KeyError::Other(path)),
        Err(error) => return Err(error.into()),
    }
    Ok(key)
}

/// Renames a key file without a valid key, so that a new key can be generated.
fn set_unusable_file_aside(path: &Path) -> Result<(), SealError> {
    if !path.exists() || !matches!(SealingKey::load_or_create(path), Err(SealError::BadKeyFile(_))) {
        return Ok(());
    }
    let aside = path.with_extension(format!("unusable-{}", Utc::now().format("%Y%m%d-%H%M%S")));
    tracing::warn!(file = %aside.display(), "the key file has no valid key: it is renamed");
    std::fs::rename(path, aside).map_err(|source| SealError::File { path: path.to_owned(), source })
}
