//! The HTTP client of the export. It reports an outage of the collector: one warning when it begins, one line when it ends.

use std::error::Error;
use std::fmt::Display;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use http::{Request, Response};
use opentelemetry_http::{Bytes, HttpClient, HttpError};
use parking_lot::Mutex;
use reqwest::redirect::Policy;

use crate::endpoint::Endpoint;

/// A collector that fails and works in turn is reported once in this time.
const WARN_EVERY: Duration = Duration::from_secs(600);

/// The client. Its calls block, so only the export's own thread makes them.
#[derive(Debug)]
pub(crate) struct Client {
    http: reqwest::blocking::Client,
    endpoint: Endpoint,
    outage: Mutex<Outage>,
}

impl Client {
    /// Makes the client. Connects to nothing yet.
    pub(crate) fn new(endpoint: &Endpoint, timeout: Duration) -> Result<Self, reqwest::Error> {
        // Neither a proxy nor a redirect leads spans to another host than the configured one.
        let builder =
            reqwest::blocking::Client::builder().no_proxy().redirect(Policy::none()).timeout(timeout);
        // Without TLS, the host's certificates need not be readable.
        let builder = if endpoint.is_https() { builder } else { builder.tls_certs_only([]) };
        Ok(Self { http: builder.build()?, endpoint: endpoint.clone(), outage: Mutex::default() })
    }

    fn report(&self, error: Option<&dyn Display>) {
        let change = self.outage.lock().note(Instant::now(), error.is_some());
        match (change, error) {
            (Some(Change::Began), Some(error)) => tracing::warn!(
                endpoint = %self.endpoint, %error,
                "traces can't be exported: check log.otlp_endpoint and the collector. Spans are lost until it works again"
            ),
            (Some(Change::Ended), _) => {
                tracing::info!(endpoint = %self.endpoint, "traces are exported again");
            }
            _ => {}
        }
    }
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let answer = self.http.send_bytes(request).await;
        match &answer {
            Ok(answer) if answer.status().is_success() => self.report(None),
            Ok(answer) => self.report(Some(&format_args!("the collector answered {}", answer.status()))),
            Err(error) => self.report(Some(&causes(error.as_ref()))),
        }
        answer
    }
}

/// An error with all its causes. reqwest's messages do not contain them.
pub(crate) fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// The state of the collector, and the time of the last warning.
#[derive(Debug, Default)]
struct Outage {
    is_reported: bool,
    warned_at: Option<Instant>,
}

/// A change of the collector's state that is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Began,
    Ended,
}

impl Outage {
    /// Notes the result of an export.
    fn note(&mut self, now: Instant, failed: bool) -> Option<Change> {
        let may_warn = self.warned_at.is_none_or(|at| now.duration_since(at) >= WARN_EVERY);
        match (self.is_reported, failed) {
            (false, true) if may_warn => {
                *self = Self { is_reported: true, warned_at: Some(now) };
                Some(Change::Began)
            }
            (true, false) => {
                self.is_reported = false;
                Some(Change::Ended)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_reported_once_and_a_flapping_collector_seldom() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut outage = Outage::default();
        assert_eq!(outage.note(at(0), false), None);
        assert_eq!(outage.note(at(1), true), Some(Change::Began));
        for second in 2..2000 {
            assert_eq!(outage.note(at(second), true), None, "{second}");
        }
        assert_eq!(outage.note(at(2000), false), Some(Change::Ended));

        let changes = |outage: &mut Outage, seconds: std::ops::Range<u64>| {
            seconds.filter(|second| outage.note(at(*second), second % 2 == 0).is_some()).count()
        };
        // One more outage in each ten minutes, with its end.
        assert_eq!(changes(&mut outage, 2001..2600), 2);
        assert_eq!(changes(&mut outage, 2601..3200), 2);
    }
}
