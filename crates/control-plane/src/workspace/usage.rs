//! What workspaces use: asked of the guest agents from time to time, shown, counted, and alerted on.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use chrono::Utc;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{GuestCall, UsageAnswer};
use emergent_wire::WorkspaceId;
use emergent_wire::event::EventKind;
use emergent_wire::workspace::{ResourceLimits, Usage};
use futures_util::StreamExt;

use super::context::Context;
use super::live::Live;

/// How often every workspace that runs is looked at.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(30);
/// A sandbox that does not answer in this time is left out.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Sandboxes that are asked at once.
const AT_ONCE: usize = 8;
/// CPU over a shorter time than this says nothing.
const SHORTEST: Duration = Duration::from_millis(500);
/// A use over this part of the limit is worth an alert …
const HIGH: f64 = 0.8;
/// … which ends below this one.
const NORMAL: f64 = 0.7;

/// What was measured last.
#[derive(Default)]
pub(crate) struct Measured {
    cpu_time: Option<(Duration, Instant)>,
    last: Option<Usage>,
    alerts: Alerts,
}

/// Which resources are known to be scarce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Alerts {
    cpu: bool,
    memory: bool,
    disk: bool,
}

/// A resource went over the mark, or back under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Change {
    resource: &'static str,
    is_high: bool,
    percent: u64,
}

impl Alerts {
    /// Takes a measurement in; gives what is to be told.
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

    /// Looks at all workspaces that this server has a channel to.
    pub(crate) async fn measure_all(self: &Arc<Self>) {
        futures_util::stream::iter(self.context.all_live())
            .for_each_concurrent(AT_ONCE, |(id, live)| async move {
                let Ok(record) = self.context.store.workspace(id).await else {
                    return;
                };
                let Some(usage) = self.measure(&live, &record.resource_limits).await else {
                    return;
                };
                let changes = {
                    let mut measured = live.measured.lock().unwrap_or_else(PoisonError::into_inner);
                    measured.alerts.update(&usage, &record.resource_limits)
                };
                for change in changes {
                    self.tell_usage(id, change);
                }
            })
            .await;
    }

    fn tell_usage(&self, id: WorkspaceId, Change { resource, is_high, percent }: Change) {
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

    /// Asks a sandbox what it uses, if it has an open channel.
    pub(super) async fn measure(&self, live: &Live, limits: &ResourceLimits) -> Option<Usage> {
        let connection = live.connection()?;
        let answer = ask(&connection.channel).await?;
        let (cpu_time, now) = (Duration::from_millis(answer.cpu_time_ms), Instant::now());
        let mut measured = live.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cpu = measured.last.as_ref().and_then(|last| last.cpu);
        match measured.cpu_time {
            Some((before, at)) if now.duration_since(at) >= SHORTEST => {
                cpu = Some(
                    cpu_time.saturating_sub(before).as_secs_f64() / now.duration_since(at).as_secs_f64(),
                );
                measured.cpu_time = Some((cpu_time, now));
            }
            Some(_) => {}
            None => measured.cpu_time = Some((cpu_time, now)),
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
        measured.last = Some(usage.clone());
        Some(usage)
    }

    /// What was measured last, as lines of metrics: not through the recorder, which never forgets a workspace.
    pub(crate) fn metrics(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for (id, live) in self.context.live_map().iter() {
            let measured = live.measured.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(usage) = &measured.last else {
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

/// Asks a guest agent what its sandbox uses.
pub(super) async fn ask(channel: &GuestClient) -> Option<UsageAnswer> {
    let answer = async {
        let call = channel.start(&GuestCall::Usage(())).await.ok()?;
        call.answer::<UsageAnswer>().await.ok()
    };
    tokio::time::timeout(ANSWER_WITHIN, answer).await.ok().flatten()
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
    fn an_alert_comes_once_over_80_percent_and_ends_below_70() {
        let limits = ResourceLimits { cpu: "2".parse().unwrap(), ..ResourceLimits::default() };
        let mut alerts = Alerts::default();
        let mut told = |cpu, memory, disk| -> Vec<(&str, bool)> {
            let changes = alerts.update(&usage(cpu, memory, disk), &limits);
            changes.iter().map(|change| (change.resource, change.is_high)).collect()
        };
        assert_eq!(told(1.6, 80, 10), []);
        assert_eq!(told(1.0, 81, 10), [("memory", true)]);
        assert_eq!(told(1.9, 75, 95), [("cpu", true), ("disk", true)]);
        assert_eq!(told(1.9, 69, 95), [("memory", false)]);
        assert_eq!(told(0.1, 5, 5), [("cpu", false), ("disk", false)]);
    }
}
