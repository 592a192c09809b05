//! The resource usage of workspaces, measured by their guest agents: for clients, metrics and alerts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::Utc;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{GuestCall, UsageAnswer};
use emergent_store::StoreError;
use emergent_wire::WorkspaceId;
use emergent_wire::event::EventKind;
use emergent_wire::workspace::{ResourceLimits, Usage};
use futures_util::StreamExt;

use super::context::Context;
use super::live::LiveWorkspace;

/// The interval of measurements.
pub(crate) const MEASURE_EVERY: Duration = Duration::from_secs(30);
/// The time limit for the answer of a sandbox.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// The limit on sandboxes that are measured at the same time.
const MAX_READS: usize = 8;
/// The shortest time over which CPU usage is computed.
const MIN_CPU_INTERVAL: Duration = Duration::from_millis(500);
/// An alert begins above this part of the limit.
const HIGH: f64 = 0.8;
/// An alert ends below this part of the limit.
const NORMAL: f64 = 0.7;

/// The last measurement of a workspace.
#[derive(Default)]
pub(crate) struct LastUsage {
    cpu_time: Option<(Duration, Instant)>,
    usage: Option<Usage>,
    alerts: Alerts,
}

/// The resources with an alert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Alerts {
    cpu: bool,
    memory: bool,
    disk: bool,
}

/// The begin or the end of an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Change {
    resource: &'static str,
    is_high: bool,
    percent: u64,
}

impl Alerts {
    /// Updates the alerts with a measurement. Returns the changes.
    fn update(&mut self, usage: &Usage, limits: &ResourceLimits) -> Vec<Change> {
        #[allow(clippy::cast_precision_loss, reason = "a share does not need every bit")]
        let part = |used: u64, of: u64| if of == 0 { 0.0 } else { used as f64 / of as f64 };
        let cpus = f64::from(limits.cpu.millis()) / 1000.0;
        let parts = [
            ("cpu", &mut self.cpu, usage.cpu.map(|cpu| cpu / cpus)),
            ("memory", &mut self.memory, Some(part(usage.memory_bytes, usage.memory_limit_bytes))),
            ("disk", &mut self.disk, Some(part(usage.disk_bytes, usage.disk_limit_bytes))),
        ];
        let changes = parts.into_iter().filter_map(|(resource, alert, part)| {
            let part = part?;
            let is_high = if *alert { part >= NORMAL } else { part > HIGH };
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
            let percent = (part * 100.0).round().clamp(0.0, 1e6) as u64;
            (std::mem::replace(alert, is_high) != is_high).then_some(Change { resource, is_high, percent })
        });
        changes.collect()
    }
}

/// Measures the usage of all workspaces.
pub(crate) struct UsageMonitor {
    context: Arc<Context>,
}

