//! The reason of a failed git operation, in the `details` of its error.

use emergent_wire::ErrorDetail;
use serde::{Deserialize, Serialize};

/// The field of an error's `details` that holds the reason.
const REASON: &str = "reason";

/// The reason of a failed git operation, as far as the agent can find it without reading git's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GitFailureReason {
    /// The remote asked for credentials, or rejected those that it got.
    AuthenticationRequired,
    /// The remote does not answer: its name does not resolve, the connection fails or breaks, or a server in front of it
    /// reports an error of its own. The operation can be repeated.
    NetworkUnreachable,
    /// The transfer of a clone failed, although the remote answers and has the branch. The clone can be repeated.
    TransferInterrupted,
    /// The directory is not in a repository.
    NotARepository,
    /// The workspace's disk was full while git ran.
    DiskFull,
}

impl GitFailureReason {
    /// The reason in an error's details; none where the agent found none.
    pub fn of(error: &ErrorDetail) -> Option<Self> {
        serde_json::from_value(error.details.as_ref()?.get(REASON)?.clone()).ok()
    }

    /// The error with this reason in its details.
    #[must_use]
    pub fn add_to(self, error: ErrorDetail) -> ErrorDetail {
        error.with_details(serde_json::json!({ REASON: self }))
    }
}

#[cfg(test)]
mod tests {
    use emergent_wire::ErrorCode;

    use super::*;

    #[test]
    fn a_reason_survives_the_way_through_an_error() {
        let error = ErrorDetail::new(ErrorCode::GitFailed, "git clone failed");
        assert_eq!(GitFailureReason::of(&error), None);
        let error = GitFailureReason::NetworkUnreachable.add_to(error);
        assert_eq!(GitFailureReason::of(&error), Some(GitFailureReason::NetworkUnreachable));
        assert_eq!(error.details, Some(serde_json::json!({ "reason": "network_unreachable" })));
    }
}
