//! The guest agent's binaries in a container: from the shared volume, or copied into the container.

use std::io;
use std::sync::Arc;

use emergent_wire::tools::AGENT_DIR;

use super::engine::{ACT, within};
use super::guest_image::{GuestImage, GuestVolume};
use super::host::run_blocking;
use super::provider::ContainerProvider;
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
        let archive = tar_of(AGENT_DIR.trim_start_matches('/'), &emergent_guest_binary::FILES)
            .map_err(|error| failed(&error))?;
        let options = bollard::query_parameters::UploadToContainerOptionsBuilder::new().path("/").build();
        let docker = self.engine.docker().await.map_err(|error| failed(&error))?;
        let upload = docker.upload_to_container(name, Some(options), bollard::body_full(archive.into()));
        within(ACT, upload).await.map_err(|error| failed(&error))
    }
}

/// A tar archive of executable files in one directory.
fn tar_of(directory: &str, files: &[(&str, &[u8])]) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, format!("{directory}/{name}"), *bytes)?;
    }
    archive.into_inner()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::io::Read as _;

    use emergent_guest_protocol::AGENT_PATH;

    use super::*;

    #[test]
    fn the_agents_program_is_one_of_the_files() {
        let paths = emergent_guest_binary::FILES.map(|(name, _)| format!("{AGENT_DIR}/{name}"));
        assert!(paths.iter().any(|path| path == AGENT_PATH), "{paths:?}");
    }

    #[test]
    fn the_archive_has_each_file_as_an_executable_of_root() {
        let files: [(&str, &[u8]); 2] = [("guest", b"one"), ("search", &[7; 1000])];
        let bytes = tar_of(".emergent", &files).unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.mode().unwrap(), header.uid().unwrap(), header.gid().unwrap()), (0o755, 0, 0));
            assert!(header.entry_type().is_file());
            let path = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            found.push((path, content));
        }
        let expected =
            [(".emergent/guest".to_owned(), b"one".to_vec()), (".emergent/search".to_owned(), vec![7; 1000])];
        assert_eq!(found, expected);
    }
}
