//! Connects to a port of the sandbox on behalf of the host, through the channel. So the host reaches servers that listen on
//! the loopback address or in a sandbox without a network, and nothing else on the network reaches them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use emergent_guest_protocol::{ConnectCall, Kind};
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::call::{Call, cancelled};
use crate::workers;

/// The interval of attempts while no program listens on the port; nothing signals that one does.
const TRY_EVERY: Duration = Duration::from_millis(50);
/// The time limit of an attempt. A listening program on the loopback address accepts at once.
const CONNECT_TIME: Duration = Duration::from_secs(2);
/// The size of the read buffer.
const READ_BYTES: usize = 16 * 1024;

/// Carries bytes both ways until the program ends its side, or the call is cancelled.
pub(crate) fn run(call: &Arc<Call>, message: &ConnectCall) -> Result<(), ErrorDetail> {
    let socket = Arc::new(connect(call, message)?);
    if message.probe {
        return Ok(());
    }
    let _ = socket.set_nodelay(true);
    call.shut_down_on_cancel(&socket);
    let (fed, sending) = (Arc::clone(call), Arc::clone(&socket));
    if !workers::spawn_thread("tunnel", move || send_input(&fed, &sending)) {
        return Err(ErrorDetail::new(ErrorCode::LimitReached, "the sandbox can't start another thread"));
    }
    let mut buffer = vec![0; READ_BYTES];
    let result = loop {
        match (&*socket).read(&mut buffer) {
            Ok(0) => break Ok(()),
            Ok(length) => {
                if let Err(error) = call.send_data(Kind::Stdout, &buffer[..length]) {
                    break Err(error);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => break Err(ErrorDetail::new(ErrorCode::Unavailable, error.to_string())),
        }
    };
    // Ends the other thread, which waits for input or for the program to read.
    call.cancel();
    result
}

fn connect(call: &Call, message: &ConnectCall) -> Result<TcpStream, ErrorDetail> {
    let deadline = Instant::now() + Duration::from_millis(message.wait_ms);
    let addresses: [SocketAddr; 2] =
        [(Ipv4Addr::LOCALHOST, message.port).into(), (Ipv6Addr::LOCALHOST, message.port).into()];
    loop {
        let connected = addresses.iter().find_map(|to| TcpStream::connect_timeout(to, CONNECT_TIME).ok());
        if let Some(socket) = connected {
            return Ok(socket);
        }
        if call.is_cancelled() {
            return Err(cancelled());
        }
        if Instant::now() >= deadline {
            let message = format!("no program listens on port {} of the sandbox", message.port);
            return Err(ErrorDetail::new(ErrorCode::Unavailable, message));
        }
        std::thread::sleep(TRY_EVERY);
    }
}

/// Passes input to the program. At its end the sending side of the socket is closed; reading continues.
fn send_input(call: &Call, mut socket: &TcpStream) {
    // A cancelled call has shut the socket down.
    while let Ok(input) = call.next_input() {
        let Some(bytes) = input else {
            let _ = socket.shutdown(Shutdown::Write);
            return;
        };
        if socket.write_all(&bytes).is_err() {
            let _ = socket.shutdown(Shutdown::Both);
            return;
        }
    }
}
