//! Start and shutdown: the data directory, the store, the providers, the background tasks, the listener.
//!
//! The server listens before the first recovery pass, so that a long recovery does not look like a server that is down. The readiness
//! check succeeds after the first pass.

use std::future::Future;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use chrono::Utc;
use emergent_host::files::{ensure_private_directory, write_atomically};
use emergent_providers::{ManagerAddress, ProviderConfig, ProviderError, ProviderTable, Providers};
use emergent_store::{NewToken, Store, StoreConfig, StoreError};
use emergent_wire::access::TokenScope;
use emergent_wire::id::InstallationId;
use emergent_wire::workspace::WorkspaceStatus;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use rustix::fs::Access;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use secrecy::ExposeSecret;
use tokio::net::TcpListener;

use crate::audit::Audit;
use crate::background;
use crate::config::Settings;
use crate::encryption_key::{self, KeyError};
use crate::existing::{self, ExistingError};
use crate::firecracker::{self, Embedded};
use crate::http::{self, App};
use crate::listener::{Listener, WRITE_TIMEOUT, accept, tls};
use crate::storage::{self, StorageError};
use crate::workspace::{Workspaces, make_room_for_database};

/// The name of the first admin token.
const FIRST_TOKEN: &str = "first-start";
/// The setting in the database that records that the first admin token was created.
const FIRST_TOKEN_SETTING: &str = "first_token_made";

