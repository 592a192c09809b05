//! The memory of the host.

use procfs::{Current as _, Meminfo};

/// The memory that processes can still get, in bytes.
pub fn available_memory() -> Option<u64> {
    Meminfo::current().ok()?.mem_available
}

#[cfg(test)]
mod tests {
    use procfs::FromRead as _;

    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        assert!(available_memory().is_some_and(|bytes| bytes > 0));
        let own = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let replaced = own.lines().map(|line| match line.split_once(':') {
            Some(("MemAvailable", _)) => "MemAvailable:   2 kB".to_owned(),
            _ => line.to_owned(),
        });
        let text = replaced.collect::<Vec<_>>().join("\n");
        assert_eq!(
            Meminfo::from_read(text.as_bytes()).ok().and_then(|memory| memory.mem_available),
            Some(2048)
        );
    }
}
