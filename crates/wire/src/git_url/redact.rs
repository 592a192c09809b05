//! Removes credentials from URLs: from one URL, or from every URL in a text.
//!
//! Both functions take any text and prefer to lose a host name over leaking a part of a password. A password can
//! hold characters that end it for a standard parser (`/`, `?`, `#`, `@`), so when the authority of a URL is
//! not plainly a host, everything up to the last `@` is removed.
//!
//! Invariant: removing credentials a second time changes nothing.

use std::borrow::Cow;

use super::is_user_name;

/// URLs inside of a URL's path that are followed; what comes after is dropped.
const MAX_NESTED: usize = 4;
/// Passes over one URL; text that needs more is dropped.
const MAX_PASSES: usize = 8;
/// Closing marks after a URL in a sentence, which are not a part of it.
const CLOSING: &[char] = &['\'', '"', '`', ',', '.', ':', ';', ')', '>', '}', '!'];

/// See [`GitUrl::without_credentials`](super::GitUrl::without_credentials).
pub(super) fn without_credentials(text: &str) -> Cow<'_, str> {
    unless_same(text, strip_all(text))
}

pub(super) fn has_credentials(text: &str) -> bool {
    strip_all(text) != text
}

/// The text with credentials removed from every URL in it: for git's error output and for logs. A URL loses its
/// user name, password, query and fragment; `ssh://user@host` and `user@host:path` stay.
pub fn redact_urls(text: &str) -> Cow<'_, str> {
    if !text.contains("://") && !text.contains('@') {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for piece in text.split_inclusive(char::is_whitespace) {
        let word = piece.trim_end_matches(char::is_whitespace);
        let closing = closing_of(word);
        let body = &word[..word.len() - closing.len()];
        if body.contains("://") || is_scp_with_secret(word) {
            out.push_str(&strip_all(body));
            out.push_str(closing);
            out.push_str(&piece[word.len()..]);
        } else {
            out.push_str(piece);
        }
    }
    unless_same(text, out)
}

fn unless_same(text: &str, changed: String) -> Cow<'_, str> {
    if changed == text { Cow::Borrowed(text) } else { Cow::Owned(changed) }
}

/// The closing marks at the end of a word. A bracket is one unless it ends an IPv6 address.
fn closing_of(word: &str) -> &str {
    let is_address = word.split("://").nth(1).is_some_and(|rest| rest.contains('['));
    let end = word.trim_end_matches(|c| CLOSING.contains(&c) || (c == ']' && !is_address)).len();
    &word[end..]
}

/// `user:password@host:path` or `user@host:path?query`, and not `npm:package@1.0`.
fn is_scp_with_secret(word: &str) -> bool {
    word.rsplit_once('@').is_some_and(|(user, host)| {
        let is_scp = host.contains(':');
        is_scp && (user.contains(':') || host.contains(['?', '#']))
    })
}

/// Removes credentials until there are none: in hostile text the removal of one can bring up another.
fn strip_all(text: &str) -> String {
    let mut last = text.to_owned();
    for _ in 0..MAX_PASSES {
        let next = strip(&last, MAX_NESTED);
        if next == last {
            return next;
        }
        last = next;
    }
    String::new()
}

/// Removes the credentials of one URL and of `nested` levels of URLs in its path.
fn strip(text: &str, nested: usize) -> String {
    let Some(at) = text.find("://") else { return strip_without_scheme(text) };
    let is_scheme = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let scheme = text[..at].trim_end_matches(is_scheme).len();
    let (before, scheme) = (&text[..scheme], &text[scheme..at]);
    // The text before the scheme is a quote or a name, unless somebody put a password there.
    let before = before.rsplit_once('@').map_or(before, |(_, last)| last);
    let users = ["ssh", "git+ssh", "ssh+git"].iter().any(|name| scheme.eq_ignore_ascii_case(name));
    format!("{before}{scheme}://{}", strip_authority(&text[at + 3..], users, nested))
}

/// `users`: whether a user name without a password is kept.
fn strip_authority(rest: &str, users: bool, nested: usize) -> String {
    // Parsers of browsers skip more slashes than two.
    let slashes = rest.len() - rest.trim_start_matches(['/', '\\']).len();
    let (slashes, rest) = rest.split_at(slashes);
    let end = rest.find(['/', '\\', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let host = match authority.split_once('@') {
        Some((user, host)) if users && is_user_name(user) => host,
        _ => authority,
    };
    // `user:12345/678@host`: what looks like a port is the begin of a password with a slash in it.
    let is_ended = !path.contains('@') || (path.starts_with('/') && !host.contains(':'));
    if is_host(host) && is_ended {
        return format!("{slashes}{authority}{}", strip_path(path, nested));
    }
    match rest.rsplit_once('@') {
        Some((_, rest)) => format!("{slashes}{}", strip_authority(rest, false, nested)),
        None => strip_path(path, nested),
    }
}

fn strip_path(path: &str, nested: usize) -> String {
    let path = &path[..path.find(['?', '#']).unwrap_or(path.len())];
    match (path.find("://"), nested) {
        (None, _) => path.to_owned(),
        (Some(at), 0) => path[..at].to_owned(),
        (Some(_), _) => strip(path, nested - 1),
    }
}

/// Removes the credentials of `user:password@host:path` and of URLs without a scheme.
fn strip_without_scheme(text: &str) -> String {
    if let Some(rest) = text.strip_prefix("//") {
        return format!("//{}", strip_authority(rest, false, 0));
    }
    // A path.
    if text.starts_with(['/', '.']) {
        return text.to_owned();
    }
    if let Some((user, rest)) = text.split_once('@')
        && is_user_name(user)
        && rest.contains(':')
    {
        return format!("{user}@{}", strip_path(rest, 0));
    }
    let rest = text.rsplit_once('@').map_or(text, |(_, rest)| rest);
    strip_path(rest, 0)
}

/// Whether the text is `host`, `host:port` or empty.
fn is_host(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        Some((address, port)) => {
            let address_character = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
            if !address.chars().all(address_character) {
                return false;
            }
            ("", port.strip_prefix(':').or(port.is_empty().then_some("0")))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, Some("0")),
        },
    };
    let is_port =
        |port: &str| !port.is_empty() && port.len() <= 5 && port.chars().all(|c| c.is_ascii_digit());
    host.chars().all(|c| c.is_alphanumeric() || ".-_".contains(c)) && port.is_some_and(is_port)
}
