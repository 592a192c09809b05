//! The errors of providers.

use emergent_wire::ErrorCode;

/// The reason why a provider could not do something.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProviderError {
    /// The provider can't be used: its engine, its manager or a runtime is missing or down.
    #[error("{0}")]
    Unavailable(String),
    /// This provider can't satisfy the request: the image is missing, the limits are out of range.
    #[error("{0}")]
    Unacceptable(String),
    /// The host's disk has not enough free space.
    #[error("{0}")]
    NoRoom(String),
    /// The sandbox is not running.
    #[error("the sandbox is not running: {0}")]
    NotRunning(String),
    /// The sandbox does not exist.
    #[error("the sandbox is gone: {0}")]
    Gone(String),
    /// The sandbox runs, but its agent does not answer.
    #[error("the sandbox runs but its agent does not answer: {0}")]
    Unresponsive(String),
    /// A step took longer than its time limit.
    #[error("{what} did not end within {seconds} s")]
    TimedOut {
        /// The step.
        what: &'static str,
        /// Its time limit.
        seconds: u64,
    },
    /// A step failed.
    #[error("{what}: {reason}")]
    Failed {
        /// The step.
        what: &'static str,
        /// The cause.
        reason: String,
    },
}

impl ProviderError {
    /// A step that failed.
    pub(crate) fn failed(what: &'static str, reason: impl std::fmt::Display) -> Self {
        Self::Failed { what, reason: reason.to_string() }
    }

    /// The code that callers of the server get.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Unavailable(_) => ErrorCode::Unavailable,
            Self::Unacceptable(_) => ErrorCode::Unacceptable,
            Self::NoRoom(_) => ErrorCode::HostDiskFull,
            Self::TimedOut { .. } => ErrorCode::DeadlineExceeded,
            Self::NotRunning(_) | Self::Gone(_) | Self::Unresponsive(_) | Self::Failed { .. } => {
                ErrorCode::ProviderFailed
            }
        }
    }
}
