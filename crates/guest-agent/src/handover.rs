//! Further channels: `connect` passes its standard input and output to the agent and waits for the end of the channel.
//!
//! So one process serves all channels and knows all running commands, and no second process copies the bytes.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::agent::Agent;
use crate::{connection, log};

/// An abstract name: no file, gone with the agent, private to the sandbox's network namespace.
const NAME: &[u8] = b"emergent-guest";

fn address() -> Result<SocketAddr, String> {
    SocketAddr::from_abstract_name(NAME).map_err(|error| error.to_string())
}

/// Opens the socket that `connect` finds.
pub(crate) fn listen() -> Result<UnixListener, String> {
    UnixListener::bind_addr(&address()?).map_err(|error| format!("can't listen: {error}"))
}

/// Takes channels: each connection passes two descriptors.
pub(crate) fn accept_channels(agent: &Arc<Agent>, listener: &UnixListener) {
    loop {
        let Ok((socket, _)) = listener.accept() else {
            // No descriptors or memory: wait until others have ended.
            std::thread::sleep(std::time::Duration::from_millis(100));
            continue;
        };
        match receive(&socket) {
            Some((input, output)) => {
                connection::serve_in_background(agent, input, output, Some(socket.into()));
            }
            None => log("a channel was refused: its process passed no descriptors"),
        }
    }
}

fn receive(socket: &UnixStream) -> Option<(OwnedFd, OwnedFd)> {
    socket.set_read_timeout(Some(std::time::Duration::from_secs(5))).ok()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0_u8; 1];
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .ok()?;
    let mut descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => rights.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    Some((descriptors.next()?, descriptors.next()?))
}

/// Passes standard input and output to the agent and waits until the channel has ended.
pub(crate) fn connect() -> Result<(), String> {
    let mut socket =
        UnixStream::connect_addr(&address()?).map_err(|error| format!("no agent runs here: {error}"))?;
    let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
    let descriptors = [stdin.as_fd(), stdout.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(&socket, &[IoSlice::new(b"c")], &mut control, SendFlags::empty())
        .map_err(|error| format!("can't hand over: {error}"))?;
    let _ = socket.read(&mut [0]);
    Ok(())
}
