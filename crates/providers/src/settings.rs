//! The settings that providers are opened with.

use std::net::IpAddr;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

use emergent_host::room::RoomRules;
use emergent_wire::id::InstallationId;
use parking_lot::Mutex;
use secrecy::SecretString;

use crate::container::{ContainerHost, DockerImages};
use crate::error::ProviderError;

/// The settings of all providers of one server.
#[derive(Clone, Debug)]
pub struct ProviderConfig {
    /// The owner of everything that the providers make.
    pub installation: InstallationId,
    /// The directory of disks, of the guest agent's image and of locks.
    pub data_dir: PathBuf,
    /// The Docker engine's address. None: `DOCKER_HOST` or the usual socket.
    pub docker_host: Option<String>,
    /// The name servers of sandboxes. Empty: those of the host.
    pub nameservers: Vec<IpAddr>,
    /// The image of the container that shows whether containers start.
    pub probe_image: String,
    /// The part of the host's disk that sandboxes may use.
    pub room: RoomRules,
    /// Whether containers on gVisor are turned on.
    pub gvisor: bool,
    /// Whether plain containers are allowed.
    pub plain_docker: bool,
    /// The manager of microVMs. None: there is none.
    pub firecracker: Option<ManagerAddress>,
}

/// The address and the credentials of a Firecracker manager.
#[derive(Clone, Debug)]
pub struct ManagerAddress {
    /// `unix:/path`, `https://host:port` or `http://host:port`.
    pub url: String,
    /// Its token. None: the token is in a file beside the manager's socket.
    pub token: Option<SecretString>,
    /// The certificate that the manager's is checked against. None: those that the host trusts.
    pub ca_certificate: Option<PathBuf>,
}

/// The settings, and the objects that several providers of a server share.
pub struct OpenContext {
    settings: ProviderConfig,
    /// Opened by the first container provider.
    container_host: Mutex<Option<Arc<ContainerHost>>>,
}

impl Deref for OpenContext {
    type Target = ProviderConfig;

    fn deref(&self) -> &ProviderConfig {
        &self.settings
    }
}

impl OpenContext {
    pub(crate) fn new(settings: ProviderConfig) -> Self {
        Self { settings, container_host: Mutex::default() }
    }

    /// The engine with its network, disks and guest agent, for all container providers.
    pub(crate) fn container_host(&self) -> Result<Arc<ContainerHost>, ProviderError> {
        let mut opened = self.container_host.lock();
        if let Some(host) = opened.as_ref() {
            return Ok(Arc::clone(host));
        }
        let host = ContainerHost::open(&self.settings)?;
        *opened = Some(Arc::clone(&host));
        Ok(host)
    }

    /// The image source of providers that have no engine of their own.
    pub(crate) fn images(&self) -> Result<DockerImages, ProviderError> {
        DockerImages::open(self.docker_host.as_deref(), self.installation, &self.data_dir)
    }
}
