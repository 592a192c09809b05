//! The identity of a virtual machine. The manager sends it after each start, and after each restore from a memory snapshot,
//! which may be the source of several machines.

use std::fs;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use emergent_guest_protocol::MachineCall;
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::time::{ClockId, Timespec};

use super::interface;
use crate::agent::{Agent, write_nameservers};
use crate::log;

/// The one interface besides loopback.
const INTERFACE: &str = "eth0";

/// Applies the identity. Random numbers first, because the other steps may use them.
pub(crate) fn apply(agent: &Arc<Agent>, call: &MachineCall) -> Result<(), ErrorDetail> {
    super::must_be()?;
    let failed =
        |what: &str, error: std::io::Error| ErrorDetail::new(ErrorCode::Internal, format!("{what}: {error}"));
    stir_entropy(&call.entropy).map_err(|error| failed("mixing in random numbers", error))?;
    set_clock(call.unix_time_ms).map_err(|error| failed("setting the clock", error))?;
    set_name(&call.hostname).map_err(|error| failed("setting the host name", error))?;
    let id: String = call.machine_id.chars().filter(char::is_ascii_hexdigit).take(32).collect();
    let written = fs::write("/etc/machine-id", format!("{id}\n"));
    if let Err(error) = written {
        log(&format!("/etc/machine-id can't be written: {error}"));
    }
    if let Some(address) = call.address {
        // This removes the routes of an earlier network.
        interface::bring_down(INTERFACE)
            .and_then(|()| call.mac.as_deref().map_or(Ok(()), |mac| interface::set_mac(INTERFACE, mac)))
            .and_then(|()| interface::set_address(INTERFACE, address, call.prefix))
            .map_err(|error| failed("setting the address", error))?;
    }
    if let Some(gateway) = call.gateway {
        interface::set_gateway(gateway).map_err(|error| failed("setting the gateway", error))?;
    }
    write_nameservers(&call.nameservers);
    agent.reset_for_new_identity(call.environment.clone());
    Ok(())
}

/// Adds bytes to the kernel's random numbers, counted as random, and makes it use them at once.
fn stir_entropy(bytes: &[u8]) -> std::io::Result<()> {
    /// `RNDADDENTROPY`.
    const ADD: libc::c_ulong = 0x4008_5203;
    /// `RNDRESEEDCRNG`.
    const RESEED: libc::c_ulong = 0x5207;
    const MOST: usize = 256;
    #[repr(C)]
    struct Pool {
        bits: libc::c_int,
        bytes: libc::c_int,
        buffer: [u8; MOST],
    }
    let bytes = &bytes[..bytes.len().min(MOST)];
    let count = libc::c_int::try_from(bytes.len()).unwrap_or(0);
    let mut pool = Pool { bits: count * 8, bytes: count, buffer: [0; MOST] };
    pool.buffer[..bytes.len()].copy_from_slice(bytes);
    let random = fs::File::open("/dev/random")?;
    // SAFETY: the kernel reads `bytes` bytes of the buffer, which has as many.
    let added = unsafe { libc::ioctl(random.as_raw_fd(), ADD as _, &raw const pool) };
    if added != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: no memory is passed. Kernels that do not know it reseed by themselves.
    unsafe { libc::ioctl(random.as_raw_fd(), RESEED as _) };
    Ok(())
}

fn set_clock(unix_time_ms: u64) -> std::io::Result<()> {
    let milliseconds = i64::try_from(unix_time_ms).unwrap_or(i64::MAX);
    let time = Timespec { tv_sec: milliseconds / 1000, tv_nsec: milliseconds % 1000 * 1_000_000 };
    Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
}

fn set_name(name: &str) -> std::io::Result<()> {
    rustix::system::sethostname(name.as_bytes())?;
    for (path, text) in [
        ("/etc/hostname", format!("{name}\n")),
        ("/etc/hosts", format!("127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n")),
    ] {
        if let Err(error) = fs::write(path, text) {
            log(&format!("{path} can't be written: {error}"));
        }
    }
    Ok(())
}
