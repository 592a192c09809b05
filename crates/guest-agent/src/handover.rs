//! Further channels: `connect` passes its standard input and output to the agent and waits for the end of the channel.
//!
//! So one process serves all channels and knows all running commands, and no second process copies the bytes.
//!
//! The engine runs `connect` as root, whatever user the image names. Any user in the sandbox can send to the agent's socket, so
//! the agent takes channels of root only. The kernel writes the sender's ids into each message. Root in the sandbox can open
//! a channel as well, and gains no rights by that; some places stay free for the server.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, UCred, sockopt,
};

use crate::agent::Agent;
use crate::connection::{self, MAX_CONNECTIONS};
use crate::procfs;

/// An abstract name: no file, gone with the agent, private to the sandbox's network namespace.
const NAME: &[u8] = b"emergent-guest";
/// The channels that may be open when a process of the sandbox itself opens another. The others are for the server.
const MAX_WITH_INSIDE: usize = MAX_CONNECTIONS / 2;

fn address() -> Result<SocketAddr, String> {
    SocketAddr::from_abstract_name(NAME).map_err(|error| error.to_string())
}

/// Opens the socket that `connect` finds. It takes messages, not connections: a sender can't keep the agent waiting.
pub(crate) fn listen() -> Result<UnixDatagram, String> {
    let open = |address| {
        let socket = UnixDatagram::bind_addr(&address)?;
        sockopt::set_socket_passcred(&socket, true)?;
        Ok(socket)
    };
    open(address()?).map_err(|error: std::io::Error| format!("can't listen: {error}"))
}

/// Takes channels, one from each message.
pub(crate) fn accept_channels(agent: &Arc<Agent>, socket: &UnixDatagram) {
    loop {
        match receive(socket) {
            Ok(Some(Channel { input, output, holder, sender })) if sender.uid.is_root() => {
                let pid = sender.pid.as_raw_nonzero().get();
                let is_from_outside = procfs::process(pid).is_some_and(|found| found.is_from_outside());
                let most = if is_from_outside { MAX_CONNECTIONS } else { MAX_WITH_INSIDE };
                connection::serve_in_background(agent, input, output, Some(holder), most);
            }
            // Not logged: a program can send many.
            Ok(_) => {}
            // No memory: wait until others have ended.
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(100)),
        }
    }
}

/// A channel that a process has passed.
struct Channel {
    input: OwnedFd,
    output: OwnedFd,
    /// Closed at the end of the channel.
    holder: OwnedFd,
    /// The process that has passed it. It is in the sandbox, so it has an id here.
    sender: UCred,
}

/// The channel in the next message, if it holds one.
fn receive(socket: &UnixDatagram) -> rustix::io::Result<Option<Channel>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0_u8; 1];
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let (mut descriptors, mut sender) = (Vec::new(), None);
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(rights) => descriptors.extend(rights),
            RecvAncillaryMessage::ScmCredentials(credentials) => sender = Some(credentials),
            _ => {}
        }
    }
    let (Ok([input, output, holder]), Some(sender)) = (<[OwnedFd; 3]>::try_from(descriptors), sender) else {
        return Ok(None);
    };
    Ok(Some(Channel { input, output, holder, sender }))
}

/// Passes standard input and output to the agent and waits until the channel has ended.
pub(crate) fn connect() -> Result<(), String> {
    let failed = |error: std::io::Error| format!("no agent runs here: {error}");
    let socket = UnixDatagram::unbound().map_err(failed)?;
    socket.connect_addr(&address()?).map_err(failed)?;
    let (mut end, holder) = std::io::pipe().map_err(failed)?;
    let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
    let descriptors = [stdin.as_fd(), stdout.as_fd(), holder.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(&socket, &[IoSlice::new(b"c")], &mut control, SendFlags::empty())
        .map_err(|error| format!("can't hand over: {error}"))?;
    drop(holder);
    let _ = end.read(&mut [0]);
    Ok(())
}
