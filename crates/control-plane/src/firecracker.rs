//! The Firecracker manager: as a service of its own, or embedded in a server on the same host.

use std::future::Future;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use emergent_firecracker_manager::{Manager, ManagerError, ManagerOptions};
use emergent_host::files::remove_if_there;
use emergent_providers::{MANAGER_TOKEN_FILE, ManagerClient};
use emergent_wire::manager::ManagerHealth;
use secrecy::SecretString;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use crate::config::{FirecrackerSettings, TlsSettings};
use crate::listener::{Listener, accept, tls};
use crate::server::{ServeError, raise_open_file_limit, write_private};

/// The default socket of a manager, in its directory.
const SOCKET: &str = "manager.sock";
/// The interval in which missing firewall rules are restored.
const REPAIR_EVERY: Duration = Duration::from_secs(60);
/// The interval of attempts to start an embedded manager.
const RETRY_EVERY: Duration = Duration::from_secs(2);
/// The time for which the start of a server waits for its embedded manager.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The address of a manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManagerAddress {
    /// The default socket, in its directory.
    OwnSocket,
    /// Another socket.
    Socket(PathBuf),
    /// A port: with TLS, or reachable from this host only.
    Tcp(SocketAddr),
}

/// Runs a manager until `shutdown` completes. MicroVMs keep running without it.
pub async fn serve_manager(
    data_dir: &Path,
    address: ManagerAddress,
    settings: &FirecrackerSettings,
    tls: &TlsSettings,
    shutdown: impl Future<Output = ()> + Send,
    on_ready: impl FnOnce(&str, &Path) + Send,
) -> Result<(), ServeError> {
    let failed = |error: ManagerError| ServeError::Manager(error.to_string());
    let tls = tls::acceptor(tls).map_err(ServeError::Tls)?;
    raise_open_file_limit();
    let manager = Manager::open(data_dir, settings.manager.clone()).await.map_err(failed)?;
    let (token, token_file) = token_of(settings, data_dir)?;
    let own = data_dir.join(SOCKET);
    let (listener, url) = match address {
        ManagerAddress::OwnSocket => listen_at(&own)?,
        ManagerAddress::Socket(path) => listen_at(&path)?,
        ManagerAddress::Tcp(address) => {
            if tls.is_none() && !address.ip().is_loopback() {
                let message = format!(
                    "a manager on {address} needs TLS: name a certificate and a key (EMERGENT_TLS_CERTIFICATE, \
                     EMERGENT_TLS_KEY), or let it listen on a socket (--socket)"
                );
                return Err(ServeError::Manager(message));
            }
            let refused = |source| ServeError::Listen { address, source };
            let listener = TcpListener::bind(address).await.map_err(refused)?;
            let scheme = if tls.is_some() { "https" } else { "http" };
            let url = format!("{scheme}://{}", listener.local_addr().map_err(refused)?);
            (Listener::Tcp(listener, tls), url)
        }
    };
    on_ready(&url, &token_file);
    let checked = Arc::clone(&manager);
    tokio::spawn(async move {
        for problem in checked.health().await.errors {
            tracing::warn!(problem, "microVMs can't be started");
        }
    });
    run(&manager, token, listener, shutdown).await;
    Ok(())
}

/// Serves a manager until `shutdown` completes.
async fn run(
    manager: &Arc<Manager>,
    token: SecretString,
    listener: Listener,
    shutdown: impl Future<Output = ()>,
) {
    let repairing = Arc::clone(manager);
    let repair = async move {
        let mut ticks = tokio::time::interval_at(Instant::now() + REPAIR_EVERY, REPAIR_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Err(error) = repairing.repair().await {
                tracing::warn!(%error, "the firewall rules of microVMs could not be put back");
            }
        }
    };
    let repair = AbortOnDropHandle::new(tokio::spawn(repair.in_current_span()));
    let router = emergent_firecracker_manager::router(Arc::clone(manager), token);
    // Without a time limit for writes: responses are also channels to microVMs, and a microVM that is being copied reads nothing.
    accept(listener, router, None, shutdown).await;
    drop(repair);
    close(manager).await;
}

async fn close(manager: &Arc<Manager>) {
    if let Err(error) = manager.close().await {
        tracing::warn!(%error, "the network interfaces and firewall rules of microVMs could not be removed");
    }
}

fn listen_at(path: &Path) -> Result<(Listener, String), ServeError> {
    let failed =
        |error: std::io::Error| ServeError::Manager(format!("can't listen on {}: {error}", path.display()));
    // The manager holds the lock of the directory, so the process of an old socket has ended.
    remove_if_there(path).map_err(failed)?;
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok((Listener::Unix(listener), format!("unix:{}", path.display())))
}

