//! Disk usage of running sandboxes: files outside their volumes, which no quota limits, and errors of their disks.
//!
//! The engine keeps the files that a sandbox writes outside its volumes in a directory of the host (the root layer). Walking it
//! takes time. So it is walked only if it can be over its limit: if it had grown by as much as the host's whole disk has since
//! the last measurement.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bollard::models::ContainerInspectResponse;
use emergent_host::tree_size::{removed_bytes, tree_bytes};
use emergent_wire::WorkspaceId;
use procfs::process::Process;

use super::disk::Disks;
use super::processes::ContainerProcesses;
use super::provider::{ContainerProvider, Runtime};
use super::state::workspace_of;
use super::{LABEL_ROOT_LIMIT, name_of};
use crate::sandbox::{DiskFault, DiskUse};

/// The longest use of a measurement. Files that others remove hide the files that a sandbox writes.
const MEASURE_AT_LEAST_EVERY: Duration = Duration::from_secs(60);
/// The shortest use of a measurement, as a multiple of the time that it took.
const REST_FACTOR: u32 = 5;
/// The interval of comparisons with the engine's list, which finds sandboxes that another server started, or this one before
/// its restart.
const COMPARE_EVERY: Duration = Duration::from_secs(30);

/// The root layer of a running sandbox.
#[derive(Clone, Debug)]
pub(super) struct RootLayer {
    directory: PathBuf,
    limit: u64,
    measured: Option<Measured>,
}

#[derive(Clone, Copy, Debug)]
struct Measured {
    bytes: u64,
    /// Used bytes of the host's disk at that time.
    host_bytes: u64,
    at: Instant,
    took: Duration,
}

impl RootLayer {
    /// The layer of a container. None: it is on another host.
    pub(super) fn of(container: &ContainerInspectResponse) -> Option<Self> {
        let directory = container.graph_driver.as_ref()?.data.get("UpperDir")?;
        let labels = container.config.as_ref()?.labels.as_ref()?;
        let limit = labels.get(LABEL_ROOT_LIMIT)?.parse().ok()?;
        Some(Self { directory: directory.into(), limit, measured: None })
    }

    /// Whether it can be over its limit now.
    fn may_be_over(&self, host_bytes: u64) -> bool {
        let Some(measured) = self.measured else {
            return true;
        };
        let age = measured.at.elapsed();
        if age >= MEASURE_AT_LEAST_EVERY {
            return true;
        }
        let grown = host_bytes.saturating_sub(measured.host_bytes);
        age >= measured.took * REST_FACTOR && measured.bytes.saturating_add(grown) > self.limit
    }

    /// Whether it is over its limit. Measures it if it may be, or always.
    fn is_over(&mut self, processes: &[i32], always: bool) -> io::Result<bool> {
        let host_bytes = used_bytes(&self.directory)?;
        Ok((always || self.may_be_over(host_bytes)) && self.measure(host_bytes, processes)? > self.limit)
    }

    fn measure(&mut self, host_bytes: u64, processes: &[i32]) -> io::Result<u64> {
        let at = Instant::now();
        let seen = tree_bytes(&self.directory, self.limit)?;
        let bytes = seen.saturating_add(removed_bytes(processes, &self.directory)?);
        self.measured = Some(Measured { bytes, host_bytes, at, took: at.elapsed() });
        Ok(bytes)
    }
}

/// A sandbox to measure.
struct Subject {
    id: WorkspaceId,
    processes: ContainerProcesses,
    layer: Option<RootLayer>,
}

impl ContainerProvider {
    /// Measures all running sandboxes.
    pub(super) async fn measure_disks(&self, thorough: bool) -> Vec<DiskUse> {
        self.find_unknown_sandboxes().await;
        let subjects: Vec<Subject> = {
            let layers = self.running.root_layers.lock();
            let known = self.running.processes.lock();
            let subject = |(id, processes): (&WorkspaceId, &ContainerProcesses)| Subject {
                id: *id,
                processes: processes.clone(),
                layer: layers.get(id).cloned(),
            };
            known.iter().map(subject).collect()
        };
        let disks = self.disks.clone().ok();
        let measured =
            tokio::task::spawn_blocking(move || measure_all(subjects, disks.as_ref(), thorough)).await;
        let (uses, measured) = measured.unwrap_or_default();
        let mut layers = self.running.root_layers.lock();
        for (id, layer) in measured {
            // A sandbox that has ended meanwhile is not in the map any more.
            if let Some(known) = layers.get_mut(&id) {
                *known = layer;
            }
        }
        uses
    }

