//! A piece of internet: an address that is neither private nor the host's, in a network namespace of its own.
//!
//! Workspaces reach it as they reach any server outside. The namespace belongs to a process that ends when its
//! standard input does, which is when the test is over or dead; the link to it goes with it.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};

use crate::server::run;

/// Reserved for documentation (RFC 5737), so that it is nobody's.
const PUBLIC: [u8; 3] = [203, 0, 113];
/// An address that workspaces must not reach.
const PRIVATE: [u8; 3] = [10, 203, 113];

/// An address outside.
pub struct Internet {
    keeper: Child,
    /// The address that servers can listen on.
    pub address: Ipv4Addr,
}

impl Internet {
    /// Makes the namespace and a route to it.
    pub fn start() -> Self {
        Self::start_in(PUBLIC)
    }

    /// The same with a private address: a machine beside the host.
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
        let output = keeper.stdout.as_mut().expect("a pipe");
        std::io::Read::read_exact(output, &mut ready).expect("the namespace is made");
        let pid = keeper.id();
        // Two addresses for each test that runs; processes that run at once have different ids.
        let pair = u8::try_from(std::process::id() % 120).expect("a small number") * 2;
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

    /// A listener on the address.
    pub fn listen(&self) -> TcpListener {
        let namespace =
            std::fs::File::open(format!("/proc/{}/ns/net", self.keeper.id())).expect("a namespace");
        let address = self.address;
        // A thread of its own goes there; the socket stays there.
        let listening = std::thread::spawn(move || {
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&namespace),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .expect("the namespace can be entered");
            TcpListener::bind((address, 0)).expect("the address can be listened on")
        });
        listening.join().expect("a listener")
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}
