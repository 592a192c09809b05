//! Images of microVMs: root file systems of an image source, each sent to the manager once.

use std::sync::Arc;

use emergent_failpoint::failpoint;
use emergent_wire::manager::{ImageSettings, MachineImage};
use futures_util::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use url::form_urlencoded;

use super::client::Client;
use crate::error::ProviderError;
use crate::image::{ExportLease, ImageConfig, ImageSource};

/// The images that the manager can create microVMs of.
pub(super) struct MachineImages {
    pub(super) source: Arc<dyn ImageSource>,
}

impl MachineImages {
    /// Sends an image to the manager, unless it is there. Returns the id that it has there: its digest.
    pub(super) async fn ensure(&self, client: &Client, image: &str) -> Result<String, ProviderError> {
        let digest = self.source.digest(image).await?;
        let path = format!("/v1/images/{digest}");
        if has(client, &path).await? {
            return Ok(digest);
        }
        let lease = self.source.lease_export().await?;
        // Another server may have sent it meanwhile.
        if has(client, &path).await? {
            return Ok(digest);
        }
        tracing::info!(image, digest, "the image is sent to the Firecracker manager; this is done once");
        let sent = self.send(client, &lease, image, &digest).await;
        let closed = self.source.close_root(lease).await;
        sent?;
        closed?;
        Ok(digest)
    }

    async fn send(
        &self,
        client: &Client,
        lease: &ExportLease,
        image: &str,
        digest: &str,
    ) -> Result<(), ProviderError> {
        let settings = settings_of(self.source.config(image).await?);
        let settings = serde_json::to_string(&settings).unwrap_or_default();
        let query =
            form_urlencoded::Serializer::new(String::new()).append_pair("settings", &settings).finish();
        let archive = self.source.open_root(lease, image, digest).await?;
        let body = StreamBody::new(archive.map(|bytes| bytes.map(Frame::data)));
        let path = format!("/v1/images/{digest}?{query}");
        let _: MachineImage = client.put_archive(&path, BodyExt::boxed_unsync(body)).await?;
        failpoint!("image.sent");
        Ok(())
    }
}

async fn has(client: &Client, path: &str) -> Result<bool, ProviderError> {
    match client.get::<MachineImage>(path).await {
        Ok(_) => Ok(true),
        Err(ProviderError::Gone(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

fn settings_of(config: ImageConfig) -> ImageSettings {
    let ImageConfig { program, environment } = config;
    ImageSettings {
        entrypoint: program.entrypoint,
        arguments: program.arguments,
        directory: program.directory,
        user: program.user,
        environment,
    }
}
