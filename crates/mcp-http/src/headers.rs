//! Headers of requests.

use emergent_mcp_protocol::{headers, version};
use http::{HeaderMap, header};

use crate::Refusal;

/// The types of events and of single messages.
pub(crate) const JSON: &str = "application/json";
pub(crate) const EVENTS: &str = "text/event-stream";

/// The value of a header; none when it is missing or not a text.
pub(crate) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim)
}

/// Whether the header of a request names a version of the modern era.
pub(crate) fn is_modern(request: &HeaderMap) -> bool {
    text(request, headers::PROTOCOL_VERSION).is_some_and(version::is_modern)
}

/// Checks that a client accepts both forms of an answer and sends JSON.
pub(crate) fn check_types(request: &HeaderMap) -> Result<(), Refusal> {
    if !accepts(request, JSON) || !accepts(request, EVENTS) {
        return Err(Refusal::NotAcceptable("application/json and text/event-stream"));
    }
    let content = text(request, header::CONTENT_TYPE.as_str()).unwrap_or_default();
    let content = content.split(';').next().unwrap_or_default().trim();
    if !content.eq_ignore_ascii_case(JSON) {
        return Err(Refusal::UnsupportedMediaType);
    }
    Ok(())
}

/// Whether a client accepts answers of a type.
pub(crate) fn accepts(headers: &HeaderMap, wanted: &str) -> bool {
    let group = wanted.split('/').next().unwrap_or_default();
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|kind| {
        let kind = kind.split(';').next().unwrap_or_default().trim();
        kind.eq_ignore_ascii_case(wanted) || kind == "*/*" || kind.strip_suffix("/*") == Some(group)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accept(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::ACCEPT, value.parse().unwrap())])
    }

    #[test]
    fn accept_is_read_with_lists_parameters_and_wildcards() {
        let check = |value: &str, wanted: &str| accepts(&accept(value), wanted);
        assert!(check("application/json, text/event-stream", EVENTS));
        assert!(check("Text/Event-Stream;q=0.5", EVENTS));
        assert!(check("*/*", JSON) && check("text/*", EVENTS));
        assert!(!check("text/html", JSON) && !accepts(&HeaderMap::new(), JSON));
    }
}
