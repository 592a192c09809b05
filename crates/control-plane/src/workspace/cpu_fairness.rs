//! Keeps short calls fast while the host's CPUs are all busy: sandboxes that use much CPU time run at background priority.
//!
//! Each sandbox has a credit of CPU seconds. The credit grows with time and with each new call, and shrinks by the CPU time that the
//! sandbox uses. While the host's CPUs are busy, a sandbox with a negative credit is in the background: it gets only CPU time
//! that no other process uses. The credit is bounded, so a build, a fork bomb or an endless loop is in the background within a few
//! seconds. A workspace with short calls is not. If all sandboxes are busy, all are in the background and share the CPUs equally. The
//! credit also grows in the background: a sandbox without any CPU time leaves the background after two seconds (later if many
//! sandboxes are busy), so none starves.
//!
//! While two or more sandboxes are in the background and another workspace is in use, those in the background also leave one
//! CPU free (for the reason see [`CpuGroup`]).
//!
//! Sandboxes of hosted MCP servers never go to the background: their requests are not counted as calls, so a server under load would
//! look like a busy loop. Their CPU limits bound them.
//!
//! Credits are lost when the server ends. The priority is kept in the kernel's files, from which the next server reads it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use emergent_host::cpu_group::CpuGroup;
use emergent_wire::WorkspaceId;
use parking_lot::Mutex;

use super::context::Context;
use super::live::LiveWorkspace;

/// The interval in which the host's load is read, and while it is high, the CPU time of each sandbox.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_millis(250);
/// The CPUs are busy when less than this part of their time is unused.
const UNUSED_WHEN_BUSY: f64 = 0.1;
/// They are no longer busy when the sandboxes use less than this part of the CPUs that they may use, for [`CALM_FOR`].
const USED_WHEN_CALM: f64 = 0.75;
/// See [`USED_WHEN_CALM`].
const CALM_FOR: Duration = Duration::from_secs(2);
/// The CPUs that a sandbox can use for ever with a positive credit, while only a few sandboxes use CPU time.
const MAX_INCOME: f64 = 0.25;
/// A sandbox that uses this many CPUs counts as active. On gVisor an idle sandbox uses less.
const ACTIVE_FROM: f64 = 0.03;
/// The CPU seconds that each call adds to the credit: several times those of a short command, and few enough that a sandbox whose
/// calls all begin busy loops soon has a negative credit.
const INCOME_PER_CALL: f64 = 0.1;
/// The credit of a new sandbox, for the start of its processes.
const FIRST_CREDIT: f64 = 0.5;
/// The highest credit.
const MAX_CREDIT: f64 = 5.0;
/// The lowest credit is the negative of this: a sandbox that uses no CPU time has a positive credit again after two seconds, or later
/// if many are busy.
const MAX_DEBT: f64 = 0.5;
/// A workspace counts as in use for this time after its last call.
const IN_USE_FOR: Duration = Duration::from_secs(10);

/// One reading of a sandbox.
#[derive(Clone, Copy, Debug)]
struct Sample {
    id: WorkspaceId,
    /// Its total CPU time.
    used: Duration,
    /// The number of all its calls.
    calls_begun: u64,
    /// Whether a call is in progress.
    has_call: bool,
    /// Whether the kernel's files have it in the background. Used for sandboxes without an account.
    is_background: bool,
}

/// CPU time of the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HostTime {
    cpus: usize,
    /// Ticks in which a CPU was idle.
    unused: u64,
    total: u64,
}

/// One sandbox's credit, and the reading that it was computed from.
#[derive(Debug)]
struct Account {
    used: Duration,
    calls_begun: u64,
    last_call: Option<Duration>,
    /// CPU seconds.
    credit: f64,
    background: bool,
}

/// The priorities of all sandboxes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Decision {
    /// The sandboxes in the background.
    background: Vec<WorkspaceId>,
    /// Whether they leave one CPU free.
    leave_one_cpu: bool,
}

/// The accounts of all sandboxes. A pure state machine: time and readings are arguments.
#[derive(Debug, Default)]
struct Accounts {
    accounts: HashMap<WorkspaceId, Account>,
    at: Duration,
    host: HostTime,
    is_busy: bool,
    leave_one_cpu: bool,
    /// The time since which the sandboxes have used less than [`USED_WHEN_CALM`].
    calm_since: Option<Duration>,
}

impl Accounts {
    /// Whether sandboxes need to be read: the host is busy, or some may be in the background. Otherwise drops the accounts.
    fn needs_samples(&mut self, now: Duration, host: HostTime) -> bool {
        let is_first = self.host == HostTime::default();
        let needed = is_first || self.is_busy || self.is_saturated(host);
        if !needed {
            self.accounts.clear();
            self.at = now;
            self.host = host;
        }
        needed
    }

