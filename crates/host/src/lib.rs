//! What those who make sandboxes do to the host: firewall rules, copies of disks, its programs, its network, locks.
//!
//! Everything here blocks; callers who may not block run it elsewhere.

pub mod control_group;
pub mod copy;
pub mod cpu_group;
pub mod ext4;
pub mod files;
pub mod firewall;
pub mod loop_device;
pub mod network;
pub mod process_lock;
pub mod program;
pub mod room;
pub mod tree_size;
