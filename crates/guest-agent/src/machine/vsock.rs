//! Sockets between a machine and its host.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

#[expect(clippy::cast_possible_truncation, reason = "the family is 40")]
const AF_VSOCK: libc::sa_family_t = libc::AF_VSOCK as libc::sa_family_t;
#[expect(clippy::cast_possible_truncation, reason = "an address has 16 bytes")]
const ADDRESS_BYTES: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

/// Takes channels.
pub(crate) struct Listener {
    socket: OwnedFd,
}

impl Listener {
    pub(crate) fn open(port: u32) -> Result<Self, String> {
        const WAITING: libc::c_int = 16;
        let open = || -> Result<Self, Errno> {
            let socket = new_socket()?;
            let address = address(libc::VMADDR_CID_ANY, port);
            // SAFETY: the address lives until the call returns, and its length is its own.
            check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), ADDRESS_BYTES) })?;
            // SAFETY: no memory is passed.
            check(unsafe { libc::listen(socket.as_raw_fd(), WAITING) })?;
            Ok(Self { socket })
        };
        open().map_err(|error| format!("listening on vsock port {port}: {error}"))
    }

    /// The next channel: its reading and its writing end.
    pub(crate) fn accept(&self) -> Result<(OwnedFd, OwnedFd), Errno> {
        // SAFETY: no address is asked for; a descriptor that is returned is ours alone.
        let socket = unsafe {
            let taken = libc::accept4(
                self.socket.as_raw_fd(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                libc::SOCK_CLOEXEC,
            );
            OwnedFd::from_raw_fd(check(taken)?)
        };
        let other = rustix::io::fcntl_dupfd_cloexec(&socket, 3)?;
        Ok((socket, other))
    }
}

/// Connects to a port of the host and disconnects: the manager waits for the connection only.
pub(crate) fn connect_to_host(port: u32) -> Result<(), Errno> {
    let socket = new_socket()?;
    let address = address(libc::VMADDR_CID_HOST, port);
    // SAFETY: the address lives until the call returns, and its length is its own.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), ADDRESS_BYTES) })?;
    Ok(())
}

fn new_socket() -> Result<OwnedFd, Errno> {
    // SAFETY: a descriptor that is returned is ours alone.
    unsafe {
        let socket = libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        Ok(OwnedFd::from_raw_fd(check(socket)?))
    }
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: all fields are plain numbers, for which zero is a value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = AF_VSOCK;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

fn check(result: libc::c_int) -> Result<libc::c_int, Errno> {
    if result >= 0 {
        Ok(result)
    } else {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}
