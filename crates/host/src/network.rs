//! Facts about the host's network that sandboxes need: name servers and MTU.

use std::net::IpAddr;

/// Used when the host has no name server that a sandbox could reach.
const PUBLIC_NAMESERVERS: [&str; 2] = ["1.1.1.1", "8.8.8.8"];

/// The host's name servers, without those that only the host can reach.
pub fn host_nameservers() -> Vec<IpAddr> {
    for path in ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"] {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let found = parse_nameservers(&text);
        if !found.is_empty() {
            return found;
        }
    }
    PUBLIC_NAMESERVERS.iter().filter_map(|server| server.parse().ok()).collect()
}

fn parse_nameservers(text: &str) -> Vec<IpAddr> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver")?.trim().parse().ok())
        .filter(|server: &IpAddr| !server.is_loopback() && server.is_ipv4())
        .take(3)
        .collect()
}

/// The MTU of the interface of the default route. Larger packets from a sandbox would be dropped without an answer.
pub fn default_route_mtu() -> u32 {
    let find = || -> Option<u32> {
        let routes = procfs::net::route().ok()?;
        let interface = &routes.iter().find(|route| route.destination.is_unspecified())?.iface;
        std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu")).ok()?.trim().parse().ok()
    };
    find().unwrap_or(1500).clamp(1280, 1500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_ipv6_name_servers_are_left_out() {
        let text = "# comment\nnameserver 127.0.0.53\nnameserver 10.0.0.2\nsearch x\nnameserver ::1\nnameserver 9.9.9.9\n";
        let servers: Vec<String> = parse_nameservers(text).iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["10.0.0.2", "9.9.9.9"]);
    }
}
