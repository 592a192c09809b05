//! Messages: the JSON in CALL, STARTED and RESULT frames.
//!
//! Answers of the tools are the types of `emergent_wire::tools`. Output that may be large or binary (a command's output, a
//! file's bytes) is sent as data frames before the answer.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use emergent_wire::OperationId;
use emergent_wire::git::GitRequest;
use emergent_wire::tools::{BashRequest, EditRequest, GlobRequest, GrepRequest, ReadRequest};
use serde::{Deserialize, Serialize};

/// The request in a CALL frame.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestCall {
    /// Binds the sandbox to its workspace. Answer: `{}`.
    Configure(Configuration),
    /// Gives a virtual machine its identity. Answer: `{}`.
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
    /// Runs a server until it ends: INPUT is its standard input, its output is sent as data. When the call is cancelled
    /// or the channel ends, the agent ends the server and its descendants. Answer: [`ServeAnswer`].
    Serve(ServeCall),
    /// Connects to a port of the sandbox: INPUT is sent to it, received bytes are sent as data. Answer: `{}`.
    Connect(ConnectCall),
    /// Opens a TCP port on 127.0.0.1 of the sandbox. STARTED holds a [`Listening`]; ACCEPT calls get its connections. The
    /// port and its connections close when the call is cancelled or the channel ends. Answer: `{}`. Since version 3.
    Listen(ListenCall),
    /// Answer: [`UsageAnswer`].
    Usage(()),
    /// Flushes the file systems to the disk. Answer: `{}`.
    Flush(()),
    /// Ends all commands (SIGTERM, grace, SIGKILL) and flushes the disk. Answer: `{}`.
    Shutdown(ShutdownCall),
    /// The same, then ends the virtual machine. The end of the machine takes the place of an answer.
    PowerOff(ShutdownCall),
}

impl GuestCall {
    /// The name of the call, as in its JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Configure(_) => "configure",
            Self::Machine(_) => "machine",
            Self::Bash(_) => "bash",
            Self::Attach(_) => "attach",
            Self::KillOperation(_) => "kill_operation",
            Self::Read(_) => "read",
            Self::Write(_) => "write",
            Self::Edit(_) => "edit",
            Self::Glob(_) => "glob",
            Self::Grep(_) => "grep",
            Self::Git(_) => "git",
            Self::Serve(_) => "serve",
            Self::Connect(_) => "connect",
            Self::Listen(_) => "listen",
            Self::Usage(()) => "usage",
            Self::Flush(()) => "flush",
            Self::Shutdown(_) => "shutdown",
            Self::PowerOff(_) => "power_off",
        }
    }
}

/// The configuration that binds a sandbox to its workspace. The host sends it first on every connection, so that neither
/// the image nor the container's settings hold it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// Variables every command sees.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// The directories that file tools are confined to; empty: the whole sandbox.
    #[serde(default)]
    pub confined_to: Vec<String>,
    /// The name servers that replace those of the sandbox's settings; empty: the settings stay.
    #[serde(default)]
    pub nameservers: Vec<String>,
    /// The memory limit in bytes; the agent acts before the host kills the whole sandbox.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// The disk limit in bytes that the agent enforces, when the file system does not.
    #[serde(default)]
    pub watched_disk_bytes: Option<u64>,
    /// The limit on the tasks (processes and threads) of commands; none: as many as the sandbox can hold. Since version 2;
    /// agents of version 1 do not limit them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tasks: Option<u32>,
    /// No commands are expected: no shells are started ahead.
    #[serde(default)]
    pub without_shells: bool,
}

/// The identity of a virtual machine: name, address, time. The manager sends it after each start, before the first use, and
/// again after the machine was restored from a memory snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineCall {
    /// Its host name.
    pub hostname: String,
    /// The content of `/etc/machine-id`: 32 hexadecimal digits.
    pub machine_id: String,
    /// The time, in milliseconds since 1970.
    pub unix_time_ms: u64,
    /// Random bytes for its kernel's generator; each machine gets others.
    pub entropy: Vec<u8>,
    /// The hardware address of its interface.
    pub mac: Option<String>,
    /// Its address.
    pub address: Option<Ipv4Addr>,
    /// The length of the network prefix in bits.
    pub prefix: u8,
    /// The default gateway; none: no default route.
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
    /// The offset in its output to start at.
    #[serde(default)]
    pub offset: u64,
    /// Follow until it ends; else answer with the output so far.
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
    /// Its working directory; `/workspace` unless given.
    #[serde(default)]
    pub directory: Option<String>,
    /// Its user, in the form of an image's USER (`name`, `uid`, `name:group`, …); root unless given.
    #[serde(default)]
    pub user: Option<String>,
    /// Directories that are given to its user, if root owns them.
    #[serde(default)]
    pub owned: Vec<String>,
}

/// The end of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeAnswer {
    /// Its exit code; none when a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<String>,
    /// Whether it was killed because memory ran out.
    pub oom_killed: bool,
    /// Its run time.
    pub duration_ms: u64,
}

/// Connects to a port of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectCall {
    /// The port, on the sandbox's own loopback address.
    pub port: u16,
    /// The time limit for retries while no program listens on the port.
    #[serde(default)]
    pub wait_ms: u64,
    /// Only test whether a program listens on the port.
    #[serde(default)]
    pub probe: bool,
}

/// Opens a TCP port on 127.0.0.1 of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenCall {
    /// The port; 0: any free one.
    pub port: u16,
}

/// The STARTED message of a LISTEN call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// The port that is open.
    pub port: u16,
}

/// Ends all commands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShutdownCall {
    /// The time between SIGTERM and SIGKILL.
    pub grace_ms: u64,
}

/// The resources that the sandbox uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageAnswer {
    /// Bytes used under `/workspace`.
    pub disk_used_bytes: u64,
    /// The capacity of `/workspace` in bytes.
    pub disk_total_bytes: u64,
    /// Memory in use.
    pub memory_used_bytes: u64,
    /// The sandbox's memory.
    pub memory_total_bytes: u64,
    /// Resident memory of the agent itself.
    pub agent_rss_bytes: u64,
    /// Processes besides the agent and the processes that it has started ahead.
    pub processes: u64,
    /// Commands that run in the background.
    pub running_operations: u64,
    /// CPU time of all processes since the sandbox was started.
    #[serde(default)]
    pub cpu_time_ms: u64,
}
