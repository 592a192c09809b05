//! Images of the Docker engine as an image source.
//!
//! The engine exports the files of a container, not of an image. So an export creates a container of the image, which never
//! runs, and removes it afterwards. One export runs at a time, under a lock. A container that exists while the lock is
//! free was left by a crash.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use bollard::models::ContainerCreateBody;
use emergent_failpoint::failpoint;
use emergent_wire::id::InstallationId;
use futures_util::StreamExt;
use tokio::time::Instant;

use super::LABEL_INSTALLATION;
use super::engine::Engine;
use super::engine_error::EngineError;
use super::file_lock::{POLL_INTERVAL, try_lock};
use super::provider::no_image;
use crate::error::ProviderError;
use crate::image::{ExportLease, ImageConfig, ImageProgram, ImageSource, RootArchive};

/// The time limit for a lease. Another export lasts up to 15 minutes, the time limit for sending an image, and a little more.
const LEASE_TIME: Duration = Duration::from_secs(1200);
const WAITING: &str = "waiting for another export of an image";
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

    /// A lease, unless an export is running.
    fn try_lease(&self) -> io::Result<Option<ExportLease>> {
        let file = File::options().create(true).truncate(false).write(true).open(&self.lock)?;
        Ok(try_lock(&file)?.then(|| ExportLease::new(file)))
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
        let deadline = Instant::now() + LEASE_TIME;
        loop {
            let failed = |error| ProviderError::failed(WAITING, error);
            match self.try_lease().map_err(failed)? {
                Some(lease) => return Ok(lease),
                None if Instant::now() < deadline => tokio::time::sleep(POLL_INTERVAL).await,
                None => {
                    return Err(ProviderError::TimedOut { what: WAITING, seconds: LEASE_TIME.as_secs() });
                }
            }
        }
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
        Ok(archive.map(|bytes| bytes.map_err(io::Error::other)).boxed())
    }

    async fn close_root(&self, _lease: ExportLease) -> Result<(), ProviderError> {
        self.remove_export().await
    }

    async fn remove_abandoned_exports(&self) -> Result<(), ProviderError> {
        match self.try_lease() {
            Ok(Some(_lease)) => self.remove_export().await,
            // An export is running.
            Ok(None) | Err(_) => Ok(()),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_waited_for_until_its_time_limit() {
        let directory = tempfile::tempdir().unwrap();
        let engine = Some("tcp://127.0.0.1:1");
        let images = DockerImages::open(engine, InstallationId::generate(), directory.path()).unwrap();
        // Another server holds the lock, and does not run.
        let other = images.lease_export().await.unwrap();
        let refused = images.lease_export().await.err().unwrap();
        assert!(matches!(refused, ProviderError::TimedOut { .. }), "{refused}");
        images.remove_abandoned_exports().await.unwrap();
        // It continues and ends.
        let (lease, ()) = tokio::join!(biased; images.lease_export(), async { drop(other) });
        assert!(lease.is_ok());
    }
}
