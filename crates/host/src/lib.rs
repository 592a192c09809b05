//! Operations on the host that all kinds of sandboxes need: firewall rules, disks and copies of them, control groups,
//! private files, process locks, programs, and the parsers of `/proc`.
//!
//! Every function blocks. Async callers run it on a blocking thread.

pub mod control_group;
pub mod copy;
pub mod cpu_group;
pub mod ext4;
pub mod files;
pub mod firewall;
pub mod loop_device;
pub mod network;
pub mod process_lock;
pub mod procfs;
pub mod program;
pub mod room;
pub mod tree_size;
