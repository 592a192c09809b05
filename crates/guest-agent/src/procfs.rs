//! What `/proc` says: processes, memory. Everything here is best effort: a process may be gone any moment.

use std::fs;
use std::os::unix::fs::FileExt;

use crate::cgroup;

/// A process of the sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    /// When it began, in clock ticks since the sandbox's start.
    pub(crate) began: u64,
    pub(crate) session: i32,
    pub(crate) name: String,
    pub(crate) resident_bytes: u64,
}

impl Process {
    /// Whether it was started from outside the sandbox, as those are that hold our channels: a channel ends with its own.
    pub(crate) fn is_the_hosts(&self) -> bool {
        self.parent == 0
    }
}

/// All processes but this one.
pub(crate) fn processes() -> Vec<Process> {
    let own = std::process::id().cast_signed();
    process_ids().filter(|pid| *pid != own).filter_map(process).collect()
}

/// The ids of all processes.
pub(crate) fn process_ids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The flag of a virtual machine's own threads, which look like processes.
const KERNEL_THREAD: i64 = 0x0020_0000;

/// One process, if it runs.
pub(crate) fn process(pid: i32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may hold anything, so the fields are counted from the last one.
    let (before, after) = stat.rsplit_once(')')?;
    let name = before.split_once('(')?.1.to_owned();
    let fields: Vec<&str> = after.split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<i64>().ok();
    let (state, parent, session, flags, began, pages) =
        (fields.first()?, number(1)?, number(3)?, number(6)?, number(19)?, number(21)?);
    if *state == "Z" || flags & KERNEL_THREAD != 0 {
        return None;
    }
    Some(Process {
        pid,
        parent: i32::try_from(parent).ok()?,
        began: u64::try_from(began).ok()?,
        session: i32::try_from(session).ok()?,
        name,
        resident_bytes: u64::try_from(pages).ok()? * rustix::param::page_size() as u64,
    })
}

/// Now, in clock ticks since the sandbox's start, as processes tell when they began.
pub(crate) fn now_ticks() -> u64 {
    let read = || -> Option<f64> {
        fs::read_to_string("/proc/uptime").ok()?.split_ascii_whitespace().next()?.parse().ok()
    };
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a positive number of seconds; a tick more or less is nothing"
    )]
    let ticks = (read().unwrap_or(0.0) * rustix::param::clock_ticks_per_second() as f64) as u64;
    ticks
}

/// CPU time of all processes, those included that have ended: their parents have it, and at last the agent.
pub(crate) fn cpu_time_ms() -> u64 {
    let ticks: u64 = process_ids().filter_map(cpu_ticks).sum();
    ticks * 1000 / rustix::param::clock_ticks_per_second().max(1)
}

/// User and system time of a process and of its children that it has waited for.
fn cpu_ticks(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    fields.get(11..15)?.iter().map(|field| field.parse::<u64>().ok()).sum()
}

/// What a process has written so far, to anything.
pub(crate) fn written_bytes(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let written = text.lines().find_map(|line| line.strip_prefix("wchar: "));
    written.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// A variable of the environment that the process was started with.
pub(crate) fn variable(pid: i32, name: &str) -> Option<String> {
    let environ = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value = environ
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    String::from_utf8(value.to_vec()).ok()
}

/// Memory as `/proc/meminfo` shows it, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) available: u64,
}

/// The sandbox's memory.
pub(crate) fn memory() -> Option<Memory> {
    let memory = memory_of(&fs::read_to_string("/proc/meminfo").ok()?)?;
    // In a plain container that is the host's; what it may have itself, its control group knows.
    Some(cgroup::memory().filter(|limited| limited.total < memory.total).unwrap_or(memory))
}

/// The sandbox's memory, for one who looks often: one system call each time.
pub(crate) struct MemoryGauge {
    file: fs::File,
}

impl MemoryGauge {
    pub(crate) fn open() -> Option<Self> {
        Some(Self { file: fs::File::open("/proc/meminfo").ok()? })
    }

    pub(crate) fn read(&self) -> Option<Memory> {
        let mut text = [0; 4096];
        let length = self.file.read_at(&mut text, 0).ok()?;
        memory_of(str::from_utf8(&text[..length]).ok()?)
    }
}

fn memory_of(text: &str) -> Option<Memory> {
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line[name.len()..].trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some(Memory {
        total: field("MemTotal:")?,
        available: field("MemAvailable:").or_else(|| field("MemFree:"))?,
    })
}

/// Resident memory of this process.
pub(crate) fn own_resident_bytes() -> u64 {
    let read = || -> Option<u64> {
        let text = fs::read_to_string("/proc/self/statm").ok()?;
        text.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()
    };
    read().unwrap_or(0) * rustix::param::page_size() as u64
}