    async fn find_unknown_sandboxes(&self) {
        {
            let mut compared = self.running.compared.lock();
            if compared.is_some_and(|at| at.elapsed() < COMPARE_EVERY) {
                return;
            }
            *compared = Some(Instant::now());
        }
        let Ok(found) = self.engine.containers(&self.label()).await else {
            return;
        };
        let running: Vec<WorkspaceId> =
            found.iter().filter(|one| one.is_running).filter_map(|one| workspace_of(&one.labels)).collect();
        self.running.processes.lock().retain(|id, _| running.contains(id));
        self.running.root_layers.lock().retain(|id, _| running.contains(id));
        for id in running {
            if self.running.processes.lock().contains_key(&id) {
                continue;
            }
            let is_own = match self.engine.inspect(&name_of(id)).await {
                Ok(container) => self.is_own(&container),
                Err(_) => false,
            };
            if is_own {
                self.record_processes(id).await;
            }
        }
    }

    /// Whether a container is on this provider's runtime. Both container providers share an engine.
    fn is_own(&self, container: &ContainerInspectResponse) -> bool {
        let runtime = container.host_config.as_ref().and_then(|host| host.runtime.as_deref());
        (runtime == Some(super::provider::RUNSC)) == (self.runtime == Runtime::Gvisor)
    }
}

/// The disk usage of each sandbox, and the layers with their new measurements.
fn measure_all(
    subjects: Vec<Subject>,
    disks: Option<&Disks>,
    thorough: bool,
) -> (Vec<DiskUse>, Vec<(WorkspaceId, RootLayer)>) {
    // With reserved disks, writes to a disk take no further room on the host.
    let only_outside = disks.is_some_and(Disks::are_reserved);
    let (mut uses, mut measured) = (Vec::new(), Vec::new());
    for Subject { id, processes, layer } in subjects {
        let pids = processes.group.processes();
        let mut fault = disks.filter(|disks| disks.has_errors(id)).map(|_| DiskFault::FileSystemErrors);
        let mut outside = 0;
        if let Some(mut layer) = layer {
            let is_over = layer.is_over(&pids, thorough && only_outside).unwrap_or_else(|error| {
                tracing::debug!(workspace = %id, %error, "a root layer can't be measured");
                false
            });
            if is_over {
                fault = Some(DiskFault::RootLayerTooLarge { limit: layer.limit });
            }
            outside = layer.measured.map_or(0, |measured| measured.bytes);
            measured.push((id, layer));
        }
        let written_bytes = if only_outside { outside } else { written_bytes(&pids) };
        uses.push(DiskUse { id, written_bytes, fault });
    }
    (uses, measured)
}

/// Used bytes of the disk that a directory is on.
fn used_bytes(directory: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(directory)?;
    Ok(stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize)
}

/// Bytes that processes have written to disks. The kernel adds the bytes of an ended child to its parent.
fn written_bytes(processes: &[i32]) -> u64 {
    let written = |pid: &i32| Some(Process::new(*pid).and_then(|process| process.io()).ok()?.write_bytes);
    processes.iter().filter_map(written).sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_root_layer_is_walked_only_if_it_can_be_over_its_limit() {
        let directory = tempfile::tempdir().unwrap();
        let mut layer = RootLayer { directory: directory.path().to_owned(), limit: 10 << 20, measured: None };
        assert!(layer.may_be_over(0), "it was never measured");
        std::fs::write(directory.path().join("file"), vec![1; 1 << 20]).unwrap();
        layer.measure(1000, &[]).unwrap();
        let measured = layer.measured.as_mut().unwrap();
        measured.took = Duration::ZERO;
        assert!(!layer.may_be_over(1000 + (8 << 20)));
        assert!(layer.may_be_over(1000 + (10 << 20)));
        layer.measured.as_mut().unwrap().took = Duration::from_secs(5);
        assert!(!layer.may_be_over(u64::MAX), "the last walk was slow and recent");
        layer.measured.as_mut().unwrap().at -= MEASURE_AT_LEAST_EVERY;
        assert!(layer.may_be_over(0));
    }

    #[test]
    fn bytes_written_by_processes_are_counted() {
        let own = [std::process::id().cast_signed()];
        let before = written_bytes(&own);
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::write(directory.path().join("file"), vec![1; 4 << 20]).unwrap();
        assert!(written_bytes(&own) >= before + (4 << 20));
    }
}
