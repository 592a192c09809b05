//! Errors as HTTP answers. The only place where an error of the manager becomes a code and a status.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use emergent_wire::error::ErrorBody;
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::error::{HostError, ManagerError};
use crate::guest::GuestError;
use crate::launch::LaunchError;
use crate::vmm::VmmError;

/// An error as the client gets it.
#[derive(Debug)]
pub(crate) struct ApiError(ErrorDetail);

impl ApiError {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(ErrorDetail::new(code, message))
    }
}

impl From<ManagerError> for ApiError {
    fn from(error: ManagerError) -> Self {
        Self::new(code_of(&error), error.to_string())
    }
}

fn code_of(error: &ManagerError) -> ErrorCode {
    match error {
        ManagerError::DirectoryInUse(_) | ManagerError::UnmetRequirement(_) => ErrorCode::Unavailable,
        ManagerError::Request(_) => ErrorCode::Unacceptable,
        ManagerError::NoSlot(_) => ErrorCode::LimitReached,
        ManagerError::NotFound(_) => ErrorCode::NotFound,
        ManagerError::State(_) => ErrorCode::WrongState,
        ManagerError::Host(HostError::DiskFull(_)) => ErrorCode::HostDiskFull,
        ManagerError::Host(HostError::TimedOut { .. })
        | ManagerError::Launch(LaunchError::TimedOut { .. })
        | ManagerError::Vmm(VmmError::TimedOut { .. })
        | ManagerError::Guest(GuestError::TimedOut { .. }) => ErrorCode::DeadlineExceeded,
        ManagerError::Host(_)
        | ManagerError::Launch(_)
        | ManagerError::Vmm(_)
        | ManagerError::Guest(_)
        | ManagerError::Damaged(_)
        | ManagerError::Image(_) => ErrorCode::ProviderFailed,
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = self.0.code;
        let status = StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(ErrorBody { error: self.0 })).into_response();
        if code == ErrorCode::Unauthorized {
            let realm = HeaderValue::from_static("Bearer realm=\"firecracker-manager\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, realm);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use emergent_wire::WorkspaceId;

    use super::*;
    use crate::error::NotFound;
    use crate::machine::StateError;
    use crate::record::DamagedRecord;
    use crate::slot::NoSlot;

    #[test]
    fn each_kind_of_error_has_its_code() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let (id, reason) = (WorkspaceId::generate(), "unknown variant".to_owned());
        let damaged = DamagedRecord { id, slot: None, network: None, reason };
        let timed_out = GuestError::TimedOut { step: "flushing", seconds: 1, last: None };
        for (error, code) in [
            (NotFound::Image("i".to_owned()).into(), ErrorCode::NotFound),
            (NoSlot::AllTaken { most: 1 }.into(), ErrorCode::LimitReached),
            (StateError::NoSlot.into(), ErrorCode::WrongState),
            (HostError::io("copying", full()).into(), ErrorCode::HostDiskFull),
            (HostError::io("copying", io::Error::other("broken")).into(), ErrorCode::ProviderFailed),
            (timed_out.into(), ErrorCode::DeadlineExceeded),
            (GuestError::NobodyListens.into(), ErrorCode::ProviderFailed),
            (damaged.into(), ErrorCode::ProviderFailed),
        ] {
            assert_eq!(code_of(&error), code, "{error}");
        }
    }
}
