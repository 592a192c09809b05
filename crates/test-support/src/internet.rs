//! A simulated internet host: an address in a network namespace of its own, which is neither private nor an address of the host.
//!
//! Workspaces reach it by the routes and rules of any external server. A process holds the namespace until its standard input
//! ends. That is a pipe of the test process, so the namespace and its link are removed also when the test is killed.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};

use crate::command::run;

/// A network that is reserved for documentation (RFC 5737), so that no real host has an address in it.
const PUBLIC: [u8; 3] = [203, 0, 113];
/// A private network, which egress rules block.
const PRIVATE: [u8; 3] = [10, 203, 113];

/// A simulated external host.
pub struct Internet {
    keeper: Child,
    /// The host's address, for listeners.
    pub address: Ipv4Addr,
}

impl Internet {
    /// Makes a namespace with a public address, and a route to it.
    pub fn start() -> Self {
        Self::start_in(PUBLIC)
    }

    /// Makes a namespace with a private address, like a machine in the host's network.
    pub fn start_private() -> Self {
        Self::start_in(PRIVATE)
    }

    fn start_in([a, b, c]: [u8; 3]) -> Self {
        let mut keeper = Command::new("unshare")
            .args(["--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        let mut ready = [0; 6];
        let output = keeper.stdout.as_mut().expect("stdout is piped");
        std::io::Read::read_exact(output, &mut ready).expect("the namespace is made");
        let pid = keeper.id();
        // Each test process takes two addresses by its id, because tests run at the same time.
        let pair = u8::try_from(std::process::id() % 120).expect("it is below 120") * 2;
        let (near, far) = (Ipv4Addr::new(a, b, c, pair), Ipv4Addr::new(a, b, c, pair + 1));
        let link = format!("emt{pid}");
        let ip = |arguments: &str| run("ip", &arguments.split(' ').collect::<Vec<_>>());
        let inside = |arguments: &str| {
            let pid = pid.to_string();
            let command: Vec<&str> =
                ["--target", &pid, "--net", "ip"].into_iter().chain(arguments.split(' ')).collect();
            run("nsenter", &command)
        };
        ip(&format!("link add {link} type veth peer name outside netns {pid}"));
        ip(&format!("addr add {near}/31 dev {link}"));
        ip(&format!("link set {link} up"));
        inside(&format!("addr add {far}/31 dev outside"));
        inside("link set outside up");
        inside(&format!("route add default via {near}"));
        Self { keeper, address: far }
    }

    /// Listens on the address.
    pub fn listen(&self) -> TcpListener {
        let namespace = std::fs::File::open(format!("/proc/{}/ns/net", self.keeper.id()));
        let namespace = namespace.expect("the namespace exists");
        let address = self.address;
        // A thread enters the namespace and makes the socket, which stays in it.
        let listening = std::thread::spawn(move || {
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&namespace),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .expect("the namespace can be entered");
            TcpListener::bind((address, 0)).expect("the address can be listened on")
        });
        listening.join().expect("the thread returns the listener")
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}
