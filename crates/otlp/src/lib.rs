//! Exports spans to an OpenTelemetry collector, by OTLP over HTTP. No other crate knows OpenTelemetry.
//!
//! ```text
//!  span ends ──▶ queue ──▶ thread of the export ──▶ POST {endpoint}/v1/traces
//!                  │        every 5 s, or when 512 spans wait
//!                  └ full: the span is dropped
//! ```
//!
//! Invariant: a collector that is slow or dead costs spans, never time. The code that ends a span only puts it into the queue. One
//! thread waits for the collector, and the end of the server waits for that thread for a limited time.

mod client;
mod endpoint;
mod exporter;
mod trace_context;

#[cfg(test)]
mod tests;

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider};
use tracing::{Metadata, Subscriber};
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::registry::LookupSpan;

pub use endpoint::{Endpoint, InvalidEndpoint};
pub use trace_context::continue_trace;

use client::Client;
use exporter::{Exporter, InstallationSlot};

/// Spans that wait for their export.
const QUEUED_SPANS: usize = 2048;
/// Spans of one request to the collector.
const BATCH_SPANS: usize = 512;
/// The pause between two exports.
const EXPORT_EVERY: Duration = Duration::from_secs(5);
/// The beginning of the targets whose spans are exported: the crates of this project.
const TARGET: &str = "emergent";

/// Time limits of the export.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Of one request to the collector.
    request: Duration,
    /// Of sending the last spans.
    shutdown: Duration,
}

const LIMITS: Limits = Limits { request: Duration::from_secs(5), shutdown: Duration::from_secs(3) };

/// The export can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// The HTTP client can't be made.
    #[error("the HTTP client for {endpoint} can't be made: {reason}")]
    Client {
        /// The collector.
        endpoint: Endpoint,
        /// The cause.
        reason: String,
    },
    /// OpenTelemetry's variables in the environment are not valid.
    #[error(transparent)]
    Settings(#[from] ExporterBuildError),
}

/// The export of spans.
#[derive(Debug)]
pub struct OtlpExport {
    provider: SdkTracerProvider,
    endpoint: Endpoint,
    installation: InstallationSlot,
    limits: Limits,
}

impl OtlpExport {
    /// Starts the export for a service of this name and version. Connects to nothing before the first span ends. Must not be called
    /// in an async runtime.
    pub fn start(
        endpoint: &Endpoint,
        service: &'static str,
        version: &'static str,
    ) -> Result<Self, OtlpError> {
        Self::start_with(endpoint, service, version, LIMITS)
    }

    fn start_with(
        endpoint: &Endpoint,
        service: &'static str,
        version: &'static str,
        limits: Limits,
    ) -> Result<Self, OtlpError> {
        let client = Client::new(endpoint, limits.request).map_err(|error| OtlpError::Client {
            endpoint: endpoint.clone(),
            reason: client::causes(&error),
        })?;
        let installation = InstallationSlot::default();
        let service = [KeyValue::new("service.name", service), KeyValue::new("service.version", version)];
        let exporter = Exporter::new(endpoint, client, limits.request, service, &installation)?;
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(QUEUED_SPANS)
            .with_max_export_batch_size(BATCH_SPANS)
            .with_scheduled_delay(EXPORT_EVERY)
            .build();
        let processor = BatchSpanProcessor::builder(exporter).with_batch_config(batches).build();
        let provider = SdkTracerProvider::builder().with_span_processor(processor).build();
        Ok(Self { provider, endpoint: endpoint.clone(), installation, limits })
    }

    /// The layer that takes the spans. Events are lines of the log; they are not exported.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let is_exported =
            |metadata: &Metadata<'_>| metadata.is_span() && metadata.target().starts_with(TARGET);
        OpenTelemetryLayer::new(self.provider.tracer(TARGET))
            // A span begins with its first child or with its end, so that `continue_trace` can set its parent meanwhile.
            .with_context_activation(false)
            .with_location(false)
            .with_target(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(filter_fn(is_exported).with_max_level_hint(LevelFilter::DEBUG))
    }

    /// Adds the installation's id to the attributes of the server. Nothing is exported before.
    pub fn set_installation(&self, id: String) {
        let _ = self.installation.set(Some(id));
    }

    /// Exports the last spans, within a limited time.
    pub fn shut_down(&self) {
        // A server that did not start has no id. Its spans are exported without one.
        let _ = self.installation.set(None);
        if self.provider.shutdown_with_timeout(self.limits.shutdown).is_err() {
            tracing::warn!(
                endpoint = %self.endpoint,
                "the last spans were not exported within {} s; they are lost",
                self.limits.shutdown.as_secs()
            );
        }
    }
}
