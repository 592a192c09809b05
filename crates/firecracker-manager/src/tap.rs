//! TAP interfaces: the host's end of a microVM's network card.
//!
//! An interface is persistent: it stays after its microVM and is reused by the next one in its slot. It belongs to the slot's
//! user, who can open it without any network privilege.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::slot::{PREFIX, Slot};

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;
const TUNSETOWNER: libc::c_ulong = 0x4004_54cc;
// The kernel's fields have fewer bits than its constants.
#[expect(clippy::cast_possible_truncation, reason = "all flags are below 2^15")]
const TAP_FLAGS: libc::c_short = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
#[expect(clippy::cast_possible_truncation, reason = "all flags are below 2^15")]
const UP_FLAGS: libc::c_short = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
#[expect(clippy::cast_possible_truncation, reason = "the family is 2")]
const AF_INET: libc::sa_family_t = libc::AF_INET as libc::sa_family_t;

/// Makes a slot's interface unless it exists, sets its address and brings it up.
pub(crate) fn ensure(slot: &Slot) -> io::Result<()> {
    if Path::new("/sys/class/net").join(&slot.interface).exists() && !is_tap(&slot.interface) {
        let message =
            format!("{} exists and is not a TAP interface: another program has made it", slot.interface);
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    }
    let device = attach(&slot.interface)?;
    // SAFETY: both take a number.
    unsafe {
        checked(libc::ioctl(device.as_raw_fd(), TUNSETOWNER as _, libc::c_ulong::from(slot.uid)))?;
        checked(libc::ioctl(device.as_raw_fd(), TUNSETPERSIST as _, 1 as libc::c_ulong))?;
    }
    disable_ipv6(&slot.interface);
    let socket = control()?;
    let mask = Ipv4Addr::from_bits(u32::MAX << (32 - u32::from(PREFIX)));
    for (call, value) in [(libc::SIOCSIFADDR, slot.host), (libc::SIOCSIFNETMASK, mask)] {
        let mut request = request_of(&slot.interface)?;
        request.ifr_ifru.ifru_addr = socket_address(value);
        // SAFETY: as above.
        checked(unsafe { libc::ioctl(socket.as_raw_fd(), call as _, &raw mut request) })?;
    }
    let mut request = request_of(&slot.interface)?;
    request.ifr_ifru.ifru_flags = UP_FLAGS;
    // SAFETY: as above.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw mut request) })
}

/// Removes an interface, if it exists.
pub(crate) fn remove(interface: &str) -> io::Result<()> {
    if !is_tap(interface) {
        return Ok(());
    }
    let device = attach(interface)?;
    // SAFETY: takes a number.
    checked(unsafe { libc::ioctl(device.as_raw_fd(), TUNSETPERSIST as _, 0 as libc::c_ulong) })
}

/// Checks that interfaces can be made. The interface of the check is removed.
pub(crate) fn check_making() -> io::Result<()> {
    attach("emergent%d").map(drop)
}

/// Makes an interface unless it exists. One that is not made persistent is removed when the descriptor is closed.
fn attach(interface: &str) -> io::Result<fs::File> {
    const DEVICE: &str = "/dev/net/tun";
    let device = fs::OpenOptions::new().read(true).write(true).open(DEVICE);
    let device =
        device.map_err(|error| io::Error::new(error.kind(), format!("{DEVICE} can't be opened: {error}")))?;
    let mut request = request_of(interface)?;
    request.ifr_ifru.ifru_flags = TAP_FLAGS;
    // SAFETY: the kernel reads and writes one request, which this is.
    checked(unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF as _, &raw mut request) }).map_err(
        |error| {
            // Another process has attached it.
            let busy = error.raw_os_error() == Some(libc::EBUSY);
            if busy { io::Error::other(format!("{interface} is in use")) } else { error }
        },
    )?;
    Ok(device)
}

/// All TAP interfaces whose names have this prefix.
pub(crate) fn list(prefix: &str) -> io::Result<Vec<String>> {
    let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let names = fs::read_dir("/sys/class/net")?.filter_map(name);
    Ok(names.filter(|name| name.starts_with(prefix) && is_tap(name)).collect())
}

fn is_tap(interface: &str) -> bool {
    Path::new("/sys/class/net").join(interface).join("tun_flags").exists()
}

/// Disables IPv6. The interface must not be up yet.
fn disable_ipv6(interface: &str) {
    let path = format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6");
    if let Err(error) = fs::write(&path, "1")
        && Path::new(&path).exists()
    {
        tracing::warn!(interface, %error, "IPv6 can't be disabled on an interface; the firewall blocks it");
    }
}

fn request_of(interface: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all fields are plain numbers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    Ok(request)
}

fn control() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: both are plain numbers of the same size; the kernel reads the one as the other.
    unsafe {
        let mut inet: libc::sockaddr_in = std::mem::zeroed();
        inet.sin_family = AF_INET;
        inet.sin_addr.s_addr = u32::from_ne_bytes(address.octets());
        std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(inet)
    }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
