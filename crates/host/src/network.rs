//! The host's network, as sandboxes need to know it.

use std::net::IpAddr;

/// Asked when the host has no name server that a sandbox could reach.
const PUBLIC_NAMESERVERS: [&str; 2] = ["1.1.1.1", "8.8.8.8"];

/// The host's own name servers, without those that only the host can reach.
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

/// The largest packet that leaves this host: larger ones from a sandbox would vanish.
pub fn default_route_mtu() -> u32 {
    let find = || -> Option<u32> {
        let routes = std::fs::read_to_string("/proc/net/route").ok()?;
        let interface = routes.lines().skip(1).find_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let (interface, destination) = (fields.next()?, fields.next()?);
            (destination == "00000000").then(|| interface.to_owned())
        })?;
        std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu")).ok()?.trim().parse().ok()
    };
    find().unwrap_or(1500).clamp(1280, 1500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_of_the_host_that_a_sandbox_can_reach() {
        let text = "# comment\nnameserver 127.0.0.53\nnameserver 10.0.0.2\nsearch x\nnameserver ::1\nnameserver 9.9.9.9\n";
        let servers: Vec<String> = parse_nameservers(text).iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["10.0.0.2", "9.9.9.9"]);
    }
}
