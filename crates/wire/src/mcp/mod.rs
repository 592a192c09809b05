//! Hosted MCP servers as the REST API and the store see them.

use std::collections::{BTreeMap, BTreeSet};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::id::WorkspaceId;
use crate::names::names;
use crate::object::{self, Object};
use crate::size::{ByteSize, CpuCount};
use crate::tools::{WORKSPACE_DIR, check_environment};
use crate::unreadable::UnreadableRow;
use crate::validate::Validate;
use crate::workspace::{
    ContainerType, Lifecycle, NetworkMode, Placement, ProviderChoice, ProviderName, RequestedLimits,
    ResourceLimits, Usage,
};

names!(
    /// When a server whose process ended is started again.
    RestartPolicy {
        /// Whenever it ends.
        Always = "always",
        /// When it ends with an error.
        OnFailure = "on-failure",
        /// Never.
        Never = "never",
    }
);
names!(
    /// How many clients use one process.
    McpMode {
        /// All of them: cheap, but the server can't ask a client for anything (sampling, elicitation, roots).
        Shared = "shared",
        /// One: each session has a process of its own.
        PerSession = "per_session",
    }
);
names!(
    /// How a hosted server is doing.
    McpStatus {
        /// It is being started.
        Starting = "starting",
        /// It takes calls.
        Ready = "ready",
        /// It ended and will be started again.
        Restarting = "restarting",
        /// It runs, but does not answer.
        Unresponsive = "unresponsive",
        /// It ended, and its restart policy leaves it so.
        Stopped = "stopped",
        /// Its sandbox can't be had; this is tried again.
        Error = "error",
        /// Another server of this installation runs it.
        Elsewhere = "elsewhere",
        /// It is being removed.
        Removing = "removing",
    }
);

/// What a hosted server may use at most, unless it asks for something else.
pub const DEFAULT_LIMITS: ResourceLimits =
    ResourceLimits { cpu: CpuCount::from_millis(500), memory: ByteSize::mib(512), disk: ByteSize::gib(1) };
/// How long a call may take unless the server or the call says so.
pub const DEFAULT_TIMEOUT_MS: u64 = 30_000;
/// The longest time a call may be given.
pub const MAX_TIMEOUT_MS: u64 = 24 * 3600 * 1000;
/// Where servers that speak HTTP themselves usually listen.
pub const DEFAULT_PATH: &str = "/mcp";
/// Volumes of one server.
const MAX_VOLUMES: usize = 8;

/// A directory of a server that outlives its containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpVolume {
    /// Its name: lower-case letters, digits, `-` and `_`.
    pub name: String,
    /// Where the server finds it.
    pub path: String,
}

impl<'de> Deserialize<'de> for McpVolume {
    /// `{"name": …, "path": …}`, or `"name:/path"` as elsewhere.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            name: String,
            path: String,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Text(String),
            Fields(Object<Fields>),
        }
        match Form::deserialize(deserializer)? {
            Form::Fields(Object(Fields { name, path })) => Ok(Self { name, path }),
            Form::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

impl std::str::FromStr for McpVolume {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) =
            text.split_once(':').ok_or_else(|| format!("'{text}' is no volume: write name:/path"))?;
        Ok(Self { name: name.to_owned(), path: path.to_owned() })
    }
}

/// Registers a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RegisterMcpServer {
    /// What it is called, and how it can be addressed: lower-case letters, digits, `-`, `_` and `.`.
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
    /// How many clients use one process; `shared` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<McpMode>,
    /// When it is started again; `always` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<RestartPolicy>,
    /// Variables it sees. Sealed at rest, never shown again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Directories that outlive its containers: `{"name", "path"}` or `"name:/path"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<McpVolume>,
    /// What it may use at most; 0.5 CPU, 512M memory and 1G disk unless given.
    #[serde(default, deserialize_with = "object::one_or_null", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<RequestedLimits>,
    /// What it can reach; `nat` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkMode>,
    /// How long a call may take; 30 s unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Which provider; `auto` unless given.
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
        check_environment(&self.environment)
    }
}

/// Names that can stand in an address, and are not ids.
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
        let taken = ["/proc", "/sys", "/dev", "/etc", "/.emergent", WORKSPACE_DIR];
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

/// What is kept of a server's registration besides what every workspace has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct McpConfig {
    /// The program and its arguments, instead of the image's.
    #[serde(default)]
    pub command: Vec<String>,
    /// Arguments for the image's own program.
    #[serde(default)]
    pub args: Vec<String>,
    /// Whether it speaks over standard input and output.
    pub stdio_bridge: bool,
    /// The port it listens on otherwise.
    #[serde(default)]
    pub port: Option<u16>,
    /// The path of its endpoint then.
    #[serde(default)]
    pub path: Option<String>,
    /// How many clients use one process.
    pub mode: McpMode,
    /// When it is started again.
    pub restart_policy: RestartPolicy,
    /// Directories that outlive its containers.
    #[serde(default)]
    pub volumes: Vec<McpVolume>,
    /// How long a call may take.
    pub timeout_ms: u64,
    /// The names of its variables.
    #[serde(default)]
    pub environment: Vec<String>,
}

