//! The request for a workspace.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ContainerType, DeploymentMode, NetworkMode, ProviderChoice, RequestedLimits, SecurityLevel};
use crate::error::{ErrorCode, ErrorDetail};
use crate::git_url::check_repository;
use crate::object;
use crate::tools::check_environment;
use crate::validate::Validate;

/// The request for a workspace. Each field has a default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateWorkspace {
    /// `agent_workspace` (the default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_type: Option<ContainerType>,
    /// A repository to clone into `/workspace` before the workspace is ready: a git URL without credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository_url: Option<String>,
    /// The branch, tag or commit to check out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// The provider; `auto` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderChoice>,
    /// The operator of the host; the installation's own mode unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deployment_mode: Option<DeploymentMode>,
    /// The least isolation; `standard` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security_level: Option<SecurityLevel>,
    /// Its resource limits.
    #[serde(default, deserialize_with = "object::one_or_null", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<RequestedLimits>,
    /// The image; `emergent/workspace:latest` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Variables that every command in the workspace sees. Sealed at rest, never shown again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Its network mode; `nat` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkMode>,
    /// Whether a pre-started spare may be used; yes unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_start: Option<bool>,
    /// It expires this long after its last use; 30 days unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

/// The shortest life a workspace can be given.
pub const MIN_TTL_SECONDS: u64 = 60;
/// The longest life a workspace can be given.
pub const MAX_TTL_SECONDS: u64 = 365 * 24 * 3600;

impl Validate for CreateWorkspace {
    fn validate(&self) -> Result<(), ErrorDetail> {
        let bad = |message: String| Err(ErrorDetail::new(ErrorCode::BadRequest, message));
        if let Some(ttl) = self.ttl_seconds
            && !(MIN_TTL_SECONDS..=MAX_TTL_SECONDS).contains(&ttl)
        {
            return bad(format!(
                "ttl_seconds is {ttl}: it must be from {MIN_TTL_SECONDS} to {MAX_TTL_SECONDS}"
            ));
        }
        if let Some(url) = &self.repository_url {
            check_repository("repository_url", url)?;
        }
        for (field, value, longest) in [("branch", &self.branch, 256), ("image", &self.image, 256)] {
            if let Some(value) = value {
                let odd = value.chars().any(|c| c.is_control() || c.is_whitespace());
                if value.is_empty() || value.len() > longest || value.starts_with('-') || odd {
                    return bad(format!(
                        "{field} is empty, over {longest} bytes, starts with '-' or has a space in it"
                    ));
                }
            }
        }
        if self.branch.is_some() && self.repository_url.is_none() {
            return bad("branch needs repository_url".into());
        }
        check_environment(&self.environment)?;
        self.resource_limits.unwrap_or_default().validate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_in_a_create_request_is_refused() {
        assert!(serde_json::from_str::<CreateWorkspace>("{}").is_ok());
        for body in [
            r#"{"ttl":5}"#,
            r#"{"provider":"lxc"}"#,
            r#"{"resource_limits":{"ram":"4G"}}"#,
            r#"{"resource_limits":{"memory":"lots"}}"#,
            r#"{"ttl_seconds":-1}"#,
        ] {
            assert!(serde_json::from_str::<CreateWorkspace>(body).is_err(), "{body}");
        }
    }
    #[test]
    fn a_repository_url_with_a_credential_or_an_unknown_scheme_is_refused() {
        let validate = |url: &str| {
            CreateWorkspace { repository_url: Some(url.to_owned()), ..CreateWorkspace::default() }.validate()
        };
        validate("https://host.example/a/b.git").unwrap();
        validate("ssh://git@host.example/a/b.git").unwrap();
        let error = validate("https://x-access-token:hunter2@host.example/a/b").unwrap_err();
        assert_eq!(error.code, ErrorCode::Unacceptable);
        assert!(error.message.contains("Settings > Integrations"), "{error}");
        assert!(!error.message.contains("hunter2"), "{error}");
        for bad in ["ftp://host.example/a", "file:///a", "a/b", "", "-x", "https://a b"] {
            assert_eq!(validate(bad).unwrap_err().code, ErrorCode::BadRequest, "{bad}");
        }
    }
}
