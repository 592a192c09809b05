//! Messages: what the JSON in HELLO, CALL and RESULT frames says.
//!
//! Answers of the tools are the types of `emergent_wire::tools`; outputs that may be large or not text
//! (a command's output, a file's bytes) travel as data frames beside them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use emergent_wire::OperationId;
use emergent_wire::git::GitRequest;
use emergent_wire::tools::{BashRequest, EditRequest, GlobRequest, GrepRequest, ReadRequest};
use serde::{Deserialize, Serialize};

/// The version this build of the agent speaks.
pub const PROTOCOL_VERSION: u16 = 2;
/// The oldest agent this build of the server still speaks with.
const OLDEST_AGENT: u16 = 1;

/// The vsock port on which the agent of a virtual machine takes channels.
pub const CHANNEL_PORT: u32 = 1024;
/// The vsock port of the host that it connects to once when it does.
pub const READY_PORT: u32 = 1025;

/// The host's HELLO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostHello {
    /// The oldest protocol version the host speaks.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl Default for HostHello {
    fn default() -> Self {
        Self { oldest: OLDEST_AGENT, newest: PROTOCOL_VERSION }
    }
}

/// The guest's HELLO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentHello {
    /// The protocol version the agent speaks.
    pub protocol: u16,
    /// The agent's own version.
    pub version: String,
    /// New each time the agent starts: tells a restarted sandbox from a reconnected one.
    pub boot_id: String,
}

/// Host and agent have no version in common.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the agent speaks protocol {agent}, this server {oldest} to {newest}: restart the workspace to renew its agent"
)]
pub struct VersionMismatch {
    agent: u16,
    oldest: u16,
    newest: u16,
}

impl HostHello {
    /// Whether the host can speak with this agent.
    pub fn agree(&self, agent: &AgentHello) -> Result<u16, VersionMismatch> {
        if (self.oldest..=self.newest).contains(&agent.protocol) {
            Ok(agent.protocol)
        } else {
            Err(VersionMismatch { agent: agent.protocol, oldest: self.oldest, newest: self.newest })
        }
    }
}

/// What a CALL frame asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestCall {
    /// Binds the sandbox to its workspace. Answer: `{}`.
    Configure(Configuration),
    /// Makes a virtual machine this one and no other. Answer: `{}`.
    Machine(MachineCall),
    /// Runs a command. Output as data; answer: `BashAnswer` with empty `stdout` and `stderr`.
    Bash(BashCall),
    /// Follows a command in the background: its output from an offset on as data, until it ends.
    /// Answer: `OperationAnswer` with empty `stdout` and `stderr`.
    Attach(AttachCall),
    /// Ends a command in the background (SIGTERM, 5 s, SIGKILL). Answer: `OperationAnswer`.
    KillOperation(OperationCall),
    /// Answer: `ReadAnswer`. With `raw` the bytes come as data.
    Read(ReadRequest),
    /// The content comes as INPUT. Answer: `WriteAnswer`.
    Write(WriteCall),
    /// Answer: `EditAnswer`.
    Edit(EditRequest),
    /// Answer: `GlobAnswer`.
    Glob(GlobRequest),
    /// Answer: `GrepAnswer`.
    Grep(GrepRequest),
    /// Answer: `GitAnswer`.
    Git(GitRequest),
    /// Runs a server: its standard input comes as INPUT, its output goes as data as it comes, until it ends. When the
    /// call is cancelled or the channel ends, so do the server and all it started. Answer: [`ServeAnswer`].
    Serve(ServeCall),
    /// Connects to a port of the sandbox: what comes as INPUT is sent, what is received goes as data. Answer: `{}`.
    Connect(ConnectCall),
    /// Answer: [`UsageAnswer`].
    Usage(()),
    /// Puts on the disk what was written. Answer: `{}`.
    Flush(()),
    /// Ends all commands (SIGTERM, grace, SIGKILL) and flushes the disk. Answer: `{}`.
    Shutdown(ShutdownCall),
    /// The same, and then ends the virtual machine. There is no answer but its end.
    PowerOff(ShutdownCall),
}