/// The error of starting the server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The data directory can't be used.
    #[error(
        "the data directory {} can't be used: {source}; the server must be able to write it: run as its owner, or choose another \
         with --data-dir",
        path.display()
    )]
    DataDir {
        /// Its path.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The address can't be bound.
    #[error("can't listen on {address}: {source}; choose another with --listen")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The database can't be used.
    #[error("the database can't be used: {}", with_cause(.0))]
    Store(#[from] StoreError),
    /// The key that secrets are sealed with can't be used.
    #[error("{}", with_cause(.0))]
    Key(#[from] KeyError),
    /// The data directory has the files of another installation.
    #[error(transparent)]
    Existing(#[from] ExistingError),
    /// The directory for the disks of workspaces can't be used.
    #[error("{0}")]
    Storage(String),
    /// A provider can't be set up.
    #[error("a provider can't be set up: {0}")]
    Provider(#[from] ProviderError),
    /// The certificate or its key can't be used.
    #[error("TLS can't be used: {0}")]
    Tls(String),
    /// The Firecracker manager can't be started, or can't be reached with these settings.
    #[error("{0}")]
    Manager(String),
}

/// An error with its cause. Errors of libraries include the causes of the cause.
fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// A running server.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its address, such as `http://127.0.0.1:7171`.
    pub url: String,
    /// The directory of its files, which has the first admin token.
    pub data_dir: PathBuf,
    /// Whether this start has created the admin token.
    pub first_start: bool,
    /// The id of the installation.
    pub installation: InstallationId,
}

/// Raises the limit on open files to the maximum of this process. Each connection is one open file, and the default is about a
/// thousand.
pub(crate) fn raise_open_file_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(%error, limit = current, "the limit on open files can't be raised");
    }
}

/// Runs the server until `shutdown` is ready.
pub async fn serve(
    settings: Settings,
    shutdown: impl Future<Output = ()> + Send,
    on_ready: impl FnOnce(&Running) + Send,
) -> Result<(), ServeError> {
    raise_open_file_limit();
    let data_dir = prepare_data_dir(&settings.data_dir)?;
    let tls = tls::acceptor(&settings.tls).map_err(ServeError::Tls)?;
    make_room_for_database(&data_dir);
    let store = open_store(&settings, &data_dir).await?;
    let storage = storage::directory(&store, &data_dir).await.map_err(|error| match error {
        StorageError::Store(error) => error.into(),
        other => ServeError::Storage(other.to_string()),
    })?;
    let key = encryption_key::open(&settings, &storage, &store).await?;
    let mut installation = store.installation_id().await?;
    let has_workspaces = !store.workspaces_in(WorkspaceStatus::ALL).await?.is_empty();
    if let Some(adopted) = existing::check(&storage, installation, has_workspaces, settings.existing)? {
        store.adopt_installation(adopted).await?;
        tracing::warn!(installation = %adopted, "the database has adopted an installation; its disks go to quarantine");
        installation = adopted;
    }
    // For operators: containers and volumes of this server have this id as a label.
    write_private(&data_dir.join("installation-id"), &installation.to_string())
        .map_err(|source| ServeError::DataDir { path: data_dir.clone(), source })?;
    let first_start = ensure_admin_token(&store, &data_dir, &storage).await?;
    let embedded = firecracker::embed(&settings.firecracker, &storage).await?;
    let providers = providers(&settings, &storage, installation, embedded.as_ref())?;
    let audit = Audit::start(store.clone());
    let workspaces = Workspaces::new(store.clone(), key, settings.clone(), providers);
    let app = App::new(Arc::clone(&workspaces), audit.clone(), metrics_handle());

    let listener = TcpListener::bind(settings.listen)
        .await
        .map_err(|source| ServeError::Listen { address: settings.listen, source })?;
    let address =
        listener.local_addr().map_err(|source| ServeError::Listen { address: settings.listen, source })?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{address}");
    let running = Running { url, data_dir: data_dir.clone(), first_start, installation };
    write_private(&data_dir.join("server-url"), &running.url)
        .map_err(|source| ServeError::DataDir { path: data_dir.clone(), source })?;
    if !settings.is_local() && tls.is_none() {
        tracing::warn!(%address, "the server can be reached from other hosts without TLS: tokens are sent unencrypted");
    }
    workspaces.health.check_all_briefly().await;
    if let Err(error) = workspaces.context.servers.refresh(&store).await {
        tracing::warn!(%error, "the heartbeats of the servers on this database can't be exchanged");
    }
    let mut background = background::start(&workspaces, &app);
    on_ready(&running);

    let ending = async {
        shutdown.await;
        workspaces.context.events.close();
    };
    accept(Listener::Tcp(listener, tls), http::router(&app), Some(WRITE_TIMEOUT), ending).await;
    background.shutdown().await;
    app.mcp.shut_down().await;
    workspaces.sweeper.write_uses().await;
    audit.flush().await;
    leave_installation(&workspaces, &store).await;
    if let Some(embedded) = embedded {
        embedded.shut_down().await;
    }
    // Another server in this directory may have written its own address.
    let url_file = data_dir.join("server-url");
    if std::fs::read_to_string(&url_file).is_ok_and(|url| url == running.url) {
        let _ = std::fs::remove_file(url_file);
    }
    store.close().await;
    Ok(())
}

/// Removes this server from the database. The last server removes the networks and rules that no sandbox needs.
async fn leave_installation(workspaces: &Workspaces, store: &Store) {
    let is_last = match store.forget_server(store.server()).await {
        Ok(()) => workspaces.context.servers.is_last(store).await,
        Err(error) => Err(error),
    };
    match is_last {
        Ok(true) => {}
        Ok(false) => return,
        Err(error) => {
            tracing::warn!(%error, "this server could not be removed from the database");
            return;
        }
    }
    for provider in &workspaces.context.providers {
        if let Err(error) = provider.remove_shared_resources().await {
            tracing::warn!(provider = %provider.name(), %error, "networks and rules could not be removed");
        }
    }
}

fn prepare_data_dir(path: &Path) -> Result<PathBuf, ServeError> {
    let failed = |source| ServeError::DataDir { path: path.to_owned(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    let path = path.canonicalize().map_err(failed)?;
    rustix::fs::access(&path, Access::WRITE_OK | Access::EXEC_OK).map_err(|errno| failed(errno.into()))?;
    let metadata = std::fs::metadata(&path).map_err(failed)?;
    if ![0, geteuid().as_raw()].contains(&metadata.uid()) {
        tracing::warn!(
            directory = %path.display(), owner = metadata.uid(),
            "the data directory belongs to another user, who can read and replace the server's files: change its owner"
        );
    }
    let others_may_enter = metadata.mode() & 0o077 != 0;
    // The mode of a directory with other files is not changed.
    let is_own =
        path.join("installation-id").exists() || std::fs::read_dir(&path).map_err(failed)?.next().is_none();
    if others_may_enter && is_own {
        ensure_private_directory(&path).map_err(failed)?;
        tracing::warn!(directory = %path.display(), "other users could enter the data directory: it is private now");
    } else if others_may_enter {
        tracing::warn!(
            directory = %path.display(),
            "other users can enter the data directory, which holds other files too: give the server a directory of its own"
        );
    }
    Ok(path)
}

async fn open_store(settings: &Settings, data_dir: &Path) -> Result<Store, StoreError> {
    let config = match &settings.database_url {
        Some(url) => StoreConfig::postgres(url.expose_secret()),
        None => StoreConfig::Sqlite(data_dir.join("emergent.db")),
    };
    Store::open(config).await
}

/// Creates the first admin token and writes it to the data directory, where the command line reads it. Returns whether it was created
/// now.
async fn ensure_admin_token(store: &Store, data_dir: &Path, storage: &Path) -> Result<bool, ServeError> {
    let path = data_dir.join("admin-token");
    let failed = |source| ServeError::DataDir { path: data_dir.to_owned(), source };
    if !path.exists()
        && let Ok(secret) = std::fs::read_to_string(storage.join("admin-token"))
    {
        // Another server on this machine and database has created it.
        write_private(&path, &secret).map_err(failed)?;
    }
    if let Ok(secret) = std::fs::read_to_string(&path) {
        match store.verify_token(secret.trim(), Utc::now()).await {
            Ok(_) => return Ok(false),
            Err(StoreError::TokenRefused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let has_tokens = !store.tokens().await?.is_empty();
    if has_tokens && store.setting(FIRST_TOKEN_SETTING).await?.is_some() && !path.exists() {
        // The operator has removed the file, and there are other tokens: no new one is created.
        return Ok(false);
    }
    let request = NewToken { name: FIRST_TOKEN.to_owned(), scope: TokenScope::Admin, ttl_seconds: None };
    let created = store.replace_token(&request, Utc::now()).await?;
    write_private(&path, &created.secret).map_err(failed)?;
    store.put_setting(FIRST_TOKEN_SETTING, "yes").await?;
    Ok(true)
}

/// Writes a file that only its owner can read. The write is atomic.
pub(crate) fn write_private(path: &Path, text: &str) -> std::io::Result<()> {
    write_atomically(path, text.as_bytes(), 0o600)
}

/// Opens the providers that the settings enable.
fn providers(
    settings: &Settings,
    data_dir: &Path,
    installation: InstallationId,
    embedded: Option<&Embedded>,
) -> Result<Providers, ProviderError> {
    let manager = firecracker::manager(&settings.firecracker, embedded);
    ProviderTable::standard().open(ProviderConfig {
        installation,
        data_dir: data_dir.to_owned(),
        docker_host: settings.providers.docker_host.clone(),
        nameservers: settings.providers.nameservers.clone(),
        probe_image: settings.workspaces.default_image.clone(),
        room: settings.workspaces.room_rules(),
        gvisor: settings.providers.gvisor,
        plain_docker: settings.providers.allow_docker,
        firecracker: manager.map(|manager| ManagerAddress {
            url: manager.url,
            token: manager.token,
            ca_certificate: settings.firecracker.manager_ca.clone(),
        }),
    })
}

/// The handle of the metrics recorder, of which a process has one.
fn metrics_handle() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE
        .get_or_init(|| {
            let builder = PrometheusBuilder::new();
            builder.install_recorder().unwrap_or_else(|_| PrometheusBuilder::new().build_recorder().handle())
        })
        .clone()
}
