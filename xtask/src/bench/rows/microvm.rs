//! MicroVMs: the time until the agent answers, against a gVisor sandbox; a restore of a memory snapshot, against a boot; many at once,
//! against one alone; and the memory of the virtual machine monitor.
//!
//! With an emulated processor (the double of Firecracker, or an emulated KVM) only ratios are meaningful, and the rows show no times.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use emergent_test_support::microvm::{Microvms, ask_manager};
use futures_util::future::try_join_all;
use reqwest::Method;
use serde_json::{Value, json};

use crate::bench::report::{Promise, Ratio, Row, Unit};
use crate::bench::session::{Session, Workspace, release_binary};
use crate::bench::stats::Summary;
use crate::bench::turns::{Pair, Rounds, in_turns};

/// The number of concurrent creates for each CPU.
const AT_ONCE_PER_CPU: usize = 2;

/// The virtualisation of the microVMs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Hardware,
    EmulatedKvm,
    Double,
}

pub(super) async fn measure(session: &Session) -> Result<Vec<Row>> {
    let binary = release_binary()?;
    let Some(microvms) = Microvms::find_any(&binary) else {
        session.note(
            "microVMs were not measured: neither Firecracker (`emergent firecracker install`) nor QEMU (`scripts/setup test`) is \
             installed",
        );
        return Ok(Vec::new());
    };
    let kind = match (microvms.is_real(), has_hardware_kvm()) {
        (false, _) => Kind::Double,
        (true, true) => Kind::Hardware,
        (true, false) => Kind::EmulatedKvm,
    };
    if kind == Kind::Double {
        session.note(
            "microVMs: Firecracker is not installed, and its double runs QEMU with an emulated processor: memory snapshots and the \
             monitor's memory are not measured",
        );
    }
    if Path::new("/dev/kvm").exists() && !has_hardware_kvm() {
        session.note("microVMs: the KVM of this machine is emulated");
    }
    if kind != Kind::Hardware {
        session
            .note("microVMs: with an emulated processor only ratios are meaningful, so no times are shown");
    }
    let own = Session::with(microvms.start(&binary, &[]).await, session.quick)?;
    let measured = Bench { session: &own, kind, request: microvms.small() }.measure().await;
    microvms.keep_images(&own.data_dir().join("firecracker"));
    own.end(measured.is_ok());
    measured
}

struct Bench<'a> {
    session: &'a Session,
    kind: Kind,
    /// The request for a small microVM.
    request: Value,
}

