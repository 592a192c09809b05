//! Errors of the Docker engine, sorted by status code.
//!
//! The engine's API has a status and a message, and no code. Decisions use the status, or a second question about the state of
//! the object. Two failures have neither; their messages are compared in this file and nowhere else.

use bollard::errors::Error as BollardError;
use emergent_wire::error::with_causes;

use super::engine::ACT;

/// The reason why the engine did not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EngineError {
    /// The engine does not answer.
    #[error("the Docker engine does not answer ({0}): start it, or set DOCKER_HOST to where it listens")]
    Unreachable(String),
    /// The engine did not answer in time.
    #[error("the Docker engine did not answer within {0} s")]
    TimedOut(u64),
    /// The container, volume, network or image does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The image of a new container does not exist.
    #[error("the Docker engine has no image '{0}'")]
    NoImage(String),
    /// The object exists, is in use, or is in the wrong state.
    #[error("{0}")]
    Conflict(String),
    /// The engine counts mounts of a volume that should be removed.
    #[error("{0}")]
    VolumeMounted(String),
    /// The engine refused the request.
    #[error("{0}")]
    Refused(String),
    /// The OCI runtime (runsc, runc) could not start a container or a process.
    #[error("{message}")]
    Runtime {
        /// The message of the engine.
        message: String,
        /// The engine blames the request, not itself.
        is_refusal: bool,
    },
    /// Another failure of the engine.
    #[error("{0}")]
    Other(String),
}

impl From<BollardError> for EngineError {
    fn from(error: BollardError) -> Self {
        match error {
            BollardError::DockerResponseServerError { status_code, message } => {
                Self::from_response(status_code, message)
            }
            BollardError::RequestTimeoutError => Self::TimedOut(ACT.as_secs()),
            error @ (BollardError::HyperResponseError { .. }
            | BollardError::HyperLegacyError { .. }
            | BollardError::IOError { .. }
            | BollardError::SocketNotFoundError(_)) => Self::Unreachable(with_causes(&error)),
            other => Self::Other(with_causes(&other)),
        }
    }
}

impl EngineError {
    fn from_response(status: u16, message: String) -> Self {
        let is_refusal = (400..500).contains(&status);
        match status {
            404 => Self::NotFound(message),
            409 => Self::Conflict(message),
            _ if is_runtime_failure(&message) => Self::Runtime { message, is_refusal },
            _ if is_refusal => Self::Refused(message),
            _ => Self::Other(message),
        }
    }

    /// Recognises the failure to remove a volume whose mounts the engine miscounts.
    pub(super) fn sort_volume_removal(self) -> Self {
        match self {
            Self::Conflict(message) | Self::Other(message) if is_active_mount(&message) => {
                Self::VolumeMounted(message)
            }
            other => other,
        }
    }
}

/// Whether the OCI runtime failed, and not the engine. The engine answers 400 or 500 as for any failure, and inspecting the
/// container shows nothing else: only the message names the runtime.
fn is_runtime_failure(message: &str) -> bool {
    message.to_ascii_lowercase().contains("oci runtime")
}

/// Whether a volume was not removed because the engine counts mounts of it. The engine answers 500 as for a failed unmount, and
/// its API does not show the count: only the message tells.
fn is_active_mount(message: &str) -> bool {
    message.contains("volume has active mounts")
}

/// Takes an object that does not exist as success.
pub(crate) fn ignore_not_found(result: Result<(), EngineError>) -> Result<(), EngineError> {
    match result {
        Err(EngineError::NotFound(_)) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(status_code: u16, message: &str) -> EngineError {
        BollardError::DockerResponseServerError { status_code, message: message.to_owned() }.into()
    }

    #[test]
    fn errors_are_sorted_by_status() {
        let text = || "some message".to_owned();
        assert_eq!(response(404, "some message"), EngineError::NotFound(text()));
        assert_eq!(response(409, "some message"), EngineError::Conflict(text()));
        assert_eq!(response(400, "some message"), EngineError::Refused(text()));
        assert_eq!(response(500, "some message"), EngineError::Other(text()));
    }

    /// Messages of Docker 20 to 29.
    #[test]
    fn failures_without_a_status_of_their_own_are_recognised() {
        let message =
            "failed to create task for container: failed to create shim task: OCI runtime create failed: x";
        for (status, is_refusal) in [(400, true), (500, false)] {
            let expected = EngineError::Runtime { message: message.to_owned(), is_refusal };
            assert_eq!(response(status, message), expected);
        }
        let message = "remove v: volume has active mounts";
        let expected = EngineError::VolumeMounted(message.to_owned());
        assert_eq!(response(500, message).sort_volume_removal(), expected);
        assert!(matches!(response(500, "busy").sort_volume_removal(), EngineError::Other(_)));
    }
}
