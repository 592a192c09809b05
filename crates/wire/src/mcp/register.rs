//! The request that registers a hosted server.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{MAX_TIMEOUT_MS, McpMode, McpVolume, RestartPolicy};
use crate::error::{ErrorCode, ErrorDetail};
use crate::id::WorkspaceId;
use crate::object;
use crate::tools::{AGENT_DIR, WORKSPACE_DIR, check_environment};
use crate::validate::Validate;
use crate::workspace::{NetworkMode, ProviderChoice, RequestedLimits};

/// Volumes of one server.
const MAX_VOLUMES: usize = 8;

/// Registers a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RegisterMcpServer {
    /// Its name, by which it can be addressed: lower-case letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// The image; the default workspace image unless given, which needs a command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The program and its arguments, instead of what the image runs by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Arguments for the image's own program, instead of those it has by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Whether it speaks over standard input and output (the default), or HTTP by itself.
    #[serde(default = "yes")]
    pub stdio_bridge: bool,
    /// The port it listens on, when it speaks HTTP by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The path of its endpoint then; `/mcp` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The sharing of processes by clients; `shared` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<McpMode>,
    /// The condition for a restart; `always` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<RestartPolicy>,
    /// Variables it sees. Sealed at rest, never shown again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Directories that outlive its containers: `{"name", "path"}` or `"name:/path"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<McpVolume>,
    /// Its resource limits; 0.5 CPU, 512M memory and 1G disk unless given.
    #[serde(default, deserialize_with = "object::one_or_null", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<RequestedLimits>,
    /// Its network mode; `nat` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkMode>,
    /// The time limit of a call; 30 s unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// The provider; `auto` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderChoice>,
}

const fn yes() -> bool {
    true
}

impl Validate for RegisterMcpServer {
    fn validate(&self) -> Result<(), ErrorDetail> {
        let bad = |message: String| Err(ErrorDetail::new(ErrorCode::BadRequest, message));
        check_name(&self.name)?;
        if self.image.is_none() && self.command.is_empty() {
            return bad("give an image, or a command to run in the default one".to_owned());
        }
        if let Some(image) = &self.image
            && (image.is_empty()
                || image.len() > 256
                || image.starts_with('-')
                || image.contains(char::is_whitespace))
        {
            return bad("image is empty, over 256 bytes, starts with '-' or has a space in it".to_owned());
        }
        if !self.command.is_empty() && !self.args.is_empty() {
            return bad(
                "give either command (the whole program) or args (for the image's own program)".to_owned()
            );
        }
        let words = self.command.iter().chain(&self.args);
        if words.clone().any(|word| word.contains('\0'))
            || words.map(String::len).sum::<usize>() > 64 * 1024
            || self.command.first().is_some_and(String::is_empty)
        {
            return bad("command or args have a NUL byte, no program, or are over 64 KiB".to_owned());
        }
        match (self.stdio_bridge, self.port) {
            (true, Some(_)) => {
                return bad("port needs stdio_bridge: false: a server speaks either stdio or HTTP".to_owned());
            }
            (false, None | Some(0)) => {
                return bad("stdio_bridge: false needs the port that the server listens on".to_owned());
            }
            _ => {}
        }
        if !self.stdio_bridge && self.mode == Some(McpMode::PerSession) {
            return bad(
                "mode per_session is for servers on stdio; one on HTTP keeps its own sessions".to_owned()
            );
        }
        if let Some(path) = &self.path
            && (self.stdio_bridge
                || !path.starts_with('/')
                || path.len() > 256
                || path.chars().any(|c| c.is_control() || c.is_whitespace() || matches!(c, '?' | '#')))
        {
            return bad("path must be a plain path such as /mcp, and needs stdio_bridge: false".to_owned());
        }
        if let Some(timeout) = self.timeout_ms
            && !(1..=MAX_TIMEOUT_MS).contains(&timeout)
        {
            return bad(format!("timeout_ms is {timeout}: it must be from 1 to {MAX_TIMEOUT_MS}"));
        }
        check_volumes(&self.volumes)?;
        check_environment(&self.environment)?;
        self.resource_limits.unwrap_or_default().validate()
    }
}

