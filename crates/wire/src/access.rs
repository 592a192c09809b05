//! Access tokens as the REST API sees them. A token's secret is shown once, when it is made.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::id::{ProjectId, SessionId, TokenId, WorkspaceId};
use crate::unreadable::UnreadableRow;
use crate::validate::Validate;

/// The scope of a token: what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "scope", rename_all = "snake_case")]
pub enum TokenScope {
    /// Everything.
    Admin,
    /// The resources of one project, within its quotas.
    Project {
        /// The project.
        project_id: ProjectId,
    },
    /// The workspace of one session, with the session's tools.
    Session {
        /// The session.
        session_id: SessionId,
        /// The session's workspace. Null for a session without one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        workspace_id: Option<WorkspaceId>,
    },
    /// The tools of one workspace, and looking at it.
    Workspace {
        /// The workspace.
        workspace_id: WorkspaceId,
    },
}

/// The request for a token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// Its name, unique among the tokens that are not revoked.
    pub name: String,
    /// Bind it to this workspace; without it the token is an admin token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_id: Option<WorkspaceId>,
    /// It stops working after this time; never unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

/// The longest name of a token.
const MAX_NAME_BYTES: usize = 100;
/// The longest life of a token: ten years.
const MAX_TTL_SECONDS: u64 = 10 * 365 * 24 * 3600;

impl Validate for CreateToken {
    fn validate(&self) -> Result<(), ErrorDetail> {
        let bad = |message: String| Err(ErrorDetail::new(ErrorCode::BadRequest, message));
        let name = self.name.trim();
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
            return bad("name must have 1 to 100 characters, and no control characters".to_owned());
        }
        if self.ttl_seconds.is_some_and(|ttl| !(1..=MAX_TTL_SECONDS).contains(&ttl)) {
            return bad(format!("ttl_seconds must be from 1 to {MAX_TTL_SECONDS}"));
        }
        Ok(())
    }
}

impl CreateToken {
    /// The scope of the token.
    pub fn scope(&self) -> TokenScope {
        match self.workspace_id {
            Some(workspace_id) => TokenScope::Workspace { workspace_id },
            None => TokenScope::Admin,
        }
    }
}

/// A token, without its secret.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Token {
    /// Its id.
    pub id: TokenId,
    /// Its name.
    pub name: String,
    /// Its scope.
    #[serde(flatten)]
    pub scope: TokenScope,
    /// The time it was made.
    pub created_at: DateTime<Utc>,
    /// The time it expires.
    pub expires_at: Option<DateTime<Utc>>,
    /// The time of its last use (to the minute).
    pub last_used_at: Option<DateTime<Utc>>,
}

/// A new token with its secret, which is never shown again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedToken {
    /// The token.
    #[serde(flatten)]
    pub token: Token,
    /// The secret to send as `Authorization: Bearer …`.
    pub secret: String,
}

/// The tokens that are not revoked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenList {
    /// The tokens, oldest first.
    pub tokens: Vec<Token>,
    /// Tokens that can't be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableRow>,
}
