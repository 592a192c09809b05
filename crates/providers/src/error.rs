//! Why a provider could not do something.

use emergent_wire::{ErrorCode, ErrorDetail};

/// Why a provider could not do something.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProviderError {
    /// The provider can't be used at all: a part of it is missing or down.
    #[error("{0}")]
    Unavailable(String),
    /// The request can't be satisfied by this provider: an image that is not there, limits it can't give.
    #[error("{0}")]
    Unacceptable(String),
    /// The host's disk has no room for it.
    #[error("{0}")]
    NoRoom(String),
    /// The sandbox is not running.
    #[error("the sandbox is not running: {0}")]
    NotRunning(String),
    /// There is no such sandbox any more.
    #[error("the sandbox is gone: {0}")]
    Gone(String),
    /// It runs, but its agent does not answer.
    #[error("the sandbox runs but its agent does not answer: {0}")]
    Unresponsive(String),
    /// A step took too long.
    #[error("{what} did not end within {seconds} s")]
    TimedOut {
        /// The step.
        what: &'static str,
        /// Its bound.
        seconds: u64,
    },
    /// A step failed.
    #[error("{what}: {reason}")]
    Failed {
        /// The step.
        what: &'static str,
        /// What was said.
        reason: String,
    },
}

impl ProviderError {
    /// A step that failed.
    pub(crate) fn failed(what: &'static str, reason: impl std::fmt::Display) -> Self {
        Self::Failed { what, reason: reason.to_string() }
    }
}

impl From<ProviderError> for ErrorDetail {
    fn from(error: ProviderError) -> Self {
        let code = match &error {
            ProviderError::Unavailable(_) => ErrorCode::Unavailable,
            ProviderError::Unacceptable(_) => ErrorCode::Unacceptable,
            ProviderError::NoRoom(_) => ErrorCode::HostDiskFull,
            ProviderError::TimedOut { .. } => ErrorCode::DeadlineExceeded,
            ProviderError::NotRunning(_)
            | ProviderError::Gone(_)
            | ProviderError::Unresponsive(_)
            | ProviderError::Failed { .. } => ErrorCode::ProviderFailed,
        };
        ErrorDetail::new(code, error.to_string())
    }
}
