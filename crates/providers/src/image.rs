//! The source of images, apart from the engine that runs sandboxes.
//!
//! Container providers run images that their engine already has. Providers without an engine of their own (microVMs) take the
//! root file system from an image source. The Docker engine is one source
//! ([`DockerImages`](crate::container::DockerImages)); an unpacked OCI layout or a registry can be another.

use std::any::Any;
use std::collections::BTreeMap;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;

use crate::error::ProviderError;

/// The program that an image runs by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageProgram {
    /// The program and its fixed arguments.
    pub entrypoint: Vec<String>,
    /// The default arguments, which a caller may replace.
    pub arguments: Vec<String>,
    /// The working directory.
    pub directory: Option<String>,
    /// The user that the program runs as.
    pub user: Option<String>,
}

/// The settings of an image: its program and its variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// The default program.
    pub program: ImageProgram,
    /// The variables that every process of the image has.
    pub environment: BTreeMap<String, String>,
}

/// Resolves the name of an image to its digest, its settings and its root file system.
///
/// Contract:
/// - every call except the reading of an archive is bounded in time;
/// - a name that the source does not have is [`ProviderError::Unacceptable`], a source that is down is
///   [`ProviderError::Unavailable`];
/// - an archive is opened under a lease, and one lease exists at a time per installation and host;
/// - [`remove_abandoned_exports`](Self::remove_abandoned_exports) removes the leftovers of an export that a crash interrupted.
#[async_trait]
pub trait ImageSource: Send + Sync {
    /// The digest of an image. Another digest under the same name means that the image has changed.
    async fn digest(&self, image: &str) -> Result<String, ProviderError>;

    /// The settings of an image.
    async fn config(&self, image: &str) -> Result<ImageConfig, ProviderError>;

    /// Waits until no other server of this host exports an image. The lease ends when it is dropped.
    async fn lease_export(&self) -> Result<ExportLease, ProviderError>;

    /// The root file system of an image, by digest, as a tar archive.
    async fn open_root(
        &self,
        lease: &ExportLease,
        image: &str,
        digest: &str,
    ) -> Result<RootArchive, ProviderError>;

    /// Removes everything that an export made.
    async fn close_root(&self, lease: ExportLease) -> Result<(), ProviderError>;

    /// Removes the leftovers of an interrupted export. Does nothing while a lease is held.
    async fn remove_abandoned_exports(&self) -> Result<(), ProviderError>;
}

/// The exclusive right to export images of one installation on this host.
pub struct ExportLease {
    _held: Box<dyn Any + Send + Sync>,
}

impl ExportLease {
    /// A lease that ends when `held` is dropped.
    pub fn new(held: impl Any + Send + Sync) -> Self {
        Self { _held: Box::new(held) }
    }
}

/// The bytes of a tar archive.
pub type RootArchive = BoxStream<'static, std::io::Result<Bytes>>;