/// Refuses a name that can't be used in an address, or that is an id.
fn check_name(name: &str) -> Result<(), ErrorDetail> {
    let fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
    let begins_well =
        name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if begins_well && name.len() <= 63 && name.bytes().all(fine) && name.parse::<WorkspaceId>().is_err() {
        return Ok(());
    }
    let message = "name must be 1 to 63 lower-case letters, digits, '-', '_' or '.', begin with a letter or digit, and not \
                   be an id";
    Err(ErrorDetail::new(ErrorCode::BadRequest, message))
}

fn check_volumes(volumes: &[McpVolume]) -> Result<(), ErrorDetail> {
    let bad = |message: String| Err(ErrorDetail::new(ErrorCode::BadRequest, message));
    if volumes.len() > MAX_VOLUMES {
        return bad(format!("at most {MAX_VOLUMES} volumes"));
    }
    let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
    for McpVolume { name, path } in volumes {
        let fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
        if name.is_empty() || name.len() > 32 || !name.bytes().all(fine) || name.starts_with(['-', '_']) {
            return bad(format!(
                "volume '{}': a name is 1 to 32 lower-case letters, digits, '-' or '_'",
                name.escape_debug().take(64).collect::<String>()
            ));
        }
        let odd = path.split('/').skip(1).any(|part| matches!(part, "" | "." | ".."));
        let taken = ["/proc", "/sys", "/dev", "/etc", AGENT_DIR, WORKSPACE_DIR];
        let is_taken = taken.iter().any(|own| path == own || path.starts_with(&format!("{own}/")));
        if !path.starts_with('/') || odd || path.len() > 256 || path.contains(['\0', ':']) || is_taken {
            return bad(format!(
                "volume '{name}': the path must be absolute and plain, such as /data, and not under {}",
                taken.join(", ")
            ));
        }
        if !names.insert(name) || !paths.insert(path) {
            return bad(format!("volume '{name}': its name or path is there twice"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(fields: &Value) -> Result<(), String> {
        let mut request = json!({ "name": "server", "image": "image" });
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let request: RegisterMcpServer =
            serde_json::from_value(request).map_err(|error| error.to_string())?;
        request.validate().map_err(|error| error.message)
    }

    #[test]
    fn valid_registrations_are_accepted() {
        for fields in [
            json!({}),
            json!({ "args": ["/data"] }),
            json!({ "command": ["node", "index.js"], "image": null }),
            json!({ "stdio_bridge": false, "port": 8080, "path": "/x/mcp" }),
            json!({ "volumes": ["data:/data", { "name": "more", "path": "/var/more" }] }),
            json!({ "mode": "per_session", "restart_policy": "on-failure", "timeout_ms": 1 }),
        ] {
            assert_eq!(check(&fields), Ok(()), "{fields}");
        }
    }

    #[test]
    fn invalid_registrations_are_refused_with_a_reason() {
        for (fields, reason) in [
            (json!({ "name": "Upper" }), "name"),
            (json!({ "name": "" }), "name"),
            (json!({ "name": "-x" }), "name"),
            (json!({ "name": "018f4e3a-0000-7000-8000-000000000000" }), "name"),
            (json!({ "image": null }), "command"),
            (json!({ "image": "a b" }), "image"),
            (json!({ "command": ["x"], "args": ["y"] }), "either"),
            (json!({ "command": [""] }), "command"),
            (json!({ "port": 80 }), "stdio_bridge"),
            (json!({ "stdio_bridge": false }), "port"),
            (json!({ "stdio_bridge": false, "port": 80, "path": "mcp" }), "path"),
            (json!({ "stdio_bridge": false, "port": 80, "mode": "per_session" }), "per_session"),
            (json!({ "timeout_ms": 0 }), "timeout_ms"),
            (json!({ "volumes": ["data"] }), "name:/path"),
            (json!({ "volumes": ["Data:/data"] }), "volume"),
            (json!({ "volumes": ["data:/../etc"] }), "volume"),
            (json!({ "volumes": ["data:/workspace/x"] }), "volume"),
            (json!({ "volumes": ["data:/a", "data:/b"] }), "twice"),
            (json!({ "environment": { "A B": "x" } }), "environment"),
            (json!({ "resource_limits": { "memory": "1M" } }), "resource_limits.memory"),
            (json!({ "unknown": 1 }), "unknown field"),
        ] {
            let error = check(&fields).err().unwrap_or_default();
            assert!(error.contains(reason), "{fields}: {error}");
        }
    }
}
