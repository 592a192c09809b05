//! Finds out whether a remote can be reached: its name resolves, and its port accepts a TCP connection.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use url::Url;

use crate::git::run::Git;

/// The time for one connection.
const CONNECT_TIME: Duration = Duration::from_secs(3);
/// The addresses of a name that are tried.
const MAX_ADDRESSES: usize = 4;
/// The variables that name a proxy for HTTP and HTTPS.
const PROXY_VARIABLES: [&str; 6] =
    ["https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"];

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    host: String,
    port: u16,
}

impl Endpoint {
    /// The endpoint that git connects to for this URL; none for a path or an unknown scheme.
    fn of_url(url: &str) -> Option<Self> {
        if !url.contains("://") {
            // `user@host:path`; a path with a colon after a slash is a file.
            let (before, _) = url.split_once(':')?;
            let host = before.rsplit('@').next().filter(|host| !host.is_empty() && !before.contains('/'))?;
            return Some(Self { host: host.trim_matches(['[', ']']).to_owned(), port: 22 });
        }
        let url = Url::parse(url).ok()?;
        let usual = match url.scheme() {
            "https" => 443,
            "http" => 80,
            "ssh" | "git+ssh" | "ssh+git" => 22,
            "git" => 9418,
            _ => return None,
        };
        let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
        Some(Self { host, port: url.port().unwrap_or(usual) })
    }

    /// The endpoint for this URL, or the proxy in front of it.
    pub(super) fn of(url: &str, proxy: Option<&str>, environment: &BTreeMap<String, String>) -> Option<Self> {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Self::of_url(url);
        }
        let variable = || PROXY_VARIABLES.iter().find_map(|name| environment.get(*name).map(String::as_str));
        match proxy.or_else(variable).filter(|proxy| !proxy.is_empty()) {
            Some(proxy) if proxy.contains("://") => Self::of_url(proxy),
            Some(proxy) => Self::of_url(&format!("http://{proxy}")),
            None => Self::of_url(url),
        }
    }

    /// Whether the endpoint accepts a connection; none when that can't be found out.
    pub(super) fn is_reachable(&self, git: &Git) -> Option<bool> {
        let addresses = match self.host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => resolve(git, &self.host)?,
        };
        let mut tried = addresses.iter().take(MAX_ADDRESSES);
        Some(
            tried
                .any(|ip| TcpStream::connect_timeout(&SocketAddr::new(*ip, self.port), CONNECT_TIME).is_ok()),
        )
    }
}

/// The addresses of a name, as the image's `getent` finds them: the agent is static and has no name service of its own. None
/// where the image has no `getent`.
fn resolve(git: &Git, name: &str) -> Option<Vec<IpAddr>> {
    let output = git.run_program("getent", &["ahosts", name])?;
    let mut addresses: Vec<IpAddr> = String::from_utf8_lossy(&output)
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().next()?.parse().ok())
        .collect();
    addresses.dedup();
    Some(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_that_of_the_url_or_of_the_proxy() {
        let of = |url| Endpoint::of_url(url).map(|found| format!("{} {}", found.host, found.port));
        for (url, endpoint) in [
            ("https://host.example/a/b", "host.example 443"),
            ("http://user:secret@host.example:8080/a", "host.example 8080"),
            ("https://[2001:db8::1]:444/a", "2001:db8::1 444"),
            ("https://[2001:db8::1]/a", "2001:db8::1 443"),
            ("ssh://git@host.example/a", "host.example 22"),
            ("git@host.example:a/b.git", "host.example 22"),
            ("git://host.example/a", "host.example 9418"),
        ] {
            assert_eq!(of(url).as_deref(), Some(endpoint), "{url}");
        }
        for url in ["/srv/a.git", "./a:b", "a", "file:///srv/a", "ext::sh", "https://", "http://host:port/"] {
            assert!(of(url).is_none() || url == "ext::sh", "{url}");
        }
        let none = BTreeMap::new();
        let proxy = BTreeMap::from([("https_proxy".to_owned(), "http://proxy.example:3128".to_owned())]);
        let host =
            |url, setting, environment| Endpoint::of(url, setting, environment).map(|found| found.host);
        assert_eq!(host("https://host.example/a", None, &none).as_deref(), Some("host.example"));
        assert_eq!(host("https://host.example/a", None, &proxy).as_deref(), Some("proxy.example"));
        assert_eq!(host("https://host.example/a", Some("other:1"), &proxy).as_deref(), Some("other"));
        assert_eq!(host("git@host.example:a", None, &proxy).as_deref(), Some("host.example"));
    }
}
