//! Workspaces for tests.

use std::path::Path;
use std::sync::Arc;

use emergent_providers::Providers;
use emergent_store::{SealingKey, Store, StoreConfig};

use super::Workspaces;
use crate::config::Settings;

/// Workspaces with a new database in this directory, and without providers.
pub(crate) async fn without_providers(directory: &Path) -> Arc<Workspaces> {
    let store = Store::open(StoreConfig::Sqlite(directory.join("emergent.db"))).await.unwrap();
    let key = SealingKey::load_or_create(&directory.join("key")).unwrap();
    Workspaces::new(store, key, Settings::default(), Providers::none())
}