/// What makes a sandbox the sandbox of one workspace. Sent first on every connection, so that neither the
/// image nor the container's own settings hold it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// Variables every command sees.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Where file tools must stay; empty: anywhere in the sandbox.
    #[serde(default)]
    pub confined_to: Vec<String>,
    /// The name servers to use, when the sandbox's own settings would not work.
    #[serde(default)]
    pub nameservers: Vec<String>,
    /// The memory limit in bytes; the agent acts before the host kills the whole sandbox.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// The disk limit in bytes that the agent must watch, when the file system does not enforce it.
    #[serde(default)]
    pub watched_disk_bytes: Option<u64>,
    /// The most tasks (processes and threads) that commands may have; without it as many as the sandbox can hold. Since
    /// version 2; older agents do not limit them.
    #[serde(default)]
    pub max_tasks: Option<u32>,
    /// No commands are expected: no shells are started ahead.
    #[serde(default)]
    pub without_shells: bool,
}

/// What a virtual machine is called, where it is, what time it is. Sent by whoever started it, before anybody uses it, and
/// again when it was put back from a copy of its memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineCall {
    /// Its host name.
    pub hostname: String,
    /// What programs tell machines apart by: 32 hexadecimal digits.
    pub machine_id: String,
    /// The time, in milliseconds since 1970.
    pub unix_time_ms: u64,
    /// Random bytes that no other machine gets.
    pub entropy: Vec<u8>,
    /// The hardware address of its interface.
    pub mac: Option<String>,
    /// Its address.
    pub address: Option<Ipv4Addr>,
    /// How many bits of the address name the network.
    pub prefix: u8,
    /// Where packets to elsewhere go; none: nowhere.
    pub gateway: Option<Ipv4Addr>,
    /// The name servers that it can reach.
    pub nameservers: Vec<String>,
    /// The variables that its image sets.
    pub environment: BTreeMap<String, String>,
}

/// Runs a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BashCall {
    /// The id the operation gets.
    pub operation_id: OperationId,
    /// The request.
    pub request: BashRequest,
    /// Send output as it comes, instead of head and tail at the end.
    #[serde(default)]
    pub stream: bool,
    /// With `stream`: head and tail are in the answer all the same.
    #[serde(default)]
    pub collect: bool,
}

/// Follows or reads a command in the background.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttachCall {
    /// The operation.
    pub operation_id: OperationId,
    /// Where in its output to start.
    #[serde(default)]
    pub offset: u64,
    /// Stay until it ends; else answer with what is there.
    #[serde(default)]
    pub follow: bool,
}

/// Names a command in the background.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperationCall {
    /// The operation.
    pub operation_id: OperationId,
}

/// Writes a file; its content follows as INPUT.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WriteCall {
    /// The file.
    pub file_path: String,
}

/// Runs a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeCall {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Variables it sees besides those of the sandbox.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Where it runs; `/workspace` unless given.
    #[serde(default)]
    pub directory: Option<String>,
    /// Who it runs as, in the form of an image's USER (`name`, `uid`, `name:group`, …); root unless given.
    #[serde(default)]
    pub user: Option<String>,
    /// Directories that are its own: while they are root's, they are given to its user.
    #[serde(default)]
    pub owned: Vec<String>,
}

/// How a server ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeAnswer {
    /// Its exit code; none when a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<String>,
    /// Whether it was ended for want of memory.
    pub oom_killed: bool,
    /// How long it ran.
    pub duration_ms: u64,
}

/// Connects to a port of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectCall {
    /// The port, on the sandbox's own loopback address.
    pub port: u16,
    /// How long to try while nobody listens there.
    #[serde(default)]
    pub wait_ms: u64,
    /// Only find out whether somebody listens.
    #[serde(default)]
    pub probe: bool,
}

/// Ends all commands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShutdownCall {
    /// How long commands have after SIGTERM.
    pub grace_ms: u64,
}

/// What the sandbox uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageAnswer {
    /// Bytes used under `/workspace`.
    pub disk_used_bytes: u64,
    /// Bytes there are under `/workspace`.
    pub disk_total_bytes: u64,
    /// Memory in use.
    pub memory_used_bytes: u64,
    /// Memory there is.
    pub memory_total_bytes: u64,
    /// Resident memory of the agent itself.
    pub agent_rss_bytes: u64,
    /// Processes besides the agent and its shells in waiting.
    pub processes: u64,
    /// Commands that run in the background.
    pub running_operations: u64,
    /// CPU time that everything in the sandbox has used since it was started.
    #[serde(default)]
    pub cpu_time_ms: u64,
}
