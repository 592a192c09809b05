//! URLs of git repositories: the one parser, and the removal of credentials.
//!
//! | form                         | user name                   | password |
//! |------------------------------|-----------------------------|----------|
//! | `https://host/path`, `http:` | refused                     | refused  |
//! | `ssh://[user@]host/path`     | letters, digits and `._+~-` | refused  |
//! | `user@host:path`             | the same, required          | refused  |
//! | `git://host/path`            | refused                     | refused  |
//!
//! Invariant: a [`GitUrl`] carries no credential, so it can be stored, logged and shown. With http(s) the user name
//! is often the token itself, so no user name is accepted there. A query or fragment is refused because git hosts
//! take tokens in them and git has no other use for them.
//!
//! git and curl read malformed URLs in other ways than a standard parser. Text on which they could disagree
//! (backslash, encoded line break, encoded user name) is refused.

mod redact;

use std::borrow::Cow;
use std::fmt;

use url::Url;

pub use redact::redact_urls;

use crate::error::{ErrorCode, ErrorDetail};
use crate::names::names;

/// The longest git URL in bytes.
pub const MAX_GIT_URL_BYTES: usize = 2048;

const FORMS: &str = "must begin with https://, http://, ssh:// or git://, or have the form user@host:path";

names!(
    /// The transport of a repository URL.
    GitTransport {
        /// HTTP with TLS.
        Https = "https",
        /// HTTP without TLS.
        Http = "http",
        /// SSH, also in the form `user@host:path`.
        Ssh = "ssh",
        /// git's own protocol, which has no authentication.
        Git = "git",
    }
);

/// The URL of a git repository on another host, without credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GitUrl {
    text: String,
    transport: GitTransport,
    host: String,
}

impl GitUrl {
    /// Parses a URL or the form `user@host:path`. Malformed text and other schemes are `bad_request`; text that
    /// carries a credential is `unacceptable`. No message repeats any part of the text.
    pub fn parse(text: &str) -> Result<Self, ErrorDetail> {
        Self::parse_field("repository_url", text)
    }

    fn parse_field(field: &str, text: &str) -> Result<Self, ErrorDetail> {
        let refused = Refusal { field };
        refused.check_characters(text)?;
        let (transport, host) = match text.split_once("://") {
            Some((scheme, rest)) => {
                let transport = transport_of(scheme).ok_or_else(|| refused.form())?;
                (transport, parse_url(&refused, text, transport, rest)?)
            }
            None => (GitTransport::Ssh, parse_scp(&refused, text)?),
        };
        // The function that removes credentials is stricter than a standard parser, and also looks into paths.
        if redact::has_credentials(text) {
            return Err(refused.credentials());
        }
        Ok(Self { text: text.to_owned(), transport, host })
    }

    /// The URL as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The transport of this URL.
    pub fn transport(&self) -> GitTransport {
        self.transport
    }

    /// The host, without a port.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The text without user name, password, query and fragment. Takes any text, also malformed: what could be a
    /// part of a credential is removed, even if the result is no longer a usable URL. Text that [`GitUrl::parse`]
    /// accepts comes back unchanged.
    pub fn without_credentials(text: &str) -> Cow<'_, str> {
        redact::without_credentials(text)
    }
}

impl fmt::Display for GitUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

/// Checks where a repository is: a [`GitUrl`], or an absolute path inside the sandbox.
pub(crate) fn check_repository(field: &str, text: &str) -> Result<(), ErrorDetail> {
    if text.starts_with('/') {
        let refused = Refusal { field };
        if text.len() > MAX_GIT_URL_BYTES || text.chars().any(char::is_control) {
            return Err(refused.characters());
        }
        return Ok(());
    }
    GitUrl::parse_field(field, text).map(drop)
}

/// The errors, with the name of the field they are about.
struct Refusal<'a> {
    field: &'a str,
}

