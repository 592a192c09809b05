//! The processes of a container on the host. They are killed directly when the engine does not end them.

use std::io;

use emergent_host::control_group::ControlGroup;
use emergent_host::cpu_group::CpuGroup;
use emergent_host::processes;
use procfs::process::Process;
use rustix::process::{Pid, Signal, kill_process};

use super::spec::CPU_SHARES;

/// The processes of a running container.
#[derive(Clone, Debug)]
pub(crate) struct ContainerProcesses {
    pub(crate) group: ControlGroup,
    /// None where the kernel or the server's rights do not allow a change of CPU settings.
    pub(crate) cpu: Option<CpuGroup>,
    pub(crate) shim: Option<Shim>,
}

/// The engine's helper process for one container, which is the parent of the container's first process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shim {
    pid: i32,
    container: String,
}

impl ContainerProcesses {
    /// The processes of the container with this first process. None: it has no control group of its own.
    pub(crate) fn of(pid: i32, container: &str) -> Option<Self> {
        let group = ControlGroup::of(pid, container)?;
        let stat = processes::stat(pid).ok().flatten();
        let parent = stat.map(|stat| Shim { pid: stat.ppid, container: container.to_owned() });
        let cpu = CpuGroup::of(pid, container, CPU_SHARES);
        Some(Self { group, cpu, shim: parent.filter(Shim::is_there) })
    }

    /// Kills all of them. Ending takes CPU time, so a sandbox at background priority gets its normal priority first.
    pub(crate) fn kill(&self) -> io::Result<()> {
        if let Some(cpu) = &self.cpu {
            let _ = cpu.set_background(false, false);
        }
        self.group.kill()
    }
}

impl Shim {
    /// Whether the process is this container's shim. The kernel may have given the number to another process.
    fn is_there(&self) -> bool {
        let arguments = Process::new(self.pid).and_then(|process| process.cmdline()).unwrap_or_default();
        let is_shim = arguments.first().is_some_and(|program| program.contains("containerd-shim"));
        is_shim && arguments[1..].contains(&self.container)
    }

    /// Kills the shim. The engine then takes the container as ended.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match Pid::from_raw(self.pid) {
            Some(pid) if self.is_there() => Ok(kill_process(pid, Signal::KILL)?),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_shim_is_killed() {
        let own = Shim { pid: std::process::id().cast_signed(), container: String::new() };
        assert!(!own.is_there());
        assert!(own.kill().is_ok());
    }
}
