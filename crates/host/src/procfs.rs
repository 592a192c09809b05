//! The parsers of `/proc`. No other module of the host side knows these formats.
//!
//! A process can end at any moment, also between the opening and the reading of its files. So functions about one process
//! return `None` for a process that is gone, and an error only when the process could not be read.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use rustix::io::Errno;

/// `/proc/PID/stat` of one process or thread, from its state on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    fields: Vec<String>,
}

impl ProcessStat {
    /// Reads the stat of a process or a thread. `None` if it is gone.
    pub fn read(pid: i32) -> io::Result<Option<Self>> {
        let bytes = unless_gone(fs::read(format!("/proc/{pid}/stat")))?;
        Ok(bytes.and_then(|bytes| Self::parse(&String::from_utf8_lossy(&bytes))))
    }

    /// The program's name can contain anything, brackets included. The last bracket ends it.
    fn parse(stat: &str) -> Option<Self> {
        let (_, fields) = stat.rsplit_once(')')?;
        Some(Self { fields: fields.split_ascii_whitespace().map(str::to_owned).collect() })
    }

    fn state(&self) -> &str {
        self.fields.first().map_or("", String::as_str)
    }

    fn number<T: std::str::FromStr>(&self, index: usize) -> Option<T> {
        self.fields.get(index)?.parse().ok()
    }

    /// Whether it has ended and waits to be reaped.
    pub fn is_dead(&self) -> bool {
        matches!(self.state(), "Z" | "X")
    }

    /// Whether a signal has stopped it.
    pub fn is_stopped(&self) -> bool {
        self.state() == "T"
    }

    /// Its parent.
    pub fn parent(&self) -> Option<i32> {
        self.number(1)
    }

    /// Its process group.
    pub fn process_group(&self) -> Option<i32> {
        self.number(2)
    }

    /// When it was started, in ticks since the host's start. With the id it identifies a process, because ids are reused.
    pub fn start_time(&self) -> Option<u64> {
        self.number(19)
    }
}

/// The ids of all processes.
pub fn process_ids() -> io::Result<Vec<i32>> {
    numeric_entries("/proc")
}

/// The ids of the threads of a process.
pub fn thread_ids(pid: i32) -> io::Result<Vec<i32>> {
    numeric_entries(&format!("/proc/{pid}/task"))
}

fn numeric_entries(directory: &str) -> io::Result<Vec<i32>> {
    let Some(entries) = unless_gone(fs::read_dir(directory))? else {
        return Ok(Vec::new());
    };
    let mut numbers = Vec::new();
    for entry in entries {
        if let Some(entry) = unless_gone(entry)? {
            numbers.extend(entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
        }
    }
    Ok(numbers)
}

/// The command line of a process, the program first. `None` if it is gone.
pub fn arguments(pid: i32) -> io::Result<Option<Vec<Vec<u8>>>> {
    let bytes = unless_gone(fs::read(format!("/proc/{pid}/cmdline")))?;
    Ok(bytes.map(|bytes| bytes.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect()))
}

/// One line of `/proc/PID/cgroup`: the control group of a process in one hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMembership {
    /// The controllers of the hierarchy. Version 2 has none.
    controllers: Vec<String>,
    /// The path of the group below the hierarchy's mount point, without its leading slash.
    pub path: PathBuf,
}

impl GroupMembership {
    /// Whether the hierarchy has this controller. The empty name stands for version 2.
    pub fn has_controller(&self, controller: &str) -> bool {
        if controller.is_empty() {
            self.controllers.is_empty()
        } else {
            self.controllers.iter().any(|one| one == controller)
        }
    }
}

/// The control groups of a process. `None` if it is gone.
pub fn group_memberships(pid: i32) -> io::Result<Option<Vec<GroupMembership>>> {
    let text = unless_gone(fs::read_to_string(format!("/proc/{pid}/cgroup")))?;
    Ok(text.map(|text| parse_group_memberships(&text)))
}

pub(crate) fn parse_group_memberships(text: &str) -> Vec<GroupMembership> {
    let membership = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let controllers = controllers.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect();
        Some(GroupMembership { controllers, path: PathBuf::from(path.trim_start_matches('/')) })
    };
    text.lines().filter_map(membership).collect()
}

/// One line of `/proc/mounts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The mount point.
    pub path: PathBuf,
    /// The file system's type, such as `cgroup2`.
    pub kind: String,
    /// The mount options.
    pub options: Vec<String>,
}

