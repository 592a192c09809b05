//! Keeps short calls fast on a host whose CPUs are all busy: sandboxes that use much CPU time run at background priority.
//!
//! Each sandbox has a credit of CPU seconds. The credit grows with time and with each new call; CPU time that the sandbox uses
//! is subtracted. While the host's CPUs are busy, a sandbox with a negative credit is in the background: it gets only CPU time
//! that no other process wants. So a build, a fork bomb or an endless loop is in the background within a few seconds (the credit
//! is bounded), and a workspace that only answers short calls is not. If all sandboxes are busy, all are in the background and share
//! the CPUs equally. The credit grows in the background, too: a sandbox that gets no CPU time at all leaves the background after two
//! seconds (later where many sandboxes are busy), so none starves.
//!
//! While two or more sandboxes are in the background and another workspace is in use, those in the background also leave one
//! CPU free ([`CpuGroup`] says why).
//!
//! Sandboxes of hosted MCP servers are left out: their requests are not counted as calls, so a server under load would look like
//! a busy loop. Their CPU limits bound them.
//!
//! Credits are lost when the server ends. The priority is kept in the kernel's files, where the next server finds it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use emergent_host::cpu_group::CpuGroup;
use emergent_wire::WorkspaceId;

use super::context::Context;
use super::live::Live;

/// How often the host's load is read, and while it is high, each sandbox's CPU time.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_millis(250);
/// The CPUs are busy when less than this part of their time is unused.
const UNUSED_WHEN_BUSY: f64 = 0.1;
/// They are no longer busy when the sandboxes use less than this part of what they may use …
const USED_WHEN_CALM: f64 = 0.75;
/// … for this long.
const CALM_FOR: Duration = Duration::from_secs(2);
/// CPUs that a sandbox may use for ever without being overdrawn, where only a few sandboxes use CPU time.
const MOST_EARNED: f64 = 0.25;
/// A sandbox counts among those that use CPU time from this many CPUs on; on gVisor an idle one uses less.
const ACTIVE_FROM: f64 = 0.03;
/// CPU seconds that each call adds to the account of its workspace: several times as many as a short command takes, and few enough
/// that a sandbox whose calls all begin busy loops is soon overdrawn.
const EARNED_BY_A_CALL: f64 = 0.1;
/// What an account holds at first: a sandbox may start something.
const FIRST_CREDIT: f64 = 0.5;
/// What an account can hold at most.
const MOST_SAVED: f64 = 5.0;
/// How far it can be overdrawn: a sandbox that uses nothing is out of debt after two seconds, or later where many are busy.
const MOST_OWED: f64 = 0.5;
/// A workspace is in use for this long after its last call.
const IN_USE_FOR: Duration = Duration::from_secs(10);

/// One reading of a sandbox.
#[derive(Clone, Copy, Debug)]
struct Sample {
    id: WorkspaceId,
    /// All CPU time that it has ever used.
    used: Duration,
    /// Calls that were ever begun in it.
    calls_begun: u64,
    /// Whether a call is in progress.
    has_call: bool,
    /// Whether the kernel has it in the background: it matters for sandboxes that are new here.
    is_background: bool,
}

/// CPU time of the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HostTime {
    cpus: usize,
    /// Ticks in which a CPU had nothing to do.
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

/// Which sandboxes shall run in the background.
#[derive(Debug, Default, PartialEq, Eq)]
struct Decision {
    /// Sandboxes that shall be in the background; all others shall not.
    background: Vec<WorkspaceId>,
    /// Whether these leave one CPU free.
    leave_one_cpu: bool,
}

/// The accounts of all sandboxes. Pure: time and readings are arguments.
#[derive(Debug, Default)]
struct Accounts {
    accounts: HashMap<WorkspaceId, Account>,
    at: Duration,
    host: HostTime,
    is_busy: bool,
    leave_one_cpu: bool,
    /// Since when the sandboxes have used less than they may.
    calm_since: Option<Duration>,
}

impl Accounts {
    /// Whether sandboxes need to be read: the host is busy, or some may be in the background. Else the accounts are dropped.
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
        self.note_load(now, is_saturated, host.cpus, used.iter().sum::<f64>() / seconds.max(f64::EPSILON));
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

    /// CPU seconds that a sandbox has used since the last reading.
    fn used_since(&self, sample: &Sample) -> f64 {
        let before = self.accounts.get(&sample.id).map_or(sample.used, |account| account.used);
        sample.used.saturating_sub(before).as_secs_f64()
    }

    fn settle(&mut self, now: Duration, seconds: f64, cpus: usize, samples: &[Sample], used: &[f64]) {
        let active = used.iter().filter(|used| **used > ACTIVE_FROM * seconds).count().max(1);
        #[allow(clippy::cast_precision_loss, reason = "small numbers")]
        let earned = MOST_EARNED.min(MOST_EARNED * cpus as f64 / active as f64) * seconds;
        for (sample, used) in samples.iter().zip(used) {
            let account = self.accounts.entry(sample.id).or_insert(Account {
                used: sample.used,
                calls_begun: sample.calls_begun,
                last_call: None,
                credit: if sample.is_background { -MOST_OWED } else { FIRST_CREDIT },
                background: sample.is_background,
            });
            // A server that finds a sandbox in the background takes over where the one before it ended.
            self.is_busy |= sample.is_background && account.background;
            let calls = sample.calls_begun.saturating_sub(account.calls_begun);
            if calls > 0 || sample.has_call {
                account.last_call = Some(now);
            }
            #[allow(clippy::cast_precision_loss, reason = "small numbers")]
            let by_calls = calls as f64 * EARNED_BY_A_CALL;
            account.credit = (account.credit + by_calls + earned - used).clamp(-MOST_OWED, MOST_SAVED);
            account.used = sample.used;
            account.calls_begun = sample.calls_begun;
        }
    }