    /// Whether nearly all CPU time since the last reading was used.
    #[allow(clippy::cast_precision_loss, reason = "a share does not need every bit")]
    fn is_saturated(&self, host: HostTime) -> bool {
        let ticks = host.total.saturating_sub(self.host.total) as f64;
        let unused = host.unused.saturating_sub(self.host.unused) as f64;
        ticks > 0.0 && unused < UNUSED_WHEN_BUSY * ticks
    }

    /// Updates all credits with the readings made at `now`, a time on any monotonic clock.
    fn decide(&mut self, now: Duration, host: HostTime, samples: &[Sample]) -> Decision {
        let seconds = now.saturating_sub(self.at).as_secs_f64();
        let is_saturated = self.is_saturated(host);
        self.at = now;
        self.host = host;
        self.accounts.retain(|id, _| samples.iter().any(|sample| sample.id == *id));
        let used: Vec<f64> = samples.iter().map(|sample| self.used_since(sample)).collect();
        self.settle(now, seconds, host.cpus, samples, &used);
        self.update_load(now, is_saturated, host.cpus, used.iter().sum::<f64>() / seconds.max(f64::EPSILON));
        for account in self.accounts.values_mut() {
            account.background = self.is_busy && account.credit < 0.0;
        }
        let background: Vec<WorkspaceId> =
            samples.iter().map(|sample| sample.id).filter(|id| self.accounts[id].background).collect();
        let is_in_use = |account: &Account| {
            !account.background && account.last_call.is_some_and(|at| now.saturating_sub(at) < IN_USE_FOR)
        };
        self.leave_one_cpu = background.len() > 1 && host.cpus > 1 && self.accounts.values().any(is_in_use);
        Decision { background, leave_one_cpu: self.leave_one_cpu }
    }

    /// The CPU seconds that a sandbox has used since the last reading.
    fn used_since(&self, sample: &Sample) -> f64 {
        let before = self.accounts.get(&sample.id).map_or(sample.used, |account| account.used);
        sample.used.saturating_sub(before).as_secs_f64()
    }

    fn settle(&mut self, now: Duration, seconds: f64, cpus: usize, samples: &[Sample], used: &[f64]) {
        let active = used.iter().filter(|used| **used > ACTIVE_FROM * seconds).count().max(1);
        #[allow(clippy::cast_precision_loss, reason = "small numbers")]
        let income = MAX_INCOME.min(MAX_INCOME * cpus as f64 / active as f64) * seconds;
        for (sample, used) in samples.iter().zip(used) {
            let account = self.accounts.entry(sample.id).or_insert(Account {
                used: sample.used,
                calls_begun: sample.calls_begun,
                last_call: None,
                credit: if sample.is_background { -MAX_DEBT } else { FIRST_CREDIT },
                background: sample.is_background,
            });
            // An earlier server has put this sandbox into the background.
            self.is_busy |= sample.is_background && account.background;
            let calls = sample.calls_begun.saturating_sub(account.calls_begun);
            if calls > 0 || sample.has_call {
                account.last_call = Some(now);
            }
            #[allow(clippy::cast_precision_loss, reason = "small numbers")]
            let by_calls = calls as f64 * INCOME_PER_CALL;
            account.credit = (account.credit + by_calls + income - used).clamp(-MAX_DEBT, MAX_CREDIT);
            account.used = sample.used;
            account.calls_begun = sample.calls_begun;
        }
    }

    /// Decides whether the CPUs are busy. The host's counters show the begin. While sandboxes leave a CPU free, these counters always
    /// show unused time, so the end is decided by the part that the sandboxes use of the CPUs that they may use.
    fn update_load(&mut self, now: Duration, is_saturated: bool, cpus: usize, used_cpus: f64) {
        #[allow(clippy::cast_precision_loss, reason = "a small number")]
        let allowed = (cpus - usize::from(self.leave_one_cpu && cpus > 1)) as f64;
        if is_saturated {
            self.is_busy = true;
            self.calm_since = None;
        } else if used_cpus >= USED_WHEN_CALM * allowed {
            self.calm_since = None;
        } else if now.saturating_sub(*self.calm_since.get_or_insert(now)) >= CALM_FOR {
            self.is_busy = false;
        }
    }
}

/// Sets the priority of sandboxes.
pub(crate) struct CpuFairness {
    context: Arc<Context>,
    accounts: Mutex<Accounts>,
    started: Instant,
}

