//! Why the manager could not do something.

use std::any::Any;
use std::io;

use emergent_wire::{ErrorCode, ErrorDetail};

/// Why the manager could not do something.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ManagerError {
    /// Another manager has the directory.
    #[error("another manager runs in {0}")]
    Taken(String),
    /// MicroVMs can't be made on this host: a part is missing or does not work.
    #[error("{0}")]
    Unavailable(String),
    /// What was asked for can't be given.
    #[error("{0}")]
    Unacceptable(String),
    /// As many run as may, or the host has no room for more.
    #[error("{0}")]
    Full(String),
    /// The host's disk has no room for it.
    #[error("{0}")]
    NoRoom(String),
    /// There is no such thing.
    #[error("there is no {0} here")]
    NotFound(String),
    /// It is not in a state that allows this.
    #[error("{0}")]
    WrongState(String),
    /// A step took too long.
    #[error("{what} did not end within {seconds} s{}", detail.as_deref().map(|text| format!(": {text}")).unwrap_or_default())]
    TimedOut {
        /// The step.
        what: &'static str,
        /// Its bound.
        seconds: u64,
        /// What was seen meanwhile.
        detail: Option<String>,
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

impl ManagerError {
    /// A step that failed.
    pub(crate) fn failed(what: &'static str, reason: impl std::fmt::Display) -> Self {
        Self::Failed { what, reason: reason.to_string() }
    }
}

impl From<ManagerError> for ErrorDetail {
    fn from(error: ManagerError) -> Self {
        let code = match &error {
            ManagerError::Taken(_) | ManagerError::Unavailable(_) => ErrorCode::Unavailable,
            ManagerError::Unacceptable(_) => ErrorCode::Unacceptable,
            ManagerError::Full(_) => ErrorCode::LimitReached,
            ManagerError::NoRoom(_) => ErrorCode::HostDiskFull,
            ManagerError::NotFound(_) => ErrorCode::NotFound,
            ManagerError::WrongState(_) => ErrorCode::WrongState,
            ManagerError::TimedOut { .. } => ErrorCode::DeadlineExceeded,
            ManagerError::Failed { .. } => ErrorCode::ProviderFailed,
        };
        ErrorDetail::new(code, error.to_string())
    }
}

/// Runs what blocks on a thread where it may.
pub(crate) async fn on_host<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
    what: &'static str,
    step: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, ManagerError> {
    match tokio::task::spawn_blocking(step).await {
        Ok(result) => result.map_err(|error| {
            let error_of_host = (&error as &dyn Any).downcast_ref::<io::Error>();
            if error_of_host.is_some_and(|error| error.kind() == io::ErrorKind::StorageFull) {
                return ManagerError::NoRoom(error.to_string());
            }
            ManagerError::failed(what, error)
        }),
        Err(error) => Err(ManagerError::failed(what, error)),
    }
}
