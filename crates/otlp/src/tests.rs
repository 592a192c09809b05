//! The export as its users see it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::TcpListener;

use emergent_test_support::collector::Collector;
use http::{HeaderMap, HeaderValue};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry;

use super::*;

fn export_to(url: &str) -> OtlpExport {
    OtlpExport::start(&url.parse().unwrap(), "a-service", "1.2.3").unwrap()
}

#[test]
fn spans_of_this_project_are_exported_with_fields_parents_and_failures() {
    let collector = Collector::start();
    let export = export_to(&collector.url);
    export.set_installation("an-installation".to_owned());
    tracing::subscriber::with_default(registry().with(export.layer()), || {
        let outer = tracing::info_span!("outer", field = "value", error_code = tracing::field::Empty);
        outer.in_scope(|| {
            tracing::info_span!(target: "hyper", "of_a_library")
                .in_scope(|| drop(tracing::debug_span!("inner")));
            drop(tracing::trace_span!("too_frequent"));
            tracing::error!("a line of the log");
        });
        outer.record("error_code", "not_found");
    });
    export.shut_down();

    let spans = collector.spans();
    let [inner, outer] = spans.as_slice() else { panic!("{spans:#?}") };
    assert_eq!((inner.name.as_str(), outer.name.as_str()), ("inner", "outer"));
    assert_eq!((&inner.trace, &inner.parent), (&outer.trace, &outer.id));
    assert_eq!((outer.fields["field"].as_str(), outer.fields["error_code"].as_str()), ("value", "not_found"));
    assert!(outer.failed && !inner.failed);
    assert_eq!((outer.parent.as_str(), outer.events), ("", 0));
    let services = collector.services();
    let [service] = services.as_slice() else { panic!("{services:#?}") };
    let expected = [
        ("emergent.installation", "an-installation"),
        ("service.name", "a-service"),
        ("service.version", "1.2.3"),
    ];
    let service: Vec<_> = service.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(service, expected);
}

#[test]
fn a_span_continues_the_trace_that_its_request_names() {
    let collector = Collector::start();
    let export = export_to(&collector.url);
    let continued = |name: &str, traceparent: &'static str| {
        let span = tracing::info_span!("request", name);
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", HeaderValue::from_static(traceparent));
        headers.insert("tracestate", HeaderValue::from_static("vendor=text-of-a-client"));
        span.in_scope(|| {
            continue_trace(&headers);
            drop(tracing::info_span!("child"));
        });
    };
    tracing::subscriber::with_default(registry().with(export.layer()), || {
        continued("valid", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        continued("not sampled", "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00");
        continued("not valid", "00-00000000000000000000000000000000-b7ad6b7169203331-01");
    });
    // Without an export nothing happens.
    continued("without an export", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    export.shut_down();

    let spans = collector.spans();
    assert_eq!(spans.len(), 4, "{spans:#?}");
    let request = |name: &str| spans.iter().find(|span| span.fields.get("name").is_some_and(|is| is == name));
    let valid = request("valid").unwrap();
    assert_eq!(valid.trace, "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(valid.parent, "b7ad6b7169203331");
    assert!(spans.iter().any(|span| span.parent == valid.id && span.trace == valid.trace));
    assert_eq!(request("not valid").unwrap().parent, "");
    assert!(request("not sampled").is_none());
    assert!(!collector.received("text-of-a-client"));
}

#[test]
fn a_collector_that_does_not_answer_delays_the_shutdown_for_a_limited_time_only() {
    // The kernel accepts the connection, and no answer comes.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
    // The test hangs if the shutdown waits for the request.
    let limits = Limits { request: Duration::from_secs(3600), shutdown: Duration::from_millis(200) };
    let export = OtlpExport::start_with(&endpoint, "a-service", "1", limits).unwrap();
    export.set_installation("an-installation".to_owned());
    tracing::subscriber::with_default(registry().with(export.layer()), || {
        // More than the queue holds: the others are dropped, and nothing waits.
        for _ in 0..QUEUED_SPANS * 2 {
            drop(tracing::info_span!("lost"));
        }
    });
    export.shut_down();
    drop(export);
    // It was tried.
    silent.accept().unwrap();
}

#[test]
fn a_redirect_does_not_lead_spans_to_another_address() {
    let collector = Collector::start();
    let export = export_to(&format!("{}/moved", collector.url));
    export.set_installation("an-installation".to_owned());
    tracing::subscriber::with_default(registry().with(export.layer()), || {
        drop(tracing::info_span!("lost"));
    });
    export.shut_down();
    assert_eq!(collector.spans().len(), 0);
}

#[test]
fn a_server_that_did_not_start_exports_its_spans_without_an_installation() {
    let collector = Collector::start();
    let export = export_to(&collector.url);
    tracing::subscriber::with_default(registry().with(export.layer()), || {
        drop(tracing::info_span!("before_the_failure"));
    });
    assert_eq!(collector.spans().len(), 0);
    export.shut_down();
    assert_eq!(collector.spans().len(), 1);
    assert!(!collector.services()[0].contains_key("emergent.installation"));
}
