//! Images of microVMs: the files of the Docker engine's images, sent to the manager once.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use bollard::models::ContainerCreateBody;
use emergent_failpoint::failpoint;
use emergent_wire::id::InstallationId;
use emergent_wire::manager::{ImageSettings, MachineImage};
use futures_util::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;

use super::client::Client;
use crate::container::{Engine, EngineError, LABEL_INSTALLATION, no_image, program_of};
use crate::error::ProviderError;

/// The container whose files are exported. It never runs.
const EXPORTED: &str = "emergent.export";

/// Where images come from.
pub(super) struct Images {
    pub(super) engine: Engine,
    pub(super) installation: InstallationId,
    /// Held by whoever exports: one at a time, and what is there while nobody holds it was left by a crash.
    pub(super) lock: PathBuf,
}

impl Images {
    /// The content id of an image.
    pub(super) async fn digest(&self, image: &str) -> Result<String, ProviderError> {
        self.engine.image_id(image).await.map_err(|error| sort(image, &error))
    }

    /// What an image says of itself.
    pub(super) async fn settings(&self, image: &str) -> Result<ImageSettings, ProviderError> {
        let config = self.engine.image_config(image).await.map_err(|error| sort(image, &error))?;
        let variables = config.env.clone().unwrap_or_default();
        let environment = variables.iter().filter_map(|variable| {
            let (name, value) = variable.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        });
        let environment = environment.collect();
        let program = program_of(config);
        Ok(ImageSettings {
            entrypoint: program.entrypoint,
            arguments: program.arguments,
            directory: program.directory,
            user: program.user,
            environment,
        })
    }

    /// Sees to it that the manager has an image; gives the id that it has there.
    pub(super) async fn ensure(&self, client: &Client, image: &str) -> Result<String, ProviderError> {
        let digest = self.digest(image).await?;
        let path = format!("/v1/images/{digest}");
        if has(client, &path).await? {
            return Ok(digest);
        }
        let lock = self.lock.clone();
        let lock = tokio::task::spawn_blocking(move || take_lock(&lock, true)).await;
        let _lock = lock
            .map_err(std::io::Error::other)
            .flatten()
            .map_err(|error| ProviderError::failed("waiting for another export of an image", error))?;
        if has(client, &path).await? {
            return Ok(digest);
        }
        self.remove_remains().await?;
        tracing::info!(image, digest, "the image is sent to the Firecracker manager; this is done once");
        let sent = self.send(client, image, &digest, &path).await;
        let removed = self.remove_remains().await;
        sent?;
        removed?;
        Ok(digest)
    }

    fn container(&self) -> String {
        format!("emergent-export-{}", self.installation)
    }

    async fn send(
        &self,
        client: &Client,
        image: &str,
        digest: &str,
        path: &str,
    ) -> Result<(), ProviderError> {
        let settings = self.settings(image).await?;
        let settings = serde_json::to_string(&settings).unwrap_or_default();
        let body = ContainerCreateBody {
            image: Some(digest.to_owned()),
            // The engine wants one; nothing is ever run.
            cmd: Some(vec!["/none".to_owned()]),
            labels: Some(HashMap::from([
                (LABEL_INSTALLATION.to_owned(), self.installation.to_string()),
                (EXPORTED.to_owned(), image.to_owned()),
            ])),
            ..ContainerCreateBody::default()
        };
        let failed = |error: EngineError| ProviderError::failed("exporting the image", error);
        self.engine.create(&self.container(), body).await.map_err(failed)?;
        failpoint!("image.container_made");
        let archive = self.engine.export(&self.container()).await.map_err(failed)?;
        let archive = archive.map(|bytes| bytes.map(Frame::data).map_err(std::io::Error::other));
        let settings: String = settings.bytes().flat_map(percent_encoded).collect();
        let _: MachineImage = client
            .put_archive(
                &format!("{path}?settings={settings}"),
                BodyExt::boxed_unsync(StreamBody::new(archive)),
            )
            .await?;
        failpoint!("image.sent");
        Ok(())
    }

    async fn remove_remains(&self) -> Result<(), ProviderError> {
        let removed = self.engine.remove(&self.container()).await;
        removed.map_err(|error| ProviderError::failed("removing the exported container", error))
    }

    /// Removes what an export left that a crash has interrupted, unless one is going on.
    pub(super) async fn sweep(&self) -> Result<(), ProviderError> {
        match take_lock(&self.lock, false) {
            Ok(_lock) => self.remove_remains().await,
            Err(_) => Ok(()),
        }
    }
}

async fn has(client: &Client, path: &str) -> Result<bool, ProviderError> {
    match client.get::<MachineImage>(path).await {
        Ok(_) => Ok(true),
        Err(ProviderError::Gone(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

fn take_lock(path: &PathBuf, wait: bool) -> std::io::Result<fs::File> {
    use rustix::fs::FlockOperation::{LockExclusive, NonBlockingLockExclusive};
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    rustix::fs::flock(&file, if wait { LockExclusive } else { NonBlockingLockExclusive })?;
    Ok(file)
}

fn percent_encoded(byte: u8) -> Vec<char> {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => vec![char::from(byte)],
        _ => format!("%{byte:02X}").chars().collect(),
    }
}

fn sort(image: &str, error: &EngineError) -> ProviderError {
    match error {
        EngineError::NotFound(_) => no_image(image),
        error => {
            ProviderError::Unavailable(format!("images of microVMs come from the Docker engine: {error}"))
        }
    }
}
