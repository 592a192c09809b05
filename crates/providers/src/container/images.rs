//! Images of the Docker engine as an image source.
//!
//! The engine exports the files of a container, not of an image. So an export creates a container of the image, which never
//! runs, and removes it afterwards. One export runs at a time, under a lock. A container that exists while the lock is
//! free was left by a crash.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use bollard::models::ContainerCreateBody;
use emergent_failpoint::failpoint;
use emergent_wire::id::InstallationId;
use futures_util::StreamExt;

use super::LABEL_INSTALLATION;
use super::engine::Engine;
use super::engine_error::EngineError;
use super::host::run_blocking;
use super::provider::no_image;
use crate::error::ProviderError;
use crate::image::{ExportLease, ImageConfig, ImageProgram, ImageSource, RootArchive};

/// Names the image that a container is the export of.
const LABEL_EXPORT: &str = "emergent.export";

/// The images of a Docker engine.
#[derive(Clone)]
pub struct DockerImages {
    engine: Engine,
    installation: InstallationId,
    /// The lock file of the export that runs.
    lock: PathBuf,
}

impl DockerImages {
    /// The images of the engine at an address; of `DOCKER_HOST` or the usual socket unless given. Servers of one host use the
    /// same `data_dir`.
    pub fn open(
        docker_host: Option<&str>,
        installation: InstallationId,
        data_dir: &Path,
    ) -> Result<Self, ProviderError> {
        let engine =
            Engine::open(docker_host).map_err(|error| ProviderError::Unavailable(error.to_string()))?;
        Ok(Self::of(engine, installation, data_dir))
    }

    pub(super) fn of(engine: Engine, installation: InstallationId, data_dir: &Path) -> Self {
        Self { engine, installation, lock: data_dir.join("image-export.lock") }
    }

    fn container(&self) -> String {
        format!("emergent-export-{}", self.installation)
    }

    async fn remove_export(&self) -> Result<(), ProviderError> {
        let removed = self.engine.remove(&self.container()).await;
        removed.map_err(|error| ProviderError::failed("removing the exported container", error))
    }
}

#[async_trait]
impl ImageSource for DockerImages {
    async fn digest(&self, image: &str) -> Result<String, ProviderError> {
        self.engine.image_id(image).await.map_err(|error| unavailable(image, &error))
    }

    async fn config(&self, image: &str) -> Result<ImageConfig, ProviderError> {
        let found = self.engine.image_config(image).await.map_err(|error| unavailable(image, &error))?;
        Ok(config_of(found))
    }

    async fn lease_export(&self) -> Result<ExportLease, ProviderError> {
        let path = self.lock.clone();
        let lock =
            run_blocking("waiting for another export of an image", move || lock_file(&path, true)).await?;
        Ok(ExportLease::new(lock))
    }

    async fn open_root(
        &self,
        _lease: &ExportLease,
        image: &str,
        digest: &str,
    ) -> Result<RootArchive, ProviderError> {
        let body = ContainerCreateBody {
            image: Some(digest.to_owned()),
            // The engine requires a command. The container is never started.
            cmd: Some(vec!["/none".to_owned()]),
            labels: Some(HashMap::from([
                (LABEL_INSTALLATION.to_owned(), self.installation.to_string()),
                (LABEL_EXPORT.to_owned(), image.to_owned()),
            ])),
            ..ContainerCreateBody::default()
        };
        self.remove_export().await?;
        let failed = |error: EngineError| ProviderError::failed("exporting the image", error);
        self.engine.create(&self.container(), body).await.map_err(failed)?;
        failpoint!("image.container_made");
        let archive = self.engine.export(&self.container()).await.map_err(failed)?;
        Ok(archive.map(|bytes| bytes.map_err(std::io::Error::other)).boxed())
    }

    async fn close_root(&self, _lease: ExportLease) -> Result<(), ProviderError> {
        self.remove_export().await
    }

    async fn remove_abandoned_exports(&self) -> Result<(), ProviderError> {
        match lock_file(&self.lock, false) {
            Ok(_lock) => self.remove_export().await,
            // An export is running.
            Err(_) => Ok(()),
        }
    }
}

fn config_of(found: bollard::models::ImageConfig) -> ImageConfig {
    let not_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
    let variables = found.env.unwrap_or_default();
    let environment = variables.iter().filter_map(|variable| {
        let (name, value) = variable.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    });
    ImageConfig {
        environment: environment.collect(),
        program: ImageProgram {
            entrypoint: found.entrypoint.unwrap_or_default(),
            arguments: found.cmd.unwrap_or_default(),
            directory: not_empty(found.working_dir),
            user: not_empty(found.user),
        },
    }
}

fn unavailable(image: &str, error: &EngineError) -> ProviderError {
    match error {
        EngineError::NotFound(_) => no_image(image),
        error => ProviderError::Unavailable(format!("images come from the Docker engine: {error}")),
    }
}

fn lock_file(path: &Path, wait: bool) -> std::io::Result<fs::File> {
    use rustix::fs::FlockOperation::{LockExclusive, NonBlockingLockExclusive};
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    rustix::fs::flock(&file, if wait { LockExclusive } else { NonBlockingLockExclusive })?;
    Ok(file)
}