    /// Decides whether the CPUs are busy. The host's counters show when they become so. While sandboxes leave a CPU free, these
    /// counters always show unused time, so the end is seen from what the sandboxes use of what they may use.
    fn note_load(&mut self, now: Duration, is_saturated: bool, cpus: usize, used_cpus: f64) {
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
    begun: Instant,
}

impl CpuFairness {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context), accounts: Mutex::default(), begun: Instant::now() })
    }

    /// Puts busy sandboxes into the background while the host's CPUs are busy, and takes them back.
    pub(crate) async fn share_cpus(self: &Arc<Self>) {
        let fairness = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || {
            let mut accounts = fairness.accounts.lock().unwrap_or_else(PoisonError::into_inner);
            let now = fairness.begun.elapsed();
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

    /// The sandboxes on this host that are not those of MCP servers.
    fn workspace_cpu_groups(&self) -> Vec<Group> {
        let groups = self.context.providers.iter().flat_map(|provider| provider.cpu_groups());
        let live = self.context.live_map();
        let groups = groups.map(|(id, cpu)| Group { id, cpu, live: live.get(&id).cloned() });
        groups.filter(|group| !group.live.as_ref().is_some_and(|live| live.hosts_mcp_server())).collect()
    }
}

/// A sandbox on this host.
struct Group {
    id: WorkspaceId,
    cpu: CpuGroup,
    /// None before the first call since the server's start.
    live: Option<Arc<Live>>,
}

/// Reads a sandbox; none once it is gone.
fn sample(group: &Group) -> Option<Sample> {
    let (calls_begun, calls) = group.live.as_ref().map_or((0, 0), |live| live.call_counts());
    let (used, is_background) = (group.cpu.used()?, group.cpu.is_background());
    Some(Sample { id: group.id, used, calls_begun, has_call: calls > 0, is_background })
}

/// Writes a decision to the kernel's files. A group that is gone needs nothing.
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
    // user, nice, system, idle, iowait, irq, softirq, steal; what follows is counted in user already.
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

    /// A host whose sandboxes use this much CPU between two readings.
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

        /// One reading later; each sandbox has used this many CPUs.
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
    fn busy_sandboxes_go_to_the_background_and_one_with_short_calls_does_not() {
        let mut host = Host::new(4);
        let mut decision = Decision::default();
        for _ in 0..40 {
            // Calls back to back: as much CPU time as a loop.
            host.samples[3].calls_begun += 10;
            decision = host.step(&[0.5, 0.5, 0.5, 0.5]);
        }
        assert_eq!(decision, Decision { background: host.ids(&[0, 1, 2]), leave_one_cpu: true });
    }

    #[test]
    fn a_sandbox_that_begins_a_new_busy_loop_each_second_is_in_the_background() {
        let mut host = Host::new(3);
        let mut in_background = 0;
        for step in 0..40 {
            // A bomb that is ended, and begun again by the next call.
            host.samples[0].calls_begun += u64::from(step % 4 == 0);
            let decision = host.step(&[0.7, 0.6, 0.6]);
            in_background += usize::from(decision.background.contains(&host.samples[0].id));
        }
        assert!(in_background > 30, "{in_background} of 40");
    }

    #[test]
    fn nothing_is_put_into_the_background_while_a_cpu_is_unused() {
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
    fn a_sandbox_that_gets_no_cpu_time_is_taken_back() {
        let mut host = Host::new(3);
        host.run_for(A_SECOND * 2, &[0.6, 0.7, 0.7]);
        let starved = host.run_for(A_SECOND * 3, &[0.0, 1.0, 1.0]);
        assert_eq!(starved.background, host.ids(&[1, 2]));
    }

    #[test]
    fn many_busy_sandboxes_are_found_though_each_gets_little() {
        let mut host = Host::new(20);
        let decision = host.run_for(A_SECOND * 20, &[0.1; 20]);
        assert_eq!(decision.background.len(), 20);
    }

    #[test]
    fn a_new_server_takes_over_sandboxes_in_the_background() {
        let mut host = Host::new(2);
        host.accounts = Accounts::default();
        host.samples[0].is_background = true;
        // The first reading has no earlier one to subtract.
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
    fn the_hosts_cpu_time_is_read() {
        let text =
            "cpu  10 20 30 400 50 1 2 3 9 9\ncpu0 1 2 3 4 5 6 7 8 9 9\ncpu1 1 2 3 4 5 6 7 8 9 9\nintr 5\n";
        assert_eq!(parse_host_time(text), Some(HostTime { cpus: 2, unused: 450, total: 516 }));
        assert_eq!(parse_host_time(""), None);
    }
}