impl CpuFairness {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context), accounts: Mutex::default(), started: Instant::now() })
    }

    /// Reads the load and sets the priority of all sandboxes.
    pub(crate) async fn share_cpus(self: &Arc<Self>) {
        let (fairness, span) = (Arc::clone(self), tracing::Span::current());
        let read = tokio::task::spawn_blocking(move || {
            let _entered = span.enter();
            let mut accounts = fairness.accounts.lock();
            let now = fairness.started.elapsed();
            let Some(host) = read_host_time().filter(|host| accounts.needs_samples(now, *host)) else {
                return;
            };
            let groups = fairness.workspace_cpu_groups();
            let samples: Vec<Sample> = groups.iter().filter_map(sample).collect();
            let decision = accounts.decide(now, host, &samples);
            apply(&decision, &groups);
        });
        if let Err(error) = read.await {
            tracing::error!(%error, "reading the CPU time of sandboxes failed");
        }
    }

    /// The sandboxes on this host, without those of MCP servers.
    fn workspace_cpu_groups(&self) -> Vec<Group> {
        let groups = self.context.providers.iter().flat_map(|provider| provider.cpu_groups());
        let live = self.context.live.lock();
        let groups = groups.map(|(id, cpu)| Group { id, cpu, live: live.get(&id).cloned() });
        groups.filter(|group| !group.live.as_ref().is_some_and(|live| live.hosts_mcp_server())).collect()
    }
}

/// A sandbox on this host.
struct Group {
    id: WorkspaceId,
    cpu: CpuGroup,
    /// None before the first call since the server's start.
    live: Option<Arc<LiveWorkspace>>,
}

/// Reads a sandbox. None if it has ended.
fn sample(group: &Group) -> Option<Sample> {
    let (calls_begun, calls) = group.live.as_ref().map_or((0, 0), |live| live.call_counts());
    let (used, is_background) = (group.cpu.used()?, group.cpu.is_background());
    Some(Sample { id: group.id, used, calls_begun, has_call: calls > 0, is_background })
}

