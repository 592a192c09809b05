//! Checks whether KVM works on this host, by making a machine and a CPU. Both are removed at once.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::requirements::UnmetRequirement;

/// The first words of the error when KVM does not work.
pub const KVM_MISSING: &str = "KVM not available";

const GET_API_VERSION: libc::c_ulong = 0xae00;
const CREATE_VM: libc::c_ulong = 0xae01;
const CREATE_VCPU: libc::c_ulong = 0xae41;
const API_VERSION: libc::c_int = 12;

/// Makes a machine and a CPU.
pub(crate) fn check(device: &Path) -> Result<String, UnmetRequirement> {
    let shown = device.display();
    let missing = |why: String, fix: &str| {
        Err(UnmetRequirement { problem: format!("{KVM_MISSING}: {why}"), fix: fix.to_owned() })
    };
    let turn_on = "turn virtualization on in the firmware and load kvm_intel or kvm_amd, or, in a virtual machine or \
                   container, let its host pass it on";
    let kvm = match fs::OpenOptions::new().read(true).write(true).open(device) {
        Ok(kvm) => kvm,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return missing(format!("{shown} does not exist"), turn_on);
        }
        Err(error) => {
            return missing(
                format!("{shown}: {error}"),
                "run as root, or as a member of the group that owns it",
            );
        }
    };
    // SAFETY: takes a number, gives a number.
    let version = unsafe { libc::ioctl(kvm.as_raw_fd(), GET_API_VERSION as _, 0) };
    if version != API_VERSION {
        let why =
            format!("{shown} is not KVM, or has version {version} of its interface instead of {API_VERSION}");
        return missing(why, turn_on);
    }
    let made = made(kvm.as_raw_fd(), CREATE_VM)
        .map_err(|error| format!("a machine can't be made: {error}"))
        .and_then(|machine| {
            made(machine.as_raw_fd(), CREATE_VCPU).map_err(|error| format!("a CPU can't be made: {error}"))
        });
    match made {
        Ok(_) => Ok(format!("{shown} works: a machine and a CPU were made")),
        Err(why) => missing(why, turn_on),
    }
}

/// Calls KVM for a new descriptor.
fn made(on: libc::c_int, call: libc::c_ulong) -> std::io::Result<OwnedFd> {
    // SAFETY: both calls take a number and give a descriptor that is ours alone.
    unsafe {
        let descriptor = libc::ioctl(on, call as _, 0);
        if descriptor < 0 {
            Err(std::io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(descriptor))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_missing_device_and_a_device_that_is_not_kvm_are_reported() {
        let missing = check(Path::new("/dev/no-such-kvm")).unwrap_err().to_string();
        assert!(missing.starts_with("KVM not available: /dev/no-such-kvm does not exist"), "{missing}");
        let other = check(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(other.starts_with("KVM not available: /dev/null is not KVM"), "{other}");
    }
}
