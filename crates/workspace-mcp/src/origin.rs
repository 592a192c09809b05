//! Which pages and which host names may ask.
//!
//! Every request has shown a token before it comes here, which no foreign page has. This is the second line, for a
//! browser that was given one: a request with an `Origin` comes from a page, and is let in only if the page is from
//! the host that the request is for, from this machine, or in the operator's list. Programs send no `Origin`.
//!
//! A page can make its own name point to this server (DNS rebinding) and is then from the host it asks. The list
//! of host names stops that; without one any name is taken, since the operator may have given the server any.

use std::net::IpAddr;
use std::str::FromStr;

use http::uri::Authority;
use http::{HeaderMap, Uri, header};

/// Where a page is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// A page without an origin of its own: a file, a frame in a sandbox.
    Null,
    Page {
        scheme: String,
        host: String,
        port: Option<u16>,
    },
}

/// A text that is no origin.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an origin: write it as https://host or https://host:port")]
pub struct InvalidOrigin(String);

impl FromStr for Origin {
    type Err = InvalidOrigin;

    fn from_str(text: &str) -> Result<Self, InvalidOrigin> {
        if text == "null" {
            return Ok(Self(Kind::Null));
        }
        let refuse = || InvalidOrigin(text.chars().take(256).collect());
        let uri: Uri = text.parse().map_err(|_| refuse())?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(refuse());
        };
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() || authority.as_str().contains('@') {
            return Err(refuse());
        }
        let scheme = scheme.to_ascii_lowercase();
        let port = authority.port_u16().or_else(|| default_port(&scheme));
        Ok(Self(Kind::Page { host: name_of(authority), port, scheme }))
    }
}

/// Who may ask.
#[derive(Clone, Debug, Default)]
pub(crate) struct Doors {
    pub(crate) origins: Vec<Origin>,
    /// Empty: any.
    pub(crate) hosts: Vec<String>,
}

impl Doors {
    /// Says why a request is not let in.
    pub(crate) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), &'static str> {
        let host = host_of(uri, headers).ok_or("the request does not say which host it is for")?;
        let name = name_of(&host);
        let listed = self.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(&name));
        if !(self.hosts.is_empty() || listed || is_loopback(&name)) {
            return Err("this host name is not one of this server's");
        }
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let (Some(origin), more) = (origins.next(), origins.next()) else { return Ok(()) };
        let origin = origin.to_str().ok().filter(|_| more.is_none()).and_then(|text| text.parse().ok());
        let origin: Origin = origin.ok_or("the Origin can't be read")?;
        if self.lets_in(&origin, &name, host.port_u16()) {
            return Ok(());
        }
        Err("pages from this Origin may not ask here")
    }

    fn lets_in(&self, origin: &Origin, name: &str, port: Option<u16>) -> bool {
        if self.origins.contains(origin) {
            return true;
        }
        let Kind::Page { scheme, host, port: of_page } = &origin.0 else { return false };
        // The scheme is not compared: TLS may have ended before the request came here.
        is_loopback(host) || (host == name && *of_page == port.or_else(|| default_port(scheme)))
    }
}

/// HTTP/2 has the host in the address.
fn host_of(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    match headers.get(header::HOST) {
        Some(host) => host.to_str().ok()?.parse().ok(),
        None => uri.authority().cloned(),
    }
}

fn name_of(authority: &Authority) -> String {
    authority.host().trim_matches(['[', ']']).to_ascii_lowercase()
}

fn default_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

fn is_loopback(name: &str) -> bool {
    name == "localhost"
        || name.ends_with(".localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(doors: &Doors, host: &str, origin: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().unwrap());
        }
        doors.check(&Uri::from_static("/mcp"), &headers).is_ok()
    }

    #[test]
    fn pages_of_the_same_host_and_of_this_machine_may_ask() {
        let any = Doors::default();
        for (host, origin) in [
            ("work.example", "https://work.example"),
            ("Work.Example", "https://work.EXAMPLE:443"),
            ("work.example:8080", "http://work.example:8080"),
            ("10.0.0.7:8080", "http://10.0.0.7:8080"),
            ("[2001:db8::1]:8080", "http://[2001:db8::1]:8080"),
            ("work.example", "http://localhost:5173"),
            ("work.example", "http://app.localhost"),
            ("work.example", "http://127.0.0.1:6274"),
            ("work.example", "http://[::1]:6274"),
        ] {
            assert!(asks(&any, host, Some(origin)), "{host} {origin}");
        }
        assert!(asks(&any, "work.example", None));
    }

    #[test]
    fn foreign_pages_may_not() {
        let any = Doors::default();
        for origin in [
            "https://evil.example",
            "https://work.example.evil.example",
            "https://work.example:8443",
            "http://localhost.evil.example",
            "null",
            "",
            "work.example",
            "https://user@work.example",
            "https://work.example/path",
        ] {
            assert!(!asks(&any, "work.example", Some(origin)), "{origin}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, "work.example".parse().unwrap());
        headers.append(header::ORIGIN, "https://work.example".parse().unwrap());
        headers.append(header::ORIGIN, "https://evil.example".parse().unwrap());
        assert!(any.check(&Uri::from_static("/mcp"), &headers).is_err());
    }

    #[test]
    fn the_list_is_exact() {
        let doors = Doors {
            origins: vec!["https://app.example".parse().unwrap(), "null".parse().unwrap()],
            ..Doors::default()
        };
        assert!(asks(&doors, "work.example", Some("https://app.example")));
        assert!(asks(&doors, "work.example", Some("https://app.example:443")));
        assert!(asks(&doors, "work.example", Some("null")));
        assert!(!asks(&doors, "work.example", Some("http://app.example")));
        assert!(!asks(&doors, "work.example", Some("https://app.example:8443")));
        for text in ["app.example", "https://", "https://app.example/x", ""] {
            assert_eq!(text.parse::<Origin>(), Err(InvalidOrigin(text.to_owned())));
        }
    }

    #[test]
    fn a_list_of_hosts_stops_rebinding() {
        let doors = Doors { hosts: vec!["work.example".to_owned()], ..Doors::default() };
        assert!(asks(&doors, "work.example:8080", None));
        assert!(asks(&doors, "localhost:8080", Some("http://localhost:8080")));
        assert!(!asks(&doors, "evil.example", Some("http://evil.example")));
        assert!(!asks(&doors, "evil.example", None));
    }

    #[test]
    fn the_host_of_http_2_is_in_the_address() {
        let doors = Doors::default();
        let uri = Uri::from_static("https://work.example/mcp");
        let mut headers = HeaderMap::new();
        headers.insert(header::ORIGIN, "https://work.example".parse().unwrap());
        assert!(doors.check(&uri, &headers).is_ok());
        assert!(doors.check(&Uri::from_static("/mcp"), &headers).is_err());
    }
}
