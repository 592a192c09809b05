//! The guest agent's binaries in a container: from the shared volume, or copied into the container.

use std::sync::Arc;

use super::engine::{ACT, within};
use super::guest_image::{GuestImage, GuestVolume};
use super::host::run_blocking;
use super::provider::ContainerProvider;
use super::spec::GUEST_DIR;
use crate::error::ProviderError;

impl ContainerProvider {
    /// The volume with the guest agent. None where each container gets a copy.
    pub(super) async fn guest_volume(&self) -> Result<Option<GuestVolume>, ProviderError> {
        if self.guest.is_none() {
            return Ok(None);
        }
        let host = Arc::clone(&self.host);
        run_blocking("attaching the guest agent's image", move || {
            host.guest.as_ref().map(GuestImage::volume).transpose()
        })
        .await
    }

    /// Copies the guest agent into a container that is not started yet.
    pub(super) async fn copy_guest_into(&self, name: &str) -> Result<(), ProviderError> {
        let failed = |error: &dyn std::fmt::Display| ProviderError::failed("copying the guest agent", error);
        let archive = tar_of(GUEST_DIR.trim_start_matches('/'), &emergent_guest_binary::FILES);
        let options = bollard::query_parameters::UploadToContainerOptionsBuilder::new().path("/").build();
        let docker = self.engine.docker().await.map_err(|error| failed(&error))?;
        let upload = docker.upload_to_container(name, Some(options), bollard::body_full(archive.into()));
        within(ACT, upload).await.map_err(|error| failed(&error))
    }
}

/// A tar archive of executable files in one directory.
fn tar_of(directory: &str, files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, bytes) in files {
        let mut header = [0_u8; 512];
        let mut field = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        field(0, &format!("{directory}/{name}"));
        field(100, "0000755\0");
        field(108, "0000000\0");
        field(116, "0000000\0");
        field(124, &format!("{:011o}\0", bytes.len()));
        field(136, "00000000000\0");
        field(148, "        ");
        field(156, "0");
        field(257, "ustar\x0000");
        let checksum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{checksum:06o}\0 ").as_bytes());
        archive.extend_from_slice(&header);
        archive.extend_from_slice(bytes);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}
