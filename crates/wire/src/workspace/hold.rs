//! Holding a workspace: it is attached to one holder at a time.

use serde::{Deserialize, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::validate::Validate;

/// The request to attach a workspace to a holder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// The holder, such as the name of an agent or a session; the token's name unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

/// The request to detach a workspace from its holder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DetachRequest {
    /// The holder that it is detached from; the token's name unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// Detach it from any holder.
    #[serde(default)]
    pub force: bool,
}

impl Validate for AttachRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        self.holder.as_deref().map_or(Ok(()), check_holder)
    }
}

impl Validate for DetachRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        self.holder.as_deref().map_or(Ok(()), check_holder)
    }
}

/// The longest name of a holder.
pub const MAX_HOLDER_BYTES: usize = 200;

/// Refuses a name of a holder that could not be shown.
pub fn check_holder(holder: &str) -> Result<(), ErrorDetail> {
    if holder.is_empty() || holder.len() > MAX_HOLDER_BYTES || holder.chars().any(char::is_control) {
        let message =
            format!("holder is empty, over {MAX_HOLDER_BYTES} bytes or has a control character in it");
        return Err(ErrorDetail::new(ErrorCode::BadRequest, message));
    }
    Ok(())
}
