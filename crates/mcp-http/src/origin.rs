//! The pages that may use MCP endpoints: one policy for hosted servers and for workspaces.
//!
//! A browser sends `Origin` with the requests of pages. A program sends none. The policy allows:
//!
//! | `Origin` | |
//! |---|---|
//! | none | allowed |
//! | `http` or `https` at `localhost`, 127.0.0.0/8 or `[::1]`, any port | allowed |
//! | in `mcp.allowed_origins`: scheme, host and port are equal (case and default ports do not matter) | allowed |
//! | everything else: `null`, other hosts, a trailing dot, a path, a user name, several values, no valid origin | refused |
//!
//! Names below `.localhost` are refused like all others, because pages of guests have such names: the addresses of sandboxes' ports.
//!
//! The host that a request is for (`Host`, `:authority`) is not compared with anything, because an operator may give the server any
//! name. So a page can reach the server under a name of its own (DNS rebinding). Two things stop it: its `POST` and
//! `DELETE` requests carry the origin of the page, which is refused here, and each request needs a token, which a browser
//! never adds by itself.

use std::net::IpAddr;
use std::str::FromStr;

use http::{HeaderMap, Uri, header};
use serde::{Deserialize, Serialize};

/// The text that allows every origin.
const ANY: &str = "*";
/// The origin of pages without one: files, frames in a sandbox.
const NULL: &str = "null";

/// An origin in the list of allowed ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Origin {
    text: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Every origin (only in the list).
    Any,
    Null,
    Page {
        scheme: String,
        host: String,
        port: Option<u16>,
    },
}

/// A text that is not an origin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an origin: write it as https://host or https://host:port")]
pub struct InvalidOrigin(String);

impl FromStr for Origin {
    type Err = InvalidOrigin;

    fn from_str(text: &str) -> Result<Self, InvalidOrigin> {
        let invalid = || InvalidOrigin(text.chars().take(256).collect());
        let kind = match text {
            ANY => Some(Kind::Any),
            // An operator may write the slash of an address.
            text => parse(text.strip_suffix('/').unwrap_or(text)),
        };
        Ok(Self { text: text.to_owned(), kind: kind.ok_or_else(invalid)? })
    }
}

impl TryFrom<String> for Origin {
    type Error = InvalidOrigin;

    fn try_from(text: String) -> Result<Self, InvalidOrigin> {
        text.parse()
    }
}

impl From<Origin> for String {
    fn from(origin: Origin) -> Self {
        origin.text
    }
}

fn parse(text: &str) -> Option<Kind> {
    if text == NULL {
        return Some(Kind::Null);
    }
    let uri: Uri = text.parse().ok()?;
    let (scheme, host) = (uri.scheme_str()?, uri.host()?);
    // Scheme, host and port are all that an origin has.
    let whole = match uri.port() {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None => format!("{scheme}://{host}"),
    };
    if !text.eq_ignore_ascii_case(&whole) || host.is_empty() {
        return None;
    }
    let (scheme, host) = (scheme.to_ascii_lowercase(), host.to_ascii_lowercase());
    let port = uri.port_u16().or_else(|| default_port(&scheme));
    Some(Kind::Page { scheme, host, port })
}

fn default_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

/// The pages that may use MCP endpoints.
#[derive(Clone, Debug, Default)]
pub struct OriginPolicy {
    allowed: Vec<Origin>,
}

/// A request of a page that is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pages of this origin may not use MCP servers: add it to mcp.allowed_origins in the settings")]
pub struct OriginRefusal;

impl OriginPolicy {
    /// Allows pages of this machine and of these origins.
    pub fn new(allowed: Vec<Origin>) -> Self {
        Self { allowed }
    }

    /// Checks the `Origin` of a request.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), OriginRefusal> {
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let Some(origin) = origins.next() else { return Ok(()) };
        if origins.next().is_some() {
            return Err(OriginRefusal);
        }
        let origin = origin.to_str().ok().and_then(parse).ok_or(OriginRefusal)?;
        let is_listed =
            self.allowed.iter().any(|allowed| allowed.kind == Kind::Any || allowed.kind == origin);
        if is_listed || is_loopback(&origin) { Ok(()) } else { Err(OriginRefusal) }
    }
}

