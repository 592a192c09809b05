//! Sets up network interfaces with `ioctl`.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

// The kernel's fields are shorter than its constants.
#[expect(clippy::cast_possible_truncation, reason = "the flag is 1")]
const IFF_UP: libc::c_short = libc::IFF_UP as libc::c_short;
#[expect(clippy::cast_possible_truncation, reason = "the family is 2")]
const AF_INET: libc::sa_family_t = libc::AF_INET as libc::sa_family_t;

const MAC_BYTES: usize = 6;

/// Switches an interface on.
pub(crate) fn bring_up(name: &str) -> io::Result<()> {
    switch(name, true)
}

/// Switches an interface off; its routes are gone.
pub(crate) fn bring_down(name: &str) -> io::Result<()> {
    switch(name, false)
}

fn switch(name: &str, on: bool) -> io::Result<()> {
    let socket = control()?;
    let mut request = Request::of(name)?;
    request.call(&socket, libc::SIOCGIFFLAGS)?;
    // SAFETY: the kernel has filled in the flags.
    let flags = unsafe { request.0.ifr_ifru.ifru_flags };
    request.0.ifr_ifru.ifru_flags = if on { flags | IFF_UP } else { flags & !IFF_UP };
    request.call(&socket, libc::SIOCSIFFLAGS)
}

/// Gives an interface that is switched off a hardware address, such as `06:00:0a:51:00:1e`.
pub(crate) fn set_mac(name: &str, mac: &str) -> io::Result<()> {
    let bytes: Option<Vec<u8>> = mac.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    let bytes = bytes.filter(|bytes| bytes.len() == MAC_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
    let mut request = Request::of(name)?;
    // SAFETY: all fields are plain numbers, for which zero is a value.
    let mut address: libc::sockaddr = unsafe { std::mem::zeroed() };
    address.sa_family = libc::ARPHRD_ETHER;
    for (to, from) in address.sa_data.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    request.0.ifr_ifru.ifru_hwaddr = address;
    request.call(&control()?, libc::SIOCSIFHWADDR)
}

/// Gives an interface its address and switches it on.
pub(crate) fn set_address(name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let socket = control()?;
    let mask = Ipv4Addr::from_bits(u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0));
    for (what, value) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, mask)] {
        let mut request = Request::of(name)?;
        request.0.ifr_ifru.ifru_addr = socket_address(value);
        request.call(&socket, what)?;
    }
    bring_up(name)
}

/// Sets the default route.
pub(crate) fn set_gateway(gateway: Ipv4Addr) -> io::Result<()> {
    let socket = control()?;
    // SAFETY: all fields are plain numbers or a pointer, for which zero is a value.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: the kernel only reads the route, which lives until the call returns.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT, &raw const route) };
    match io::Error::last_os_error() {
        _ if done == 0 => Ok(()),
        error if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        error => Err(error),
    }
}

struct Request(libc::ifreq);

impl Request {
    fn of(name: &str) -> io::Result<Self> {
        // SAFETY: all fields are plain numbers, for which zero is a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.len() >= request.ifr_name.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        Ok(Self(request))
    }

    fn call(&mut self, socket: &OwnedFd, what: libc::c_ulong) -> io::Result<()> {
        // SAFETY: the kernel reads and writes one request, which this is.
        let done = unsafe { libc::ioctl(socket.as_raw_fd(), what as _, &raw mut self.0) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
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