impl From<&RegisterMcpServer> for McpConfig {
    fn from(request: &RegisterMcpServer) -> Self {
        Self {
            command: request.command.clone(),
            args: request.args.clone(),
            stdio_bridge: request.stdio_bridge,
            port: request.port,
            path: (!request.stdio_bridge)
                .then(|| request.path.clone().unwrap_or_else(|| DEFAULT_PATH.to_owned())),
            mode: request.mode.unwrap_or(McpMode::Shared),
            restart_policy: request.restart_policy.unwrap_or(RestartPolicy::Always),
            volumes: request.volumes.clone(),
            timeout_ms: request.timeout_ms.unwrap_or(DEFAULT_TIMEOUT_MS),
            environment: request.environment.keys().cloned().collect(),
        }
    }
}

/// How a server's process ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpExit {
    /// When.
    pub at: DateTime<Utc>,
    /// Its exit code; null when a signal ended it, or it was never started.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<String>,
    /// Whether it was ended for want of memory.
    pub oom_killed: bool,
    /// In words.
    pub reason: String,
    /// What it wrote to standard error last.
    pub stderr_tail: String,
}

/// A hosted MCP server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpServer {
    /// Its id.
    pub id: WorkspaceId,
    /// What it is called.
    pub name: String,
    /// How it is doing.
    pub status: McpStatus,
    /// Always `mcp_server`.
    pub container_type: ContainerType,
    /// Always `persistent`.
    pub lifecycle: Lifecycle,
    /// When it was registered.
    pub created_at: DateTime<Utc>,
    /// Always null: it lives until it is removed.
    pub expires_at: Option<DateTime<Utc>>,
    /// The image.
    pub image: String,
    /// The program and its arguments, when not the image's own.
    pub command: Vec<String>,
    /// Arguments for the image's own program, when not its own.
    pub args: Vec<String>,
    /// Whether it speaks over standard input and output.
    pub stdio_bridge: bool,
    /// The port it listens on otherwise.
    pub port: Option<u16>,
    /// The path of its endpoint then.
    pub path: Option<String>,
    /// How many clients use one process.
    pub mode: McpMode,
    /// When it is started again.
    pub restart_policy: RestartPolicy,
    /// The names of its variables; the values are never shown.
    pub environment: Vec<String>,
    /// Directories that outlive its containers.
    pub volumes: Vec<McpVolume>,
    /// What it may use at most.
    pub resource_limits: ResourceLimits,
    /// What it can reach.
    pub network: NetworkMode,
    /// How long a call may take.
    pub timeout_ms: u64,
    /// Its provider.
    pub provider: Option<ProviderName>,
    /// The provider's own name for its sandbox.
    pub provider_workspace_id: String,
    /// Why it is where it is.
    pub placement: Option<Placement>,
    /// What its owner should know.
    pub warnings: Vec<String>,
    /// The address of its Streamable HTTP endpoint on this server.
    pub endpoint: String,
    /// When its process was started.
    pub started_at: Option<DateTime<Utc>>,
    /// How often it was started again since this server began, or since a restart by hand.
    pub restarts: u64,
    /// How often its process ended in the last minute.
    pub recent_crashes: u64,
    /// When it is started again, while it is held back.
    pub next_restart_at: Option<DateTime<Utc>>,
    /// How its process ended last.
    pub last_exit: Option<McpExit>,
    /// What is wrong.
    pub error: Option<String>,
    /// Calls in progress.
    pub pending_calls: u64,
    /// Sessions of clients.
    pub sessions: u64,
    /// What it said of itself when it was initialized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub initialize_result: Option<serde_json::Value>,
    /// What it uses now; only when one server is asked for, and it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// All hosted servers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpServerList {
    /// Oldest first.
    pub servers: Vec<McpServer>,
    /// Servers that can't be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableRow>,
}

/// A line of a server's log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpLogLine {
    /// Its number, from 1 on, without a gap.
    pub number: u64,
    /// `stderr`: the server wrote it. `supervisor`: it is about the server.
    pub source: McpLogSource,
    /// What it says.
    pub text: String,
}

names!(
    /// Who wrote a line.
    McpLogSource {
        /// The server, to standard error.
        Stderr = "stderr",
        /// Who looks after it.
        Supervisor = "supervisor",
    }
);

/// A server's log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpLogs {
    /// The last lines, oldest first.
    pub lines: Vec<McpLogLine>,
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
    fn what_can_be_run_is_accepted() {
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
    fn what_can_not_is_refused_with_a_reason() {
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
            (json!({ "unknown": 1 }), "unknown field"),
        ] {
            let error = check(&fields).err().unwrap_or_default();
            assert!(error.contains(reason), "{fields}: {error}");
        }
    }
}