/// Writes a decision to the kernel's files. Groups that were removed meanwhile are skipped.
fn apply(decision: &Decision, groups: &[Group]) {
    for Group { id, cpu, .. } in groups {
        let background = decision.background.contains(id);
        if let Err(error) = cpu.set_background(background, decision.leave_one_cpu)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::debug!(workspace = %id, background, %error, "a sandbox's CPU priority could not be set");
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    metrics::gauge!("emergent_background_sandboxes").set(decision.background.len() as f64);
}

fn read_host_time() -> Option<HostTime> {
    parse_host_time(&std::fs::read_to_string("/proc/stat").ok()?)
}

/// Reads `/proc/stat`.
fn parse_host_time(text: &str) -> Option<HostTime> {
    let all = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = all.split_ascii_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal. The fields after these are counted in user already.
    let unused = ticks.get(3)? + ticks.get(4)?;
    let total = ticks.iter().take(8).sum();
    let is_cpu = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    Some(HostTime { cpus: text.lines().filter(is_cpu).count(), unused, total })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    const CPUS: usize = 2;

    /// A host with sandboxes, without a kernel.
    struct Host {
        accounts: Accounts,
        now: Duration,
        time: HostTime,
        samples: Vec<Sample>,
    }

    impl Host {
        fn new(sandboxes: usize) -> Self {
            let sample = || Sample {
                id: WorkspaceId::generate(),
                used: Duration::ZERO,
                calls_begun: 0,
                has_call: false,
                is_background: false,
            };
            let samples: Vec<Sample> = std::iter::repeat_with(sample).take(sandboxes).collect();
            let time = HostTime { cpus: CPUS, unused: 0, total: 0 };
            let mut host = Self { accounts: Accounts::default(), now: Duration::ZERO, time, samples };
            host.step(&vec![0.0; sandboxes]);
            host
        }

        /// Makes the next reading, in which each sandbox has used this many CPUs.
        fn step(&mut self, used: &[f64]) -> Decision {
            self.now += SAMPLE_EVERY;
            for (sample, used) in self.samples.iter_mut().zip(used) {
                sample.used += SAMPLE_EVERY.mul_f64(*used);
            }
            self.time.total += 1000 * CPUS as u64;
            let unused = (CPUS as f64 - used.iter().sum::<f64>()).max(0.0);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number")]
            let unused = (unused * 1000.0) as u64;
            self.time.unused += unused;
            self.accounts.decide(self.now, self.time, &self.samples)
        }

        fn run_for(&mut self, time: Duration, used: &[f64]) -> Decision {
            let steps = time.as_millis() / SAMPLE_EVERY.as_millis();
            (0..steps).map(|_| self.step(used)).last().unwrap()
        }

        fn ids(&self, of: &[usize]) -> Vec<WorkspaceId> {
            of.iter().map(|index| self.samples[*index].id).collect()
        }
    }

    const A_SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn busy_sandboxes_go_to_the_background_unless_they_serve_short_calls() {
        let mut host = Host::new(4);
        let mut decision = Decision::default();
        for _ in 0..40 {
            // Calls without pauses use as much CPU time as a loop.
            host.samples[3].calls_begun += 10;
            decision = host.step(&[0.5, 0.5, 0.5, 0.5]);
        }
        assert_eq!(decision, Decision { background: host.ids(&[0, 1, 2]), leave_one_cpu: true });
    }

    #[test]
    fn a_sandbox_that_begins_a_busy_loop_each_second_is_in_the_background() {
        let mut host = Host::new(3);
        let mut in_background = 0;
        for step in 0..40 {
            // A loop that is ended and started again by the next call.
            host.samples[0].calls_begun += u64::from(step % 4 == 0);
            let decision = host.step(&[0.7, 0.6, 0.6]);
            in_background += usize::from(decision.background.contains(&host.samples[0].id));
        }
        assert!(in_background > 30, "{in_background} of 40");
    }

    #[test]
    fn no_sandbox_is_in_the_background_while_a_cpu_is_unused() {
        let mut host = Host::new(2);
        assert_eq!(host.run_for(A_SECOND * 10, &[1.0, 0.01]), Decision::default());
    }

    #[test]
    fn a_cpu_is_left_free_only_for_a_workspace_in_use() {
        let mut host = Host::new(3);
        let used = [1.0, 1.0, 0.01];
        assert_eq!(
            host.run_for(A_SECOND * 2, &used),
            Decision { background: host.ids(&[0, 1]), leave_one_cpu: false }
        );
        host.samples[2].calls_begun += 1;
        assert!(host.step(&used).leave_one_cpu);
        assert!(!host.run_for(IN_USE_FOR, &used).leave_one_cpu);
        // A single busy sandbox is slow enough in the background.
        let mut host = Host::new(2);
        host.samples[1].has_call = true;
        let decision = host.run_for(A_SECOND * 2, &[2.0, 0.0]);
        assert_eq!(decision, Decision { background: host.ids(&[0]), leave_one_cpu: false });
    }

    #[test]
    fn sandboxes_that_leave_a_cpu_free_stay_in_the_background_while_they_are_busy() {
        let mut host = Host::new(3);
        host.samples[2].has_call = true;
        host.run_for(A_SECOND * 2, &[1.0, 1.0, 0.01]);
        let confined = host.run_for(A_SECOND * 20, &[0.5, 0.5, 0.01]);
        assert_eq!(confined, Decision { background: host.ids(&[0, 1]), leave_one_cpu: true });
        assert_eq!(host.run_for(A_SECOND * 4, &[0.1, 0.1, 0.01]), Decision::default());
    }

    #[test]
    fn a_sandbox_without_cpu_time_leaves_the_background() {
        let mut host = Host::new(3);
        host.run_for(A_SECOND * 2, &[0.6, 0.7, 0.7]);
        let starved = host.run_for(A_SECOND * 3, &[0.0, 1.0, 1.0]);
        assert_eq!(starved.background, host.ids(&[1, 2]));
    }

    #[test]
    fn many_busy_sandboxes_go_to_the_background_though_each_gets_little_cpu_time() {
        let mut host = Host::new(20);
        let decision = host.run_for(A_SECOND * 20, &[0.1; 20]);
        assert_eq!(decision.background.len(), 20);
    }

    #[test]
    fn a_new_server_keeps_sandboxes_in_the_background() {
        let mut host = Host::new(2);
        host.accounts = Accounts::default();
        host.samples[0].is_background = true;
        // The first reading computes no usage.
        assert_eq!(host.step(&[0.0, 0.0]).background, host.ids(&[0]));
        assert_eq!(host.run_for(A_SECOND * 4, &[0.0, 0.0]), Decision::default());
    }

    #[test]
    fn sandboxes_are_read_at_the_start_and_while_the_host_is_busy() {
        let mut accounts = Accounts::default();
        let time = |unused, total| HostTime { cpus: CPUS, unused, total };
        assert!(accounts.needs_samples(A_SECOND, time(500, 1000)));
        accounts.decide(A_SECOND, time(500, 1000), &[]);
        assert!(!accounts.needs_samples(A_SECOND * 2, time(1000, 2000)));
        assert!(accounts.needs_samples(A_SECOND * 3, time(1010, 3000)));
    }

    #[test]
    fn proc_stat_is_parsed() {
        let text =
            "cpu  10 20 30 400 50 1 2 3 9 9\ncpu0 1 2 3 4 5 6 7 8 9 9\ncpu1 1 2 3 4 5 6 7 8 9 9\nintr 5\n";
        assert_eq!(parse_host_time(text), Some(HostTime { cpus: 2, unused: 450, total: 516 }));
        assert_eq!(parse_host_time(""), None);
    }
}
