//! The objects that the container providers of one server share: engine, network, disks, guest agent.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use bollard::models::SystemInfo;
use emergent_host::network::host_nameservers;
use emergent_wire::id::InstallationId;
use parking_lot::Mutex;

use super::LABEL_INSTALLATION;
use super::disk::Disks;
use super::engine::Engine;
use super::engine_error::EngineError;
use super::guest_image::GuestImage;
use super::images::DockerImages;
use super::legacy_guest::{self, SharedDirectory};
use super::network::Network;
use crate::error::ProviderError;
use crate::settings::ProviderConfig;

/// The engine, with the installation's network, disks and guest agent.
pub(crate) struct ContainerHost {
    pub(super) installation: InstallationId,
    pub(super) engine: Engine,
    pub(super) images: DockerImages,
    /// None where this process can't make loop devices. Then each container gets a copy.
    pub(super) guest: Option<GuestImage>,
    /// Directories that older versions shared with sandboxes.
    shared: Mutex<Vec<SharedDirectory>>,
    pub(super) disks: Result<Disks, String>,
    pub(super) probe_image: String,
    pub(super) network: Network,
    pub(super) host_cpus: AtomicU32,
    /// The engine's data directory. Set by the first health check.
    pub(super) engine_directory: OnceLock<PathBuf>,
}

impl ContainerHost {
    /// Prepares disks and guest agent. Does not connect to the engine yet.
    pub(crate) fn open(settings: &ProviderConfig) -> Result<Arc<Self>, ProviderError> {
        let engine = Engine::open(settings.docker_host.as_deref())
            .map_err(|error| ProviderError::Unavailable(error.to_string()))?;
        let disks = Disks::open(&settings.data_dir, settings.room);
        let guest = disks
            .is_ok()
            .then(|| GuestImage::install(&settings.data_dir.join("guest"), settings.installation));
        let guest = guest
            .transpose()
            .map_err(|error| ProviderError::failed("making the guest agent's image", error))?;
        let shared = repair_shared_directories(&settings.data_dir.join("guest"))
            .map_err(|error| ProviderError::failed("checking the guest agent of an older version", error))?;
        let nameservers =
            if settings.nameservers.is_empty() { host_nameservers() } else { settings.nameservers.clone() };
        Ok(Arc::new(Self {
            installation: settings.installation,
            images: DockerImages::of(engine.clone(), settings.installation, &settings.data_dir),
            engine,
            guest,
            shared: Mutex::new(shared),
            disks,
            probe_image: settings.probe_image.clone(),
            network: Network::new(settings.installation, nameservers),
            host_cpus: AtomicU32::new(0),
            engine_directory: OnceLock::new(),
        }))
    }

    /// CPUs of the engine's host. Asked once.
    pub(super) async fn host_cpus(&self) -> Result<u32, EngineError> {
        match self.host_cpus.load(Ordering::Relaxed) {
            0 => {
                let cpus = cpus_of(&self.engine.info().await?);
                self.host_cpus.store(cpus, Ordering::Relaxed);
                Ok(cpus)
            }
            known => Ok(known),
        }
    }

    /// Removes the guest agent's volumes and devices. No container may be left.
    pub(super) async fn remove_guest_volume(self: &Arc<Self>) -> Result<(), ProviderError> {
        let Some(guest) = &self.guest else {
            return Ok(());
        };
        self.remove_older_guest_images().await?;
        match self.engine.remove_volume(&guest.current_volume().name).await {
            Ok(()) => {}
            // An engine that was restarted while containers ran (live-restore) may count mounts that are gone.
            Err(EngineError::Conflict(message) | EngineError::VolumeMounted(message)) => {
                tracing::warn!(message, "the engine keeps the entry of the guest agent's volume");
            }
            Err(error) => return Err(ProviderError::failed("removing the guest agent's volume", error)),
        }
        let host = Arc::clone(self);
        run_blocking("detaching the guest agent's image", move || {
            host.guest.as_ref().map_or(Ok(()), GuestImage::detach)
        })
        .await
    }