/// The mounts of this process.
pub fn mounts() -> io::Result<Vec<Mount>> {
    Ok(parse_mounts(&fs::read_to_string("/proc/mounts")?))
}

/// Parses the text of `/proc/mounts`.
pub fn parse_mounts(text: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let options = options.split(',').map(str::to_owned).collect();
        Some(Mount { path: PathBuf::from(path), kind: kind.to_owned(), options })
    };
    text.lines().filter_map(mount).collect()
}

/// One IPv4 route of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The interface that packets leave by.
    pub interface: String,
    /// The destination network.
    pub destination: Ipv4Addr,
    /// The mask of the destination network. The default route has none.
    pub mask: Ipv4Addr,
}

/// The IPv4 routes of the host.
pub fn routes() -> io::Result<Vec<Route>> {
    Ok(parse_routes(&fs::read_to_string("/proc/net/route")?))
}

/// Parses the text of `/proc/net/route`. Addresses are hexadecimal numbers with their bytes in the host's order.
pub fn parse_routes(text: &str) -> Vec<Route> {
    let address =
        |field: &str| u32::from_str_radix(field, 16).ok().map(|number| Ipv4Addr::from(number.to_ne_bytes()));
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (destination, mask) = (address(fields.get(1)?)?, address(fields.get(7)?)?);
        Some(Route { interface: (*fields.first()?).to_owned(), destination, mask })
    };
    text.lines().skip(1).filter_map(route).collect()
}

/// The memory of the host that processes can still get, in bytes.
pub fn available_memory() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let missing = || io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no MemAvailable");
    parse_available_memory(&text).ok_or_else(missing)
}

fn parse_available_memory(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    value.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The id of this run of the host. Process ids of one run mean nothing in another.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// `None` for a process that is gone. One that ends between `open` and `read` gives `ESRCH`.
fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_program_name_with_brackets_does_not_shift_the_fields_of_stat() {
        let numbers: Vec<String> = (4..30).map(|number| number.to_string()).collect();
        let stat = ProcessStat::parse(&format!("7 (a) Z (b)) T {}", numbers.join(" "))).unwrap();
        assert!(stat.is_stopped() && !stat.is_dead());
        assert_eq!((stat.parent(), stat.process_group(), stat.start_time()), (Some(4), Some(5), Some(22)));
    }

    #[test]
    fn this_process_is_found_and_a_process_that_is_gone_is_none() {
        let own = std::process::id().cast_signed();
        let stat = ProcessStat::read(own).unwrap().unwrap();
        assert_eq!(stat.parent(), Some(std::os::unix::process::parent_id().cast_signed()));
        assert!(process_ids().unwrap().contains(&own) && thread_ids(own).unwrap().contains(&own));
        let program = arguments(own).unwrap().unwrap().remove(0);
        assert_eq!(program, std::env::args().next().unwrap().into_bytes());
        assert!(group_memberships(own).unwrap().is_some());
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        let gone = gone.id().cast_signed();
        assert_eq!(ProcessStat::read(gone).unwrap(), None);
        assert_eq!((arguments(gone).unwrap(), thread_ids(gone).unwrap()), (None, Vec::new()));
    }

    #[test]
    fn both_versions_of_control_groups_are_parsed() {
        let memberships = parse_group_memberships("4:cpu,cpuacct:/docker/a:b\n0::/user.slice\n");
        assert_eq!(memberships[0].path, PathBuf::from("docker/a:b"));
        assert!(memberships[0].has_controller("cpuacct") && !memberships[0].has_controller(""));
        assert!(memberships[1].has_controller("") && !memberships[1].has_controller("cpu"));
    }

    #[test]
    fn mounts_routes_and_memory_of_the_host_are_parsed() {
        let mounts = parse_mounts("cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n");
        assert_eq!((mounts[0].kind.as_str(), mounts[0].options.len()), ("cgroup", 2));
        let text = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
            eth0 0000200A 00000000 0001 0 0 0 00F0FFFF 0 0 0\n";
        let expected = Route {
            interface: "eth0".to_owned(),
            destination: Ipv4Addr::new(10, 32, 0, 0),
            mask: Ipv4Addr::new(255, 255, 240, 0),
        };
        assert_eq!(parse_routes(text), [expected]);
        assert_eq!(parse_available_memory("MemTotal: 4 kB\nMemAvailable:   2 kB\n"), Some(2048));
        assert!(available_memory().unwrap() > 0 && !boot_id().unwrap().is_empty());
    }
}