impl UsageMonitor {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context) })
    }

    /// Measures all workspaces to which this server has a channel.
    pub(crate) async fn measure_all(self: &Arc<Self>) {
        futures_util::stream::iter(self.context.all_live())
            .for_each_concurrent(MAX_READS, |(id, live)| async move {
                let workspace = match self.context.store.workspace(id).await {
                    Ok(workspace) => workspace,
                    Err(StoreError::NotFound { .. }) => return,
                    Err(error) => {
                        tracing::warn!(workspace = %id, %error, "the usage of a workspace can't be measured");
                        return;
                    }
                };
                let Some(usage) = self.measure(&live, &workspace.resource_limits).await else {
                    return;
                };
                let changes = live.last_usage.lock().alerts.update(&usage, &workspace.resource_limits);
                for change in changes {
                    self.report_usage(id, change);
                }
            })
            .await;
    }

    fn report_usage(&self, id: WorkspaceId, Change { resource, is_high, percent }: Change) {
        if is_high {
            tracing::warn!(workspace = %id, resource, percent, "a workspace is near its limit");
            metrics::counter!("emergent_usage_alerts_total", "resource" => resource).increment(1);
            let message = format!("{resource} is at {percent} % of its limit");
            self.context.events.workspace(EventKind::UsageHigh, id, message);
        } else {
            let message = format!("{resource} is at {percent} % of its limit again");
            self.context.events.workspace(EventKind::UsageNormal, id, message);
        }
    }

    /// Measures the usage of a sandbox. None if its channel is closed, or the agent does not answer in time.
    pub(super) async fn measure(&self, live: &LiveWorkspace, limits: &ResourceLimits) -> Option<Usage> {
        let connection = live.connection()?;
        let answer = read(&connection.channel).await?;
        let (cpu_time, now) = (Duration::from_millis(answer.cpu_time_ms), Instant::now());
        let mut last = live.last_usage.lock();
        let mut cpu = last.usage.as_ref().and_then(|usage| usage.cpu);
        match last.cpu_time {
            Some((before, at)) if now.duration_since(at) >= MIN_CPU_INTERVAL => {
                cpu = Some(
                    cpu_time.saturating_sub(before).as_secs_f64() / now.duration_since(at).as_secs_f64(),
                );
                last.cpu_time = Some((cpu_time, now));
            }
            Some(_) => {}
            None => last.cpu_time = Some((cpu_time, now)),
        }
        let usage = Usage {
            cpu: cpu.map(|cpu| (cpu * 1000.0).round() / 1000.0),
            memory_bytes: answer.memory_used_bytes,
            memory_limit_bytes: limits.memory.bytes(),
            disk_bytes: answer.disk_used_bytes,
            disk_limit_bytes: answer.disk_total_bytes,
            processes: answer.processes,
            running_operations: answer.running_operations,
            measured_at: Utc::now(),
        };
        last.usage = Some(usage.clone());
        Some(usage)
    }

    /// The last measurements as lines of metrics. The recorder is not used, because it would keep removed workspaces for ever.
    pub(crate) fn metrics(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for (id, live) in self.context.live.lock().iter() {
            let last = live.last_usage.lock();
            let Some(usage) = &last.usage else {
                continue;
            };
            let _ = writeln!(
                text,
                "emergent_workspace_memory_bytes{{workspace=\"{id}\"}} {}",
                usage.memory_bytes
            );
            let _ =
                writeln!(text, "emergent_workspace_disk_bytes{{workspace=\"{id}\"}} {}", usage.disk_bytes);
            if let Some(cpu) = usage.cpu {
                let _ = writeln!(text, "emergent_workspace_cpus{{workspace=\"{id}\"}} {cpu}");
            }
        }
        text
    }
}

/// Reads the usage of a sandbox from its guest agent. None if the agent does not answer in time.
pub(super) async fn read(channel: &GuestClient) -> Option<UsageAnswer> {
    let answer = async {
        let call = channel.start(&GuestCall::Usage(())).await.ok()?;
        call.answer::<UsageAnswer>().await.ok()
    };
    tokio::time::timeout(READ_TIMEOUT, answer).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(cpu: f64, memory: u64, disk: u64) -> Usage {
        Usage {
            cpu: Some(cpu),
            memory_bytes: memory,
            memory_limit_bytes: 100,
            disk_bytes: disk,
            disk_limit_bytes: 100,
            processes: 0,
            running_operations: 0,
            measured_at: Utc::now(),
        }
    }

    #[test]
    fn an_alert_begins_once_above_80_percent_and_ends_below_70() {
        let limits = ResourceLimits { cpu: "2".parse().unwrap(), ..ResourceLimits::default() };
        let mut alerts = Alerts::default();
        let mut changes = |cpu, memory, disk| -> Vec<(&str, bool)> {
            let changes = alerts.update(&usage(cpu, memory, disk), &limits);
            changes.iter().map(|change| (change.resource, change.is_high)).collect()
        };
        assert_eq!(changes(1.6, 80, 10), []);
        assert_eq!(changes(1.0, 81, 10), [("memory", true)]);
        assert_eq!(changes(1.9, 75, 95), [("cpu", true), ("disk", true)]);
        assert_eq!(changes(1.9, 69, 95), [("memory", false)]);
        assert_eq!(changes(0.1, 5, 5), [("cpu", false), ("disk", false)]);
    }
}
