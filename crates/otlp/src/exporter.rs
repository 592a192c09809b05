//! The exporter: sends a batch of spans to the collector, with the attributes of this server.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::Status;
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, RetryPolicy, SpanExporter as Collector, WithExportConfig as _,
    WithHttpConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanExporter};

use crate::client::Client;
use crate::endpoint::Endpoint;

/// The attribute with the installation's id. It is not `service.instance.id`, because servers on one database share it.
const INSTALLATION: &str = "emergent.installation";
/// The field of a span that failed.
const ERROR_CODE: &str = "error_code";

/// The installation's id, once it is known. None: the server ends without one.
pub(crate) type InstallationSlot = Arc<OnceLock<Option<String>>>;

/// Sends spans to a collector. The first batch waits for the installation's id, because the attributes of a server can't change.
#[derive(Debug)]
pub(crate) struct Exporter {
    collector: OnceLock<Result<Collector, ExporterBuildError>>,
    endpoint: Endpoint,
    client: Arc<Client>,
    timeout: Duration,
    service: [KeyValue; 2],
    installation: InstallationSlot,
}

impl Exporter {
    pub(crate) fn new(
        endpoint: &Endpoint,
        client: Client,
        timeout: Duration,
        service: [KeyValue; 2],
        installation: &InstallationSlot,
    ) -> Result<Self, ExporterBuildError> {
        let client = Arc::new(client);
        // Never dropped: the end of the client's runtime would wait for a name lookup that hangs.
        std::mem::forget(Arc::clone(&client));
        let exporter = Self {
            collector: OnceLock::new(),
            endpoint: endpoint.clone(),
            client,
            timeout,
            service,
            installation: Arc::clone(installation),
        };
        // A fault in the environment (`OTEL_EXPORTER_OTLP_…`) shows at the start.
        exporter.connect()?;
        Ok(exporter)
    }

    fn connect(&self) -> Result<Collector, ExporterBuildError> {
        let client = Arc::clone(&self.client);
        // A batch that fails is lost. With retries a dead collector would keep the thread from emptying the queue.
        Collector::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(self.endpoint.traces().as_str())
            .with_timeout(self.timeout)
            .with_retry_policy(RetryPolicy::disabled())
            .with_shared_http_client(client)
            .build()
    }

    /// The exporter of the library, with the complete attributes. Waits for the installation's id.
    fn collector(&self) -> Result<&Collector, OTelSdkError> {
        let collector = self.collector.get_or_init(|| {
            let installation = self.installation.wait();
            let mut collector = self.connect()?;
            let installation = installation.clone().map(|id| KeyValue::new(INSTALLATION, id));
            let attributes = self.service.iter().cloned().chain(installation);
            collector.set_resource(&Resource::builder_empty().with_attributes(attributes).build());
            Ok(collector)
        });
        collector.as_ref().map_err(|error| OTelSdkError::InternalFailure(error.to_string()))
    }
}

impl SpanExporter for Exporter {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        batch.iter_mut().for_each(mark_failure);
        self.collector()?.export(batch).await
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        match self.collector.get() {
            Some(Ok(collector)) => collector.shutdown_with_timeout(timeout),
            _ => Ok(()),
        }
    }
}

/// Sets the status of a span that has an error code.
fn mark_failure(span: &mut SpanData) {
    let code = span.attributes.iter().find(|attribute| attribute.key.as_str() == ERROR_CODE);
    if let Some(code) = code {
        span.status = Status::error(code.value.to_string());
    }
}
