//! The parsers for `/proc`: processes, memory, counters. For the agent and the search program; nothing else in the sandbox
//! parses these files. All results are best effort: a process may end at any moment.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A process of the sandbox.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// The id of its parent; 0 for one that was started from outside the sandbox.
    pub parent: i32,
    /// Its start time, in clock ticks since the sandbox's start.
    pub began: u64,
    /// The id of its session.
    pub session: i32,
    /// The name of its program.
    pub name: String,
    /// Its resident memory.
    pub resident_bytes: u64,
}

impl Process {
    /// Whether it was started from outside the sandbox, like the processes that hold channels open. Its channel ends with it.
    pub fn is_from_outside(&self) -> bool {
        self.parent == 0
    }
}

/// All processes but this one.
pub fn processes() -> Vec<Process> {
    let own = std::process::id().cast_signed();
    process_ids().filter(|pid| *pid != own).filter_map(process).collect()
}

/// The ids of all processes.
pub fn process_ids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The flag of the kernel's own threads, which a virtual machine lists like processes.
const KERNEL_THREAD: i64 = 0x0020_0000;

/// The text of `/proc/PID/stat`. The name in it may hold any byte, so it need not be UTF-8.
fn stat(pid: i32) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/stat")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The name of the program, and the fields after it. The name is in parentheses and may hold others, so the last one ends it.
fn name_and_fields(stat: &str) -> Option<(&str, Vec<&str>)> {
    let (before, after) = stat.rsplit_once(')')?;
    Some((before.split_once('(')?.1, after.split_ascii_whitespace().collect()))
}

/// A process, if it runs.
pub fn process(pid: i32) -> Option<Process> {
    let stat = stat(pid)?;
    let (name, fields) = name_and_fields(&stat)?;
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
        name: name.to_owned(),
        resident_bytes: u64::try_from(pages).ok()? * rustix::param::page_size() as u64,
    })
}

/// The current time in the unit of [`Process::began`].
pub fn now_ticks() -> u64 {
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

/// The CPU time of all processes, ended ones included: it is added to their parents', in the end to the agent's.
pub fn cpu_time_ms() -> u64 {
    let ticks: u64 = process_ids().filter_map(cpu_ticks).sum();
    ticks * 1000 / rustix::param::clock_ticks_per_second().max(1)
}

/// User and system time of a process and of its children that it has waited for.
fn cpu_ticks(pid: i32) -> Option<u64> {
    let stat = stat(pid)?;
    let (_, fields) = name_and_fields(&stat)?;
    fields.get(11..15)?.iter().map(|field| field.parse::<u64>().ok()).sum()
}

/// The bytes that a process has written so far, to files and pipes.
pub fn written_bytes(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let written = text.lines().find_map(|line| line.strip_prefix("wchar: "));
    written.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// A variable of a process's initial environment.
pub fn variable(pid: i32, name: &str) -> Option<String> {
    let environ = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value = environ
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    String::from_utf8(value.to_vec()).ok()
}

/// An amount of memory, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// The part that processes can still get.
    pub available: u64,
}

/// The memory of `/proc/meminfo`. In a plain container that is the host's.
pub fn memory() -> Option<Memory> {
    memory_of(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Reads the memory with one system call each time, for the memory guard.
pub struct MemoryGauge {
    file: fs::File,
}

impl MemoryGauge {
    /// Opens `/proc/meminfo`.
    pub fn open() -> Option<Self> {
        Some(Self { file: fs::File::open("/proc/meminfo").ok()? })
    }

    /// The memory now.
    pub fn read(&self) -> Option<Memory> {
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

/// The number of processes that the kernel has killed because memory ran out.
pub fn oom_kills() -> u64 {
    named_number("/proc/vmstat".as_ref(), "oom_kill").unwrap_or(0)
}

/// A number in a file whose lines are a name, a space and a number, as in `/proc/vmstat` and in control groups.
pub fn named_number(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let number = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    number.trim().parse().ok()
}

/// The resident memory of this process; none where it can't be read.
pub fn own_resident_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_with_its_memory_and_its_parent() {
        let own = process(std::process::id().cast_signed()).unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id().cast_signed());
        assert!(own.resident_bytes > 0 && own_resident_bytes() > Some(0));
        assert!(own.began <= now_ticks() + 1);
        assert!(process_ids().any(|pid| pid == own.pid));
        assert!(processes().iter().all(|other| other.pid != own.pid));
    }

    #[test]
    fn processes_with_hostile_names_are_read() {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::process::CommandExt;
        use std::process::{Command, Stdio};

        let directory = tempfile::tempdir().unwrap();
        for name in [&b"a\xff"[..], b") R 1 1 (", b"a) Z 1 1\n1 1", b"\n", b"\xe2\x82", b"(", b")"] {
            // A process is called as the file that it was started from.
            let program = directory.path().join(OsStr::from_bytes(name));
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
            let mut child =
                Command::new(program).arg0("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
            let pid = child.id().cast_signed();
            let (found, ticks) = (processes().into_iter().find(|one| one.pid == pid), cpu_ticks(pid));
            child.kill().unwrap();
            child.wait().unwrap();
            let found = found.unwrap_or_else(|| panic!("{} is not found", name.escape_ascii()));
            assert_eq!(found.parent, std::process::id().cast_signed());
            assert_eq!(found.name, String::from_utf8_lossy(name));
            assert!(ticks.is_some(), "{}", name.escape_ascii());
        }
    }

    #[test]
    fn memory_is_read_with_and_without_available_memory() {
        let text = "MemTotal:     2048 kB\nMemFree:      512 kB\nMemAvailable: 1024 kB\n";
        let memory = memory_of(text).unwrap();
        assert_eq!((memory.total, memory.available), (2 << 20, 1 << 20));
        let memory = memory_of("MemTotal: 2048 kB\nMemFree: 512 kB\n").unwrap();
        assert_eq!(memory.available, 512 << 10);
        assert!(memory_of("MemFree: 512 kB\n").is_none());
    }
}
