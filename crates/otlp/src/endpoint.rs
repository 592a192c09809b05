//! The address of a collector.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use url::Url;

/// The path of OTLP for traces, below the address.
const TRACES: [&str; 2] = ["v1", "traces"];

/// The address of a collector, such as `http://127.0.0.1:4318`. It has no credentials, so it can be logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Endpoint(Url);

/// A text that is not the address of a collector. The text is not repeated, because it may have a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the address of a collector is http://host:port or https://host:port, without a user name, password, query and fragment"
)]
pub struct InvalidEndpoint;

impl Endpoint {
    /// The URL that traces are sent to.
    pub(crate) fn traces(&self) -> Url {
        let mut url = self.0.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(TRACES);
        }
        url
    }

    /// Whether the connection uses TLS.
    pub(crate) fn is_https(&self) -> bool {
        self.0.scheme() == "https"
    }
}

impl FromStr for Endpoint {
    type Err = InvalidEndpoint;

    fn from_str(text: &str) -> Result<Self, InvalidEndpoint> {
        let url: Url = text.parse().map_err(|_| InvalidEndpoint)?;
        let has_credentials = !url.username().is_empty() || url.password().is_some();
        let is_valid = matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && !has_credentials
            && url.query().is_none()
            && url.fragment().is_none();
        is_valid.then_some(Self(url)).ok_or(InvalidEndpoint)
    }
}

impl TryFrom<String> for Endpoint {
    type Error = InvalidEndpoint;

    fn try_from(text: String) -> Result<Self, InvalidEndpoint> {
        text.parse()
    }
}

impl From<Endpoint> for String {
    fn from(endpoint: Endpoint) -> Self {
        endpoint.0.into()
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_go_to_their_path_below_the_address() {
        for (address, traces) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("https://collector.example/", "https://collector.example/v1/traces"),
            ("https://collector.example/otlp", "https://collector.example/otlp/v1/traces"),
            ("http://[::1]:4318/otlp/", "http://[::1]:4318/otlp/v1/traces"),
        ] {
            assert_eq!(address.parse::<Endpoint>().unwrap().traces().as_str(), traces);
        }
    }

    #[test]
    fn other_texts_are_refused_without_being_repeated() {
        for text in [
            "",
            "127.0.0.1:4318",
            "collector",
            "grpc://collector:4317",
            "http://",
            "http://user@collector:4318",
            "http://user:a-password@collector:4318",
            "http://collector:4318/?key=a-password",
            "http://collector:4318/#a-password",
        ] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert!(!error.to_string().contains("a-password"), "{text}");
        }
    }
}