impl Bench<'_> {
    async fn measure(&self) -> Result<Vec<Row>> {
        let rounds = match self.kind {
            Kind::Hardware => Rounds { warm_up: 1, counted: self.session.either(7, 15) },
            // An emulated boot takes many seconds.
            _ => Rounds { warm_up: 0, counted: self.session.either(1, 3) },
        };
        self.session.progress("the first microVM, and the image that all disks are clones of …");
        let (_, first) = self.create("firecracker").await?;
        let mut rows = vec![self.boots(rounds).await?];
        rows.extend(self.many_at_once(rounds).await?);
        if self.kind != Kind::Double {
            rows.push(self.monitors_memory(&first).await?);
            rows.push(self.memory_snapshots(rounds, &first).await?);
        }
        self.session.destroy(first).await?;
        Ok(rows
            .into_iter()
            .map(|row| if self.kind == Kind::Hardware { row } else { row.ratio_only() })
            .collect())
    }

    async fn create(&self, provider: &str) -> Result<(Duration, Workspace)> {
        let mut request = self.request.clone();
        request["provider"] = json!(provider);
        request["warm_start"] = json!(false);
        self.session.create_of(&request).await
    }

    /// The duration of a create. The workspace is destroyed.
    async fn once(&self, provider: &str) -> Result<Duration> {
        let (took, workspace) = self.create(provider).await?;
        self.session.destroy(workspace).await?;
        Ok(took)
    }

    async fn boots(&self, rounds: Rounds) -> Result<Row> {
        self.session.progress("microVMs and gVisor sandboxes, in turns …");
        let pair = in_turns(rounds, || self.once("firecracker"), || self.once("gvisor")).await?;
        let promises = &[Promise::Below(125.0)];
        Ok(Row::compared("microVM, agent ready / gVisor create", pair, Ratio::TimesAsLong, promises))
    }

    async fn many_at_once(&self, rounds: Rounds) -> Result<Vec<Row>> {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let count = AT_ONCE_PER_CPU * cpus;
        self.session.progress(&format!("{count} microVMs at once, and one alone, in turns …"));
        let at_once = async || {
            let begun = Instant::now();
            let made = try_join_all((0..count).map(|_| self.create("firecracker"))).await?;
            let took = begun.elapsed();
            for (_, workspace) in made {
                self.session.destroy(workspace).await?;
            }
            Ok(took / u32::try_from(count)?)
        };
        let each = in_turns(rounds, at_once, || self.once("firecracker")).await?;
        let mut rows = Vec::new();
        if self.kind == Kind::Hardware {
            let a_second = Summary::of(vec![1000.0 / each.ours.p50]).context("no rounds")?;
            let promise = Promise::AtLeast(5.0 * cpus as f64);
            rows.push(Row::alone("microVMs a second", Unit::PerSecond, a_second, &[promise]));
        }
        rows.push(Row::compared("each of many microVMs at once / one alone", each, Ratio::TimesAsLong, &[]));
        Ok(rows)
    }

    async fn monitors_memory(&self, workspace: &Workspace) -> Result<Row> {
        let directory = self.session.data_dir().join("firecracker");
        let machine =
            ask_manager(&directory, "GET", &format!("/v1/machines/{}", workspace.id), None).await.ok();
        let pid = machine["pid"].as_u64().context("the microVM has no process")?;
        let own = memory_without_guest(&std::fs::read_to_string(format!("/proc/{pid}/smaps"))?);
        let guest =
            self.request["resource_limits"]["memory"].as_str().and_then(|text| text.strip_suffix('M'));
        let guest: f64 = guest.context("a size in MiB")?.parse()?;
        let summary = |value: f64| Summary::of(vec![value]).context("no sample");
        let pair = Pair { ours: summary(own)?, baseline: summary(guest)? };
        Ok(Row::share("monitor's memory / its guest's", Unit::Mebibytes, pair, &[Promise::AtMost(5.0)]))
    }

    async fn memory_snapshots(&self, rounds: Rounds, workspace: &Workspace) -> Result<Row> {
        self.session.progress("microVMs restored from a memory snapshot, and booted ones, in turns …");
        let path = format!("/api/v1/agent/workspaces/{}/snapshot", workspace.id);
        let (_, snapshot) =
            self.session.request(Method::POST, &path, Some(&json!({ "memory": true }))).await?;
        let body = json!({ "snapshot_id": snapshot["id"] });
        let restored = async || {
            let path = "/api/v1/agent/workspaces/from-snapshot";
            let (took, made) = self.session.request(Method::POST, path, Some(&body)).await?;
            let id = made["id"].as_str().context("the new workspace has no id")?.to_owned();
            self.session.destroy(Workspace { id }).await?;
            Ok(took)
        };
        let pair = in_turns(rounds, restored, || self.once("firecracker")).await?;
        let id = snapshot["id"].as_str().context("the snapshot has no id")?;
        let path = format!("/api/v1/agent/workspaces/snapshots/{id}");
        self.session.request(Method::DELETE, &path, None).await?;
        let promises = &[Promise::Below(30.0)];
        Ok(Row::compared("microVM of a memory snapshot / booted", pair, Ratio::TimesFaster, promises))
    }
}

/// Whether KVM uses the virtualisation of the processor. On ARM it always does.
fn has_hardware_kvm() -> bool {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    Path::new("/dev/kvm").exists()
        && (!cfg!(target_arch = "x86_64")
            || flags.split_ascii_whitespace().any(|flag| matches!(flag, "vmx" | "svm")))
}

/// Resident memory of a process in MiB, without its largest mapping, which is the memory of its guest.
fn memory_without_guest(smaps: &str) -> f64 {
    let kibibytes = |line: &str, name: &str| -> Option<f64> {
        line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let sizes = smaps.lines().filter_map(|line| kibibytes(line, "Size:"));
    let resident = smaps.lines().filter_map(|line| kibibytes(line, "Rss:"));
    let mut mappings: Vec<(f64, f64)> = sizes.zip(resident).collect();
    mappings.sort_by(|one, other| one.0.total_cmp(&other.0));
    mappings.pop();
    mappings.iter().map(|(_, resident)| resident).sum::<f64>() / 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monitor_memory_excludes_the_largest_mapping() {
        let mapping = |size: u32, resident: u32| {
            format!("7f00-7f01 rw-p 0 00:00 0\nSize: {size} kB\nRss:   {resident} kB\nPss: 1 kB\n")
        };
        let smaps = mapping(512, 512) + &mapping(262_144, 100_000) + &mapping(4096, 1024);
        assert_eq!(memory_without_guest(&smaps), 1.5);
    }
}