impl Refusal<'_> {
    fn check_characters(&self, text: &str) -> Result<(), ErrorDetail> {
        let odd = |c: char| c.is_control() || c.is_whitespace() || c == '\\';
        if text.is_empty() || text.len() > MAX_GIT_URL_BYTES || text.starts_with('-') || text.contains(odd) {
            return Err(self.characters());
        }
        Ok(())
    }

    fn bad(&self, what: &str) -> ErrorDetail {
        ErrorDetail::new(ErrorCode::BadRequest, format!("{} {what}", self.field))
    }

    fn characters(&self) -> ErrorDetail {
        self.bad(&format!(
            "is empty, over {MAX_GIT_URL_BYTES} bytes, starts with '-' or has a space, backslash or control \
             character in it"
        ))
    }

    fn form(&self) -> ErrorDetail {
        self.bad(&format!("{FORMS}; a repository inside the sandbox is named by its absolute path"))
    }

    fn host(&self) -> ErrorDetail {
        self.bad("has no valid host")
    }

    fn user(&self) -> ErrorDetail {
        self.bad("has a user name with characters other than letters, digits and ._+~-")
    }

    fn credentials(&self) -> ErrorDetail {
        let message = format!(
            "{} carries a user name, password or token: give the URL without it, and connect the git host in \
             Settings > Integrations; a credential that was sent here should be replaced",
            self.field
        );
        ErrorDetail::new(ErrorCode::Unacceptable, message)
    }

    fn query(&self) -> ErrorDetail {
        let message = format!(
            "{} has a query or fragment, which can carry a token: give the URL without everything from '?' or \
             '#' on, and connect the git host in Settings > Integrations",
            self.field
        );
        ErrorDetail::new(ErrorCode::Unacceptable, message)
    }
}

fn transport_of(scheme: &str) -> Option<GitTransport> {
    GitTransport::ALL.iter().copied().find(|transport| scheme.eq_ignore_ascii_case(transport.as_str()))
}

/// Checks what follows `scheme://` and gives the host.
fn parse_url(
    refused: &Refusal<'_>,
    text: &str,
    transport: GitTransport,
    rest: &str,
) -> Result<String, ErrorDetail> {
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    if let Some((user, _)) = authority.rsplit_once('@') {
        if transport != GitTransport::Ssh || user.contains(':') || user.to_ascii_lowercase().contains("%3a") {
            return Err(refused.credentials());
        }
        if !is_user_name(user) {
            return Err(refused.user());
        }
    }
    if text.contains(['?', '#']) {
        return Err(refused.query());
    }
    // git decodes these, and has taken a decoded line break for the end of a value before.
    let lower = text.to_ascii_lowercase();
    if ["%00", "%0a", "%0d"].iter().any(|code| lower.contains(code)) {
        return Err(refused.characters());
    }
    if authority.is_empty() {
        return Err(refused.host());
    }
    let url = Url::parse(text).map_err(|_| refused.host())?;
    if url.password().is_some() || (transport != GitTransport::Ssh && !url.username().is_empty()) {
        return Err(refused.credentials());
    }
    match url.host_str() {
        Some(host) if !host.is_empty() && !host.starts_with('-') => Ok(host.to_owned()),
        _ => Err(refused.host()),
    }
}

/// Checks `user@host:path` and gives the host.
fn parse_scp(refused: &Refusal<'_>, text: &str) -> Result<String, ErrorDetail> {
    let (user, rest) = text.split_once('@').ok_or_else(|| refused.form())?;
    if user.contains(':') {
        return Err(refused.credentials());
    }
    if !is_user_name(user) {
        return Err(refused.user());
    }
    let (host, path) = match rest.strip_prefix('[') {
        Some(bracketed) => {
            let (address, path) = bracketed.split_once("]:").ok_or_else(|| refused.form())?;
            (url::Host::parse(&format!("[{address}]")), path)
        }
        None => {
            let (host, path) = rest.split_once(':').ok_or_else(|| refused.form())?;
            (url::Host::parse(host), path)
        }
    };
    if text.contains(['?', '#']) {
        return Err(refused.query());
    }
    // `name::address` names a remote helper, which is a program.
    if path.is_empty() || path.starts_with([':', '-']) {
        return Err(refused.form());
    }
    let host = host.map_err(|_| refused.host())?.to_string();
    if host.starts_with('-') { Err(refused.host()) } else { Ok(host) }
}

/// Whether the text is a user name that git and ssh take as it is.
fn is_user_name(text: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "._+~-".contains(c);
    !text.is_empty() && !text.starts_with('-') && text.chars().all(known)
}

#[cfg(test)]
mod tests;
