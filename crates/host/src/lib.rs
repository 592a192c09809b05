//! Operations on the host that all kinds of sandboxes need: firewall rules, disks and copies of them, control groups,
//! private files, processes and their locks, programs.
//!
//! Every function blocks. Async callers run it on a blocking thread.

pub mod control_group;
pub mod copy;
pub mod cpu_group;
pub mod ext4;
pub mod files;
pub mod firewall;
pub mod loop_device;
pub mod memory;
pub mod network;
pub mod process_lock;
pub mod processes;
pub mod program;
pub mod room;
pub mod tree_size;
