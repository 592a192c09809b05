//! The agent's state: one for the whole sandbox, shared by all channels.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use emergent_guest_protocol::Configuration;
use emergent_guest_tools::Context;
use emergent_wire::tools::WORKSPACE_DIR;
use rustix::process::Signal;

use crate::activity::Activity;
use crate::background::Operations;
use crate::command::Drain;
use crate::memory::MemoryGuard;
use crate::procfs;
use crate::reaper::Reaper;
use crate::search::Searches;
use crate::shell::Shells;
use crate::workers::{self, Workers};
use crate::{disk, family, log, machine};

/// The time between SIGTERM and SIGKILL when the sandbox is stopped.
const STOP_GRACE: Duration = Duration::from_secs(8);

/// The state of the agent.
pub(crate) struct Agent {
    /// New each time the agent starts or its machine gets another identity.
    boot_id: Mutex<String>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) reaper: Arc<Reaper>,
    pub(crate) shells: Shells,
    pub(crate) searches: Searches,
    pub(crate) operations: Operations,
    pub(crate) activity: Activity,
    pub(crate) memory: MemoryGuard,
    pub(crate) drain: Drain,
    pub(crate) disk: disk::Watch,
    /// The variables of a virtual machine's image, which the manager sends. In a container the agent inherits them.
    image_environment: RwLock<BTreeMap<String, String>>,
    configuration: RwLock<Arc<Configuration>>,
    stopping: Mutex<()>,
}

impl Agent {
    /// Starts the agent's threads: reaper, memory guard, task guard.
    pub(crate) fn start() -> Arc<Self> {
        let agent = Arc::new(Self {
            boot_id: Mutex::new(new_boot_id()),
            image_environment: RwLock::default(),
            workers: Arc::default(),
            reaper: Arc::default(),
            shells: Shells::default(),
            searches: Searches::default(),
            operations: Operations::default(),
            activity: Activity::default(),
            memory: MemoryGuard::default(),
            drain: Drain::default(),
            disk: disk::Watch::default(),
            configuration: RwLock::default(),
            stopping: Mutex::default(),
        });
        let _ = std::fs::create_dir_all(WORKSPACE_DIR);
        // A new ext4 disk has this directory; `git clone` and others need an empty workspace.
        let _ = std::fs::remove_dir(std::path::Path::new(WORKSPACE_DIR).join("lost+found"));
        let reaper = Arc::clone(&agent.reaper);
        workers::spawn_thread("reaper", move || reaper.run());
        let guarded = Arc::clone(&agent);
        workers::spawn_thread("memory", move || guarded.memory.run(&guarded));
        let guarded = Arc::clone(&agent);
        workers::spawn_thread("tasks", move || guarded.reaper.tasks.run(&guarded));
        agent
    }

