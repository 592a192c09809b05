//! What the control group of a plain container says, of either version. A virtual machine and gVisor have none.

use std::fs;
use std::path::Path;

use crate::procfs::Memory;

/// Where a group's files are, and what they are called.
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

/// What the group may use and what is left of that. Files that are only kept because there is room count as left.
pub(crate) fn memory() -> Option<Memory> {
    LAYOUTS.iter().find_map(|layout| memory_in(Path::new(layout.directory), layout))
}

fn memory_in(directory: &Path, layout: &Layout) -> Option<Memory> {
    let number = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
    let (total, used) = (number(layout.limit)?, number(layout.used)?);
    let kept = field(&directory.join("memory.stat"), "inactive_file").unwrap_or(0);
    Some(Memory { total, available: total.saturating_sub(used.saturating_sub(kept)) })
}

/// How many processes the kernel has killed for want of memory: in the group, else at all.
pub(crate) fn oom_kills() -> u64 {
    let groups = LAYOUTS.iter().map(|layout| Path::new(layout.directory).join(layout.events));
    groups.chain(["/proc/vmstat".into()]).find_map(|path| field(&path, "oom_kill")).unwrap_or(0)
}

/// A number in a file of lines that consist of a name and a number.
fn field(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let number = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    number.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn memory_is_what_the_group_may_use_and_files_that_need_not_be_kept_are_left() {
        for layout in &LAYOUTS {
            let group = tempfile::tempdir().unwrap();
            let put = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
            put(layout.limit, "1000\n");
            put(layout.used, "700\n");
            assert_eq!(memory_in(group.path(), layout).map(|memory| memory.available), Some(300));
            put("memory.stat", "inactive_anon 5\ninactive_file 200\n");
            let memory = memory_in(group.path(), layout).unwrap();
            assert_eq!((memory.total, memory.available), (1000, 500));
            // Without a limit it is the host's memory that counts.
            put(layout.limit, "max\n");
            assert!(memory_in(group.path(), layout).is_none());
        }
    }
}
