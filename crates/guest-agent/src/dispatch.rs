//! Passes each call to its tool and sends the answer.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use emergent_guest_protocol::{GuestCall, Kind, MAX_DATA_BYTES, ShutdownCall, UsageAnswer, WriteCall};
use emergent_guest_tools::search::{Search, SearchReply};
use emergent_guest_tools::{edit, read, write};
use emergent_wire::tools::{ReadAnswer, ReadRequest, WriteAnswer};
use emergent_wire::{ErrorCode, ErrorDetail};
use serde::Serialize;

use crate::agent::Agent;
use crate::call::Call;
use crate::machine::{self, identity};
use crate::{bash, cgroup, disk, git, listen, procfs, search, serve, tunnel};

/// Runs a call to its end and sends its answer.
pub(crate) fn run(agent: &Arc<Agent>, call: &Arc<Call>, message: GuestCall) {
    let context = agent.context();
    let cancel = &call.cancelled;
    let is_command = matches!(message, GuestCall::Bash(_));
    let answer = match message {
        GuestCall::Configure(configuration) => {
            agent.configure(configuration);
            json(Ok(Empty {}))
        }
        GuestCall::Machine(message) => json(identity::apply(agent, &message).map(|()| Empty {})),
        GuestCall::Bash(message) if message.request.background => {
            json(agent.operations.start(agent, &message))
        }
        GuestCall::Bash(message) => json(bash::run(agent, call, &message)),
        GuestCall::Attach(message) => json(agent.operations.attach(call, &message)),
        GuestCall::KillOperation(message) => json(agent.operations.kill(message.operation_id)),
        GuestCall::Read(request) if request.raw => json(read_raw(agent, call, &request)),
        GuestCall::Read(request) => json(read::read(&context, &request, cancel)),
        GuestCall::Write(message) => json(write_file(agent, call, &message)),
        GuestCall::Edit(request) => {
            json(agent.disk.refuse_if_full(agent).and_then(|()| edit::edit(&context, &request, cancel)))
        }
        GuestCall::Glob(request) => found(search::run(agent, call, Search::Glob(request))),
        GuestCall::Grep(request) => found(search::run(agent, call, Search::Grep(request))),
        GuestCall::Git(request) => json(git::run(agent, call, &request)),
        GuestCall::Serve(message) => json(serve::run(agent, call, &message)),
        GuestCall::Connect(message) => json(tunnel::run(call, &message).map(|()| Empty {})),
        GuestCall::Listen(message) => json(listen::run(call, &message).map(|()| Empty {})),
        GuestCall::Usage(()) => json(Ok(usage(agent))),
        GuestCall::Flush(()) => {
            rustix::fs::sync();
            json(Ok(Empty {}))
        }
        GuestCall::Shutdown(message) => {
            agent.end_processes(grace(&message));
            json(Ok(Empty {}))
        }
        GuestCall::PowerOff(message) => json(machine::must_be().map(|()| -> Empty {
            agent.end_processes(grace(&message));
            machine::power_off()
        })),
    };
    call.finish(answer);
    if is_command {
        // After the command: the new shells would compete with it for the CPU.
        agent.shells.refill(agent);
    }
}

#[derive(Serialize)]
struct Empty {}

/// The answer in a search's reply.
fn found(reply: Result<SearchReply, ErrorDetail>) -> Result<Vec<u8>, ErrorDetail> {
    match reply? {
        SearchReply::Glob(answer) => json(Ok(answer)),
        SearchReply::Grep(answer) => json(Ok(answer)),
        SearchReply::Err(error) => Err(error),
    }
}

fn json<T: Serialize>(answer: Result<T, ErrorDetail>) -> Result<Vec<u8>, ErrorDetail> {
    serde_json::to_vec(&answer?).map_err(|error| ErrorDetail::new(ErrorCode::Internal, error.to_string()))
}

fn grace(message: &ShutdownCall) -> Duration {
    const MOST_MS: u64 = 60_000;
    Duration::from_millis(message.grace_ms.min(MOST_MS))
}

/// Sends a file's bytes as data.
fn read_raw(agent: &Agent, call: &Call, request: &ReadRequest) -> Result<ReadAnswer, ErrorDetail> {
    let mut raw = read::open_raw(&agent.context(), &request.file_path)?;
    let mut buffer = vec![0_u8; MAX_DATA_BYTES];
    let mut left = raw.size;
    while left > 0 {
        let length = raw.file.read(&mut buffer).map_err(|error| {
            ErrorDetail::new(ErrorCode::Unacceptable, format!("{} can't be read: {error}", request.file_path))
        })?;
        if length == 0 {
            break;
        }
        call.send_data(Kind::Stdout, &buffer[..length])?;
        left = left.saturating_sub(length as u64);
    }
    Ok(ReadAnswer { file_size: raw.size - left, media_type: Some(raw.media_type), ..ReadAnswer::default() })
}

/// Writes a file out of the call's input.
fn write_file(agent: &Agent, call: &Call, message: &WriteCall) -> Result<WriteAnswer, ErrorDetail> {
    agent.disk.refuse_if_full(agent)?;
    let mut writer = write::FileWriter::create(&agent.context(), &message.file_path)?;
    while let Some(bytes) = call.next_input()? {
        writer.push(&bytes)?;
    }
    writer.commit()
}

fn usage(agent: &Agent) -> UsageAnswer {
    let memory = cgroup::sandbox_memory().unwrap_or_default();
    let (used, total) = match agent.configuration().watched_disk_bytes {
        Some(limit) => (agent.disk.used(), limit),
        None => disk::file_system(),
    };
    UsageAnswer {
        disk_used_bytes: used,
        disk_total_bytes: total,
        memory_used_bytes: memory.total.saturating_sub(memory.available),
        memory_total_bytes: memory.total,
        agent_rss_bytes: procfs::own_resident_bytes().unwrap_or(0),
        processes: agent.processes().len() as u64,
        running_operations: agent.operations.count() as u64,
        cpu_time_ms: procfs::cpu_time_ms(),
    }
}
