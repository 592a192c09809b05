//! Claims: a new workspace gets a spare as its sandbox.

use std::sync::atomic::Ordering;

use emergent_providers::SharedProvider;
use emergent_store::{Claim, NewWorkspace, Shape, Spare, StoreError};
use emergent_wire::WorkspaceId;
use emergent_wire::pool::SpareStatus;
use emergent_wire::workspace::{Placement, Workspace};
use serde_json::json;

use super::{OpenSpare, Pool};
use crate::workspace::error::Result;
use crate::workspace::live::SandboxConnection;

/// A spare that belongs to a workspace. Its sandbox is not configured for the workspace yet.
pub(crate) struct Claimed {
    pub(crate) workspace: Workspace,
    pub(crate) connection: SandboxConnection,
}

/// The reason why no spare was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The pool is off.
    Off,
    /// There are no spares.
    Empty,
    /// The spares are on another provider.
    OtherProvider,
    /// The spares have another image, size or network.
    OtherShape,
    /// The spares have an older image.
    StaleImage,
    /// The image has no digest that the spares could be compared with.
    NoImage,
    /// Other requests have claimed the spares.
    Taken,
}

impl Miss {
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Miss::Off => "off",
            Miss::Empty => "empty",
            Miss::OtherProvider => "other_provider",
            Miss::OtherShape => "other_shape",
            Miss::StaleImage => "stale_image",
            Miss::NoImage => "no_image",
            Miss::Taken => "taken",
        }
    }
}

impl Pool {
    /// Makes a spare the sandbox of a new workspace, if one matches. The workspace gets the spare's id, for which `new` makes the row.
    pub(crate) async fn claim(
        &self,
        provider: &SharedProvider,
        shape: &Shape,
        placement: &Placement,
        new: impl Fn(WorkspaceId) -> NewWorkspace,
    ) -> Result<std::result::Result<Claimed, Miss>> {
        if self.miss_reason(shape).is_some() {
            // There may be spares to which this process has no channel yet: from before a restart, or of another server.
            self.adopt_for(shape).await?;
        }
        if let Some(miss) = self.miss_reason(shape) {
            return Ok(Err(miss));
        }
        let digest = match provider.image_digest(&shape.image).await {
            Ok(digest) => digest,
            // The start without a spare reports the error.
            Err(_) => return Ok(Err(Miss::NoImage)),
        };
        let mut miss = Miss::Taken;
        while let Some(open) = self.take_open(shape, &digest, &mut miss) {
            let claim = Claim {
                spare: open.spare.id,
                provider_workspace_id: open.sandbox.to_string(),
                placement: Placement { warm_hit: true, ..placement.clone() },
            };
            let mut row = new(open.spare.id);
            row.metadata.insert("disk_quota".to_owned(), json!(provider.capabilities().disk_quota));
            row.metadata.insert("agent_version".to_owned(), json!(open.connection.channel.hello().version));
            if !open.warnings.is_empty() {
                row.metadata.insert("warnings".to_owned(), json!(open.warnings));
            }
            let limit = Some(self.context.settings.workspaces.max_concurrent);
            match self.context.store.claim_spare(row, &claim, limit).await {
                Ok(Some(workspace)) => {
                    self.changed.notify_one();
                    return Ok(Ok(Claimed { workspace, connection: open.connection }));
                }
                // Another request has claimed it, or it was removed.
                Ok(None) => {}
                Err(error) => {
                    let is_full = matches!(error, StoreError::LimitReached { .. });
                    if is_full {
                        self.open.lock().insert(open.spare.id, open);
                    }
                    return Err(error.into());
                }
            }
        }
        self.changed.notify_one();
        Ok(Err(miss))
    }

    /// Opens a channel to a matching spare, if there is one.
    async fn adopt_for(&self, shape: &Shape) -> Result<()> {
        let spares = self.context.store.spares().await?.readable;
        let is_ready = |spare: &&Spare| spare.status == SpareStatus::Ready && spare.shape == *shape;
        for spare in spares.iter().filter(is_ready) {
            self.adopt_spares(std::slice::from_ref(spare)).await;
            if self.has_channel(spare.id) {
                break;
            }
        }
        Ok(())
    }

    /// The reason why no spare can match. None if one may.
    fn miss_reason(&self, shape: &Shape) -> Option<Miss> {
        let open = self.open.lock();
        if open.is_empty() {
            let is_on = self.is_on.load(Ordering::Relaxed);
            return Some(if is_on { Miss::Empty } else { Miss::Off });
        }
        if open.values().any(|open| open.spare.shape == *shape) {
            return None;
        }
        let elsewhere =
            |open: &OpenSpare| Shape { provider: shape.provider, ..open.spare.shape.clone() } == *shape;
        Some(if open.values().any(elsewhere) { Miss::OtherProvider } else { Miss::OtherShape })
    }

    /// Takes the oldest matching spare with an open channel, so that no other request of this process tries it.
    fn take_open(&self, shape: &Shape, digest: &str, miss: &mut Miss) -> Option<OpenSpare> {
        let mut open = self.open.lock();
        let fits = |open: &&OpenSpare| open.spare.shape == *shape && !open.connection.channel.is_closed();
        if open.values().filter(fits).any(|open| open.spare.image_digest != digest) {
            *miss = Miss::StaleImage;
        }
        let oldest = open
            .values()
            .filter(fits)
            .filter(|open| open.spare.image_digest == digest)
            .min_by_key(|open| (open.spare.created_at, open.spare.id))?;
        let id = oldest.spare.id;
        open.remove(&id)
    }
}