    /// A warning about sandboxes of older versions.
    pub(super) fn shared_directories_note(&self) -> Option<String> {
        let shared = self.shared.lock();
        let altered = shared.iter().filter(|directory| directory.was_altered).count();
        let open = shared.iter().filter(|directory| !directory.is_protected).count();
        if altered > 0 {
            return Some(
                "a guest agent of an older version had been altered from inside a sandbox and was replaced: destroy the \
                 workspaces of that version"
                    .to_owned(),
            );
        }
        (open > 0).then(|| {
            "workspaces of an older version can write to the guest agent that they share: destroy them"
                .to_owned()
        })
    }

    /// Removes directories that older versions shared and no container uses any more.
    pub(super) async fn remove_unused_shared_directories(&self) -> Result<(), ProviderError> {
        let shared: Vec<PathBuf> =
            self.shared.lock().iter().map(|directory| directory.path.clone()).collect();
        if shared.is_empty() {
            return Ok(());
        }
        let containers = self.engine.containers(&self.label()).await;
        let containers =
            containers.map_err(|error| ProviderError::failed("listing the mounts of containers", error))?;
        for path in shared {
            let mut sources = containers.iter().flat_map(|container| &container.mount_sources);
            if sources.any(|source| Path::new(source) == path) {
                continue;
            }
            let removed = path.clone();
            run_blocking("removing an older guest agent", move || legacy_guest::remove(&removed)).await?;
            self.shared.lock().retain(|directory| directory.path != path);
        }
        Ok(())
    }

    pub(super) fn label(&self) -> String {
        format!("{LABEL_INSTALLATION}={}", self.installation)
    }

    /// Removes images of earlier versions that no container uses any more.
    pub(super) async fn remove_older_guest_images(&self) -> Result<(), ProviderError> {
        let Some(guest) = &self.guest else {
            return Ok(());
        };
        let failed = |error| ProviderError::failed("listing the guest agent's images", error);
        for (volume, file) in guest.older_volumes().map_err(failed)? {
            match self.engine.remove_volume(&volume.name).await {
                Ok(()) => {
                    run_blocking("removing an older guest agent", move || GuestImage::remove(&volume, &file))
                        .await?;
                }
                // A container still uses it.
                Err(EngineError::Conflict(_) | EngineError::VolumeMounted(_)) => {}
                Err(error) => return Err(ProviderError::failed("removing an older guest agent", error)),
            }
        }
        Ok(())
    }
}

/// Repairs the directories that older versions shared, and logs what was found.
fn repair_shared_directories(parent: &Path) -> std::io::Result<Vec<SharedDirectory>> {
    if !parent.exists() {
        return Ok(Vec::new());
    }
    let found = legacy_guest::repair(parent)?;
    for directory in &found {
        let path = directory.path.display();
        if directory.was_altered {
            tracing::error!(
                directory = %path,
                "the guest agent of an older version was altered from inside a sandbox; it is replaced. Treat the workspaces of \
                 that version as compromised: rotate the secrets they had, and destroy them"
            );
        }
        if !directory.is_protected {
            tracing::warn!(
                directory = %path,
                "sandboxes of an older version can write to the guest agent they share, and this file system can't prevent it: \
                 destroy them"
            );
        }
    }
    Ok(found)
}

pub(super) fn cpus_of(info: &SystemInfo) -> u32 {
    info.ncpu.and_then(|cpus| u32::try_from(cpus).ok()).filter(|cpus| *cpus > 0).unwrap_or(1)
}

/// Runs file operations on a thread that may block.
pub(super) async fn run_blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, ProviderError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(std::io::Error::other).flatten().map_err(|error| match error.kind() {
        std::io::ErrorKind::StorageFull => ProviderError::NoRoom(error.to_string()),
        _ => ProviderError::failed(what, error),
    })
}