    pub(crate) fn boot_id(&self) -> String {
        self.boot_id.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The machine has another identity: the processes that were started ahead are discarded.
    pub(crate) fn reset_for_new_identity(&self, image_environment: BTreeMap<String, String>) {
        *self.boot_id.lock().unwrap_or_else(PoisonError::into_inner) = new_boot_id();
        *self.image_environment.write().unwrap_or_else(PoisonError::into_inner) = image_environment;
        self.shells.discard();
        self.searches.discard();
    }

    pub(crate) fn configuration(&self) -> Arc<Configuration> {
        Arc::clone(&self.configuration.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Binds the sandbox to its workspace.
    pub(crate) fn configure(self: &Arc<Self>, configuration: Configuration) {
        if configuration.nameservers != self.configuration().nameservers {
            write_nameservers(&configuration.nameservers);
        }
        self.reaper.tasks.limit(configuration.max_tasks);
        let changed = {
            let mut current = self.configuration.write().unwrap_or_else(PoisonError::into_inner);
            let changed = current.environment != configuration.environment;
            *current = Arc::new(configuration);
            changed
        };
        if changed {
            self.shells.discard();
        }
        self.disk.begin(self);
        if !self.configuration().without_shells {
            self.shells.refill(self);
        }
    }

    /// The directories of the file tools.
    pub(crate) fn context(&self) -> Context {
        let configuration = self.configuration();
        let roots: Vec<_> = configuration.confined_to.iter().map(Into::into).collect();
        Context { workspace_dir: WORKSPACE_DIR.into(), confined_to: (!roots.is_empty()).then_some(roots) }
    }

    /// The ids of the workspace's processes: without the agent, processes from outside, and idle processes started ahead.
    pub(crate) fn processes(&self) -> Vec<i32> {
        self.shells.look(|mut idle| {
            idle.extend(self.searches.waiting());
            idle.push(std::process::id().cast_signed());
            let others = procfs::process_ids().filter(|pid| !idle.contains(pid));
            others.filter(|pid| procfs::process(*pid).is_some_and(|found| !found.is_from_outside())).collect()
        })
    }

    /// The variables of a command: the image's, defaults, the workspace's.
    pub(crate) fn environment(&self) -> BTreeMap<String, String> {
        let mut environment: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|_| !machine::is_machine())
            .collect();
        environment.extend(self.image_environment.read().unwrap_or_else(PoisonError::into_inner).clone());
        let mut default = |name: &str, value: &str| {
            environment.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        };
        default("HOME", "/root");
        default("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        default("LANG", "C.UTF-8");
        default("USER", "root");
        default("HOSTNAME", &rustix::system::uname().nodename().to_string_lossy());
        // git looks for a repository in parent directories also across the mount of /workspace.
        default("GIT_DISCOVERY_ACROSS_FILESYSTEM", "1");
        environment.extend(self.configuration().environment.clone());
        environment
    }

    /// Waits for SIGTERM or SIGINT, then ends all processes.
    pub(crate) fn run_until_signalled(&self) {
        wait_for_stop_signal();
        self.end_processes(STOP_GRACE);
    }

    /// SIGTERM to every process, SIGKILL to those that are left after `grace`; then the disk is flushed.
    pub(crate) fn end_processes(&self, grace: Duration) {
        let _one_at_a_time = self.stopping.lock().unwrap_or_else(PoisonError::into_inner);
        self.shells.close();
        self.searches.discard();
        let deadline = Instant::now() + grace;
        family::signal(&others(), Signal::TERM);
        while Instant::now() < deadline && !others().is_empty() {
            // The reaper collects the processes; nothing signals that the last one has ended.
            std::thread::sleep(Duration::from_millis(20));
        }
        if !others().is_empty() {
            log("processes that ignored SIGTERM are killed");
            family::kill_all(others);
        }
        rustix::fs::sync();
        self.shells.open();
    }
}

/// The sandbox's other processes. None when the agent is not PID 1: the processes are not the sandbox's then.
fn others() -> Vec<i32> {
    if std::process::id() != 1 {
        return Vec::new();
    }
    let processes = procfs::processes();
    processes.iter().filter(|process| !process.is_from_outside()).map(|process| process.pid).collect()
}

/// Blocks until the sandbox is asked to stop.
fn wait_for_stop_signal() {
    // SAFETY: the set lives on this stack; sigwait only reads it and writes the signal number.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        let mut signal = 0;
        libc::sigwait(&raw const set, &raw mut signal);
    }
}

/// Blocks the stop signals in this and all later threads, so that only [`wait_for_stop_signal`] gets them.
pub(crate) fn block_stop_signals() {
    // SAFETY: as above; called before any other thread exists.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

fn new_boot_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

pub(crate) fn write_nameservers(nameservers: &[String]) {
    if nameservers.is_empty() {
        return;
    }
    let text: String = nameservers.iter().map(|server| format!("nameserver {server}\n")).collect();
    if let Err(error) = std::fs::write("/etc/resolv.conf", text) {
        log(&format!("can't write /etc/resolv.conf: {error}"));
    }
}
