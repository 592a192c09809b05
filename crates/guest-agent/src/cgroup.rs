//! The memory of a plain container's control group, of either version. A virtual machine and gVisor have none.

use std::fs;
use std::path::Path;

use crate::procfs::{self, Memory};

/// The directory and the file names of a version.
struct Layout {
    directory: &'static str,
    limit: &'static str,
    used: &'static str,
    events: &'static str,
}

const LAYOUTS: [Layout; 2] = [
    Layout {
        directory: "/sys/fs/cgroup",
        limit: "memory.max",
        used: "memory.current",
        events: "memory.events",
    },
    Layout {
        directory: "/sys/fs/cgroup/memory",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        events: "memory.oom_control",
    },
];

/// The sandbox's memory: the group's where it has a limit below the kernel's memory.
pub(crate) fn sandbox_memory() -> Option<Memory> {
    let memory = procfs::memory()?;
    Some(group_memory().filter(|limited| limited.total < memory.total).unwrap_or(memory))
}

/// The group's limit, and the unused part of it. Cached files that can be dropped count as unused.
fn group_memory() -> Option<Memory> {
    LAYOUTS.iter().find_map(|layout| memory_in(Path::new(layout.directory), layout))
}

fn memory_in(directory: &Path, layout: &Layout) -> Option<Memory> {
    let number = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
    let (total, used) = (number(layout.limit)?, number(layout.used)?);
    let cached = procfs::named_number(&directory.join("memory.stat"), "inactive_file").unwrap_or(0);
    Some(Memory { total, available: total.saturating_sub(used.saturating_sub(cached)) })
}

/// The number of processes that the kernel has killed because memory ran out: in the group, else in all.
pub(crate) fn oom_kills() -> u64 {
    let mut files = LAYOUTS.iter().map(|layout| Path::new(layout.directory).join(layout.events));
    files.find_map(|path| procfs::named_number(&path, "oom_kill")).unwrap_or_else(procfs::oom_kills)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn cached_files_of_a_group_count_as_available_memory() {
        for layout in &LAYOUTS {
            let group = tempfile::tempdir().unwrap();
            let put = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
            put(layout.limit, "1000\n");
            put(layout.used, "700\n");
            assert_eq!(memory_in(group.path(), layout).map(|memory| memory.available), Some(300));
            put("memory.stat", "inactive_anon 5\ninactive_file 200\n");
            let memory = memory_in(group.path(), layout).unwrap();
            assert_eq!((memory.total, memory.available), (1000, 500));
            // Without a limit the kernel's memory counts.
            put(layout.limit, "max\n");
            assert!(memory_in(group.path(), layout).is_none());
        }
    }
}
