//! The Firecracker manager: as a service of its own, or within the server of the same host.

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

use crate::config::{FirecrackerSettings, TlsSettings};
use crate::listener::{Listener, accept};
use crate::server::{ServeError, allow_many_open_files, write_private};
use crate::tls;

/// The manager's socket in its directory, unless it listens elsewhere.
const SOCKET: &str = "manager.sock";
/// How often rules that others took away are put back.
const REPAIR_EVERY: Duration = Duration::from_secs(60);
/// How often it is tried to be the manager of a directory that another server has.
const TRY_EVERY: Duration = Duration::from_secs(2);
/// How long a server waits for its manager to listen before it begins.
const BEGIN_WITHIN: Duration = Duration::from_secs(20);

/// Where a manager listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManagerAddress {
    /// On a socket in its directory.
    OwnSocket,
    /// On another socket.
    Socket(PathBuf),
    /// On a port: with TLS, or reachable from this host only.
    Tcp(SocketAddr),
}

/// Runs a manager until `shutdown` is ready. MicroVMs go on without it.
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
    allow_many_open_files();
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
    let examined = Arc::clone(&manager);
    tokio::spawn(async move {
        for problem in examined.health().await.errors {
            tracing::warn!(problem, "microVMs can't be made");
        }
    });
    run(&manager, token, listener, shutdown).await;
    Ok(())
}

async fn run(
    manager: &Arc<Manager>,
    token: SecretString,
    listener: Listener,
    shutdown: impl Future<Output = ()>,
) {
    let repairing = Arc::clone(manager);
    let repair = tokio::spawn(async move {
        let mut ticks = tokio::time::interval_at(Instant::now() + REPAIR_EVERY, REPAIR_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Err(error) = repairing.repair().await {
                tracing::warn!(%error, "the rules of microVMs could not be put back");
            }
        }
    });
    let router = emergent_firecracker_manager::router(Arc::clone(manager), token);
    // Channels to microVMs go through it, and a microVM that is being copied takes nothing.
    accept(listener, router, None, shutdown).await;
    repair.abort();
    close(manager).await;
}

async fn close(manager: &Arc<Manager>) {
    if let Err(error) = manager.close().await {
        tracing::warn!(%error, "interfaces and rules could not be removed");
    }
}

fn listen_at(path: &Path) -> Result<(Listener, String), ServeError> {
    let failed =
        |error: std::io::Error| ServeError::Manager(format!("can't listen on {}: {error}", path.display()));
    // The directory is locked: whoever listened there is gone.
    remove_if_there(path).map_err(failed)?;
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok((Listener::Unix(listener), format!("unix:{}", path.display())))
}

/// The token that the settings give, else one that is kept in the directory.
fn token_of(settings: &FirecrackerSettings, data_dir: &Path) -> Result<(SecretString, PathBuf), ServeError> {
    let path = data_dir.join(MANAGER_TOKEN_FILE);
    if let Some(token) = settings.manager_token() {
        return Ok((token.clone(), path));
    }
    let failed = |source| ServeError::DataDir { path: data_dir.to_owned(), source };
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    if !kept.trim().is_empty() {
        return Ok((SecretString::from(kept.trim()), path));
    }
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| failed(std::io::Error::other(error)))?;
    let token = hex::encode(bytes);
    write_private(&path, &token).map_err(failed)?;
    Ok((SecretString::from(token), path))
}

/// A manager within this server.
pub(crate) struct Embedded {
    reach: Reach,
    end: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// How a manager is reached.
#[derive(Clone)]
pub(crate) struct Reach {
    pub(crate) url: String,
    pub(crate) token: Option<SecretString>,
}

/// Starts a manager within this server, when the settings ask for one.
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
    let reach = Reach { url: format!("unix:{}", socket.display()), token: Some(token.clone()) };
    let (end, ended) = watch::channel(false);
    let (begun, mut begins) = watch::channel(false);
    let task = tokio::spawn(manage(data_dir, settings.manager.clone(), token, ended, begun));
    if tokio::time::timeout(BEGIN_WITHIN, begins.wait_for(|begun| *begun)).await.is_err() {
        tracing::warn!("the Firecracker manager takes long to begin");
    }
    Ok(Some(Embedded { reach, end, task }))
}

/// Is the manager of a directory as soon as no other server is, until the end.
async fn manage(
    data_dir: PathBuf,
    options: ManagerOptions,
    token: SecretString,
    mut ended: watch::Receiver<bool>,
    begun: watch::Sender<bool>,
) {
    let mut told = false;
    loop {
        match Manager::open(&data_dir, options.clone()).await {
            Ok(manager) => match listen_at(&data_dir.join(SOCKET)) {
                Ok((listener, _)) => {
                    let _ = begun.send(true);
                    let mut until = ended.clone();
                    run(&manager, token, listener, async move {
                        let _ = until.wait_for(|ended| *ended).await;
                    })
                    .await;
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "the Firecracker manager can't begin");
                    close(&manager).await;
                }
            },
            // Another server of this host is it: its socket is used.
            Err(ManagerError::DirectoryInUse(_)) => {
                let _ = begun.send(true);
            }
            Err(error) if !told => {
                told = true;
                tracing::warn!(%error, "the Firecracker manager can't begin; it is tried again");
            }
            Err(_) => {}
        }
        tokio::select! {
            _ = ended.wait_for(|ended| *ended) => return,
            () = tokio::time::sleep(TRY_EVERY) => {}
        }
    }
}

impl Embedded {
    /// Ends it; microVMs go on without it.
    pub(crate) async fn end(self) {
        let _ = self.end.send(true);
        let _ = self.task.await;
    }
}

/// How the manager is reached that this server uses, if it uses one.
pub(crate) fn manager(settings: &FirecrackerSettings, embedded: Option<&Embedded>) -> Option<Reach> {
    if let Some(embedded) = embedded {
        return Some(embedded.reach.clone());
    }
    let url = settings.manager_url().filter(|_| settings.enabled != Some(false))?;
    Some(Reach { url: url.to_owned(), token: settings.manager_token().cloned() })
}

/// What the manager that the settings name says of itself.
pub async fn manager_health(settings: &FirecrackerSettings) -> Result<ManagerHealth, String> {
    let url = settings.manager_url().ok_or("no manager is named")?;
    let client = ManagerClient::new(url, settings.manager_token().cloned(), settings.manager_ca.as_deref());
    let client = client.map_err(|error| error.to_string())?;
    client.health().await.map_err(|error| error.to_string())
}