/// The token of the settings, else that of the file in the directory, which is created if it does not exist.
fn token_of(settings: &FirecrackerSettings, data_dir: &Path) -> Result<(SecretString, PathBuf), ServeError> {
    let path = data_dir.join(MANAGER_TOKEN_FILE);
    if let Some(token) = settings.manager_token() {
        return Ok((token.clone(), path));
    }
    let failed = |source| ServeError::DataDir { path: data_dir.to_owned(), source };
    match std::fs::read_to_string(&path) {
        Ok(kept) if !kept.trim().is_empty() => return Ok((SecretString::from(kept.trim()), path)),
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| failed(std::io::Error::other(error)))?;
    let token = hex::encode(bytes);
    write_private(&path, &token).map_err(failed)?;
    Ok((SecretString::from(token), path))
}

/// A manager embedded in this server.
pub(crate) struct Embedded {
    endpoint: ManagerEndpoint,
    shutdown: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// The address of a manager, and its token.
#[derive(Clone)]
pub(crate) struct ManagerEndpoint {
    pub(crate) url: String,
    pub(crate) token: Option<SecretString>,
}

/// Starts a manager embedded in this server, if the settings have one.
pub(crate) async fn embed(
    settings: &FirecrackerSettings,
    storage: &Path,
) -> Result<Option<Embedded>, ServeError> {
    if settings.manager_url().is_some()
        || !settings.enabled.unwrap_or_else(|| settings.manager.is_installed())
    {
        return Ok(None);
    }
    let data_dir = storage.join("firecracker");
    let failed = |source| ServeError::DataDir { path: data_dir.clone(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&data_dir).map_err(failed)?;
    let (token, _) = token_of(settings, &data_dir)?;
    let socket = data_dir.join(SOCKET);
    let url = format!("unix:{}", socket.display());
    let endpoint = ManagerEndpoint { url, token: Some(token.clone()) };
    let (shutdown, is_shut_down) = watch::channel(false);
    let (started, mut has_started) = watch::channel(false);
    let span = tracing::info_span!("background", task = "firecracker_manager");
    let manage = manage(data_dir, settings.manager.clone(), token, is_shut_down, started);
    let task = tokio::spawn(manage.instrument(span));
    if tokio::time::timeout(START_TIMEOUT, has_started.wait_for(|started| *started)).await.is_err() {
        tracing::warn!("the Firecracker manager has not started yet; the server starts without it");
    }
    Ok(Some(Embedded { endpoint, shutdown, task }))
}

/// Runs the manager of a directory until shutdown. While another server runs it, tries again until that one has ended.
async fn manage(
    data_dir: PathBuf,
    options: ManagerOptions,
    token: SecretString,
    mut shutdown: watch::Receiver<bool>,
    started: watch::Sender<bool>,
) {
    let mut is_logged = false;
    loop {
        match Manager::open(&data_dir, options.clone()).await {
            Ok(manager) => match listen_at(&data_dir.join(SOCKET)) {
                Ok((listener, _)) => {
                    let _ = started.send(true);
                    run(&manager, token, listener, async move {
                        let _ = shutdown.wait_for(|shutdown| *shutdown).await;
                    })
                    .await;
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "the Firecracker manager can't listen; it will be tried again");
                    close(&manager).await;
                }
            },
            // This server uses the socket of the other one.
            Err(ManagerError::DirectoryInUse(_)) => {
                let _ = started.send(true);
            }
            Err(error) if !is_logged => {
                is_logged = true;
                tracing::warn!(%error, "the Firecracker manager can't be started; it will be tried again");
            }
            Err(_) => {}
        }
        tokio::select! {
            _ = shutdown.wait_for(|shutdown| *shutdown) => return,
            () = tokio::time::sleep(RETRY_EVERY) => {}
        }
    }
}

impl Embedded {
    /// Shuts the manager down. MicroVMs keep running without it.
    pub(crate) async fn shut_down(self) {
        let _ = self.shutdown.send(true);
        let _ = self.task.await;
    }
}

/// The manager of this server: the embedded one, else that of the settings. None if the server uses no microVMs.
pub(crate) fn manager(
    settings: &FirecrackerSettings,
    embedded: Option<&Embedded>,
) -> Option<ManagerEndpoint> {
    if let Some(embedded) = embedded {
        return Some(embedded.endpoint.clone());
    }
    let url = settings.manager_url().filter(|_| settings.enabled != Some(false))?;
    Some(ManagerEndpoint { url: url.to_owned(), token: settings.manager_token().cloned() })
}

/// The health of the manager in the settings.
pub async fn manager_health(settings: &FirecrackerSettings) -> Result<ManagerHealth, String> {
    let url = settings.manager_url().ok_or("the settings have no manager")?;
    let client = ManagerClient::new(url, settings.manager_token().cloned(), settings.manager_ca.as_deref());
    let client = client.map_err(|error| error.to_string())?;
    client.health().await.map_err(|error| error.to_string())
}