fn is_loopback(origin: &Kind) -> bool {
    let Kind::Page { scheme, host, .. } = origin else { return false };
    let address = host.trim_start_matches('[').trim_end_matches(']');
    matches!(scheme.as_str(), "http" | "https")
        && (host == "localhost" || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allowed: &[&str]) -> OriginPolicy {
        OriginPolicy::new(allowed.iter().map(|origin| origin.parse().unwrap()).collect())
    }

    fn allows(policy: &OriginPolicy, origin: &str) -> bool {
        let headers = HeaderMap::from_iter([(header::ORIGIN, origin.parse().unwrap())]);
        policy.check(&headers).is_ok()
    }

    #[test]
    fn programs_and_pages_of_this_machine_are_allowed() {
        let policy = policy(&[]);
        assert!(policy.check(&HeaderMap::new()).is_ok());
        for origin in [
            "http://localhost",
            "http://localhost:5173",
            "https://LocalHost:8443",
            "http://127.0.0.1:6274",
            "http://127.8.9.10",
            "https://[::1]:8080",
        ] {
            assert!(allows(&policy, origin), "{origin}");
        }
    }

    #[test]
    fn other_pages_are_refused() {
        let policy = policy(&[]);
        for origin in [
            "http://evil.example",
            "http://localhost.evil.example",
            "http://127.0.0.1.evil.example",
            "http://localhost.",
            "http://127.0.0.1.",
            "http://notlocalhost",
            "http://app.localhost",
            "http://8000-0190c5f6.localhost:7171",
            "http://0.0.0.0",
            "http://[::]",
            "http://[::ffff:127.0.0.1]",
            "http://[2001:db8::1]",
            "http://10.0.0.7",
            "null",
            "NULL",
            "",
            "*",
            "localhost",
            "//localhost",
            "file://",
            "file://localhost",
            "chrome-extension://localhost",
            "http://user@localhost",
            "http://evil@localhost:80",
            "http://evil:secret@localhost:80",
            "http://@localhost:80",
            "http://localhost@evil.example",
            "http://localhost:1@evil.example",
            "http://localhost:port",
            "http://localhost:99999",
            "http://localhost:",
            "http://localhost/",
            "http://localhost/path",
            "http://localhost?query",
            "http://localhost http://evil.example",
            "http://localhost, http://evil.example",
        ] {
            assert!(!allows(&policy, origin), "{origin}");
        }
        let several = ["http://localhost", "http://evil.example"];
        let several = several.map(|origin| (header::ORIGIN, origin.parse().unwrap()));
        let mut headers = HeaderMap::new();
        several.into_iter().for_each(|(name, value)| {
            headers.append(name, value);
        });
        assert!(policy.check(&headers).is_err());
        let bytes = http::HeaderValue::from_bytes(b"http://localhost\xff").unwrap();
        assert!(policy.check(&HeaderMap::from_iter([(header::ORIGIN, bytes)])).is_err());
    }

    #[test]
    fn a_listed_origin_is_compared_by_scheme_host_and_port() {
        let policy = policy(&["https://app.example", "http://[2001:db8::1]:8080/", "null"]);
        for origin in [
            "https://app.example",
            "https://app.example:443",
            "HTTPS://App.Example",
            "http://[2001:db8::1]:8080",
            "null",
        ] {
            assert!(allows(&policy, origin), "{origin}");
        }
        for origin in [
            "http://app.example",
            "https://app.example:8443",
            "https://app.example.",
            "https://app.example/",
            "https://www.app.example",
            "https://app.example.evil.example",
            "http://[2001:db8::1]",
            "http://[2001:db8::2]:8080",
        ] {
            assert!(!allows(&policy, origin), "{origin}");
        }
    }

    #[test]
    fn a_star_allows_every_valid_origin() {
        let policy = policy(&["*"]);
        assert!(allows(&policy, "http://evil.example") && allows(&policy, "null"));
        assert!(!allows(&policy, "http://localhost:port"));
    }

    #[test]
    fn a_list_with_an_invalid_origin_is_refused_and_names_it() {
        for text in ["app.example", "https://", "https://app.example/x", "https://a b", ""] {
            let error = serde_json::from_value::<Vec<Origin>>(serde_json::json!([text])).unwrap_err();
            assert!(error.to_string().contains(&format!("'{text}' is not an origin")), "{error}");
        }
        let list = serde_json::json!(["https://app.example", "*"]);
        let origins: Vec<Origin> = serde_json::from_value(list.clone()).unwrap();
        assert_eq!(serde_json::to_value(origins).unwrap(), list);
    }
}
