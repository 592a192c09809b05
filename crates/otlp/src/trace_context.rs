//! The trace of a caller: W3C's header `traceparent`.

use http::HeaderMap;
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::TraceContextExt as _;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

const TRACEPARENT: &str = "traceparent";

/// Makes the current span a part of the trace that the headers name, if they name one. It must have no child yet. A caller that
/// does not sample its trace has no spans here either.
pub fn continue_trace(headers: &HeaderMap) {
    if !headers.contains_key(TRACEPARENT) {
        return;
    }
    let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &TraceParent(headers));
    if parent.span().span_context().is_valid() {
        // Without an export there is nothing to continue.
        let _ = Span::current().set_parent(parent);
    }
}

/// Headers without `tracestate`, whose content would be sent on with each span.
struct TraceParent<'a>(&'a HeaderMap);

impl Extractor for TraceParent<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        (key == TRACEPARENT).then(|| self.0.get(key)?.to_str().ok()).flatten()
    }

    fn keys(&self) -> Vec<&str> {
        vec![TRACEPARENT]
    }
}
