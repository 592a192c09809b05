//! The checkout of a new workspace's repository.

use std::time::Duration;

use emergent_guest_client::{CallError, GuestClient};
use emergent_guest_protocol::{GitFailureReason, GuestCall};
use emergent_wire::git::{GitAction, GitAnswer, GitRequest};
use emergent_wire::workspace::Workspace;

use crate::workspace::error::{CheckoutError, Result, WorkspaceError};

/// The pauses between attempts to reach a repository.
const PAUSES: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(8)];
/// The warning for a repository that needs credentials, when the server has none.
const AUTHENTICATION_FAILED: &str =
    "Repository authentication failed — connect GitHub in Settings > Integrations";

/// Clones the repository of a workspace, if it has one. Returns warnings: a repository that needs credentials leaves the
/// workspace empty.
pub(super) async fn checkout(channel: &GuestClient, workspace: &Workspace) -> Result<Vec<String>> {
    let Some(url) = &workspace.repository_url else {
        return Ok(Vec::new());
    };
    let request = GitRequest {
        repository_url: Some(url.clone()),
        branch: workspace.branch.clone(),
        ..GitRequest::new(GitAction::Clone)
    };
    let mut pauses = PAUSES.iter();
    loop {
        let call = channel.start(&GuestCall::Git(request.clone())).await?;
        let error = match call.answer::<GitAnswer>().await {
            Ok(_) => return Ok(Vec::new()),
            Err(error) => error,
        };
        let reason = match &error {
            CallError::Failed(detail) => GitFailureReason::of(detail),
            _ => None,
        };
        match reason {
            Some(GitFailureReason::AuthenticationRequired) => {
                return Ok(vec![AUTHENTICATION_FAILED.to_owned()]);
            }
            Some(GitFailureReason::NetworkUnreachable | GitFailureReason::TransferInterrupted) => {
                match pauses.next() {
                    Some(pause) => tokio::time::sleep(*pause).await,
                    None => return Err(WorkspaceError::Checkout(CheckoutError(error))),
                }
            }
            _ => return Err(WorkspaceError::Checkout(CheckoutError(error))),
        }
    }
}
