//! The stored configuration of a hosted server.

use serde::{Deserialize, Deserializer, Serialize};

use super::{DEFAULT_PATH, DEFAULT_TIMEOUT_MS, McpMode, RegisterMcpServer, RestartPolicy};
use crate::object::Object;

/// A directory of a server that outlives its containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpVolume {
    /// Its name: lower-case letters, digits, `-` and `_`.
    pub name: String,
    /// Its path in the server's sandbox.
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

/// The part of a registration that other workspaces do not have.
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
    /// The port that it listens on, if it speaks HTTP.
    #[serde(default)]
    pub port: Option<u16>,
    /// The path of its HTTP endpoint.
    #[serde(default)]
    pub path: Option<String>,
    /// The sharing of processes by clients.
    pub mode: McpMode,
    /// The condition for a restart.
    pub restart_policy: RestartPolicy,
    /// Directories that outlive its containers.
    #[serde(default)]
    pub volumes: Vec<McpVolume>,
    /// The time limit of a call.
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
