//! The baseline: the `docker` command.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Runs `docker` with these arguments and returns its output.
pub(crate) fn docker(arguments: &[&str]) -> Result<String> {
    let output = Command::new("docker")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("docker can't be started")?;
    if !output.status.success() {
        bail!("docker {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Runs `docker` with these arguments and returns its duration and output.
pub(crate) fn timed(arguments: &[&str]) -> Result<(Duration, String)> {
    let begun = Instant::now();
    let printed = docker(arguments)?;
    Ok((begun.elapsed(), printed))
}

/// A container of the baseline; removed when dropped.
pub(crate) struct Container(pub(crate) String);

impl Drop for Container {
    fn drop(&mut self) {
        if let Err(error) = docker(&["rm", "--force", "--volumes", &self.0]) {
            eprintln!("{error:#}");
        }
    }
}

/// The limits of a container, to start one of the baseline with the same limits.
pub(crate) struct Limits {
    cpus: String,
    memory: String,
    pids: String,
    network: String,
}

impl Limits {
    /// The limits of a container.
    pub(crate) fn of(container: &str) -> Result<Self> {
        let format = "{{.HostConfig.NanoCpus}} {{.HostConfig.Memory}} {{.HostConfig.PidsLimit}} \
                      {{.HostConfig.NetworkMode}}";
        let text = docker(&["inspect", "--format", format, container])?;
        let fields: Vec<&str> = text.split(' ').collect();
        let [nano_cpus, memory, pids, network] = fields[..] else {
            bail!("docker inspect {container} printed '{text}'");
        };
        let nano_cpus: u64 = nano_cpus.parse().context("CPUs of the container")?;
        Ok(Self {
            cpus: format!("{}.{:09}", nano_cpus / 1_000_000_000, nano_cpus % 1_000_000_000),
            memory: memory.to_owned(),
            pids: pids.to_owned(),
            network: network.to_owned(),
        })
    }

    /// Starts a container with these limits on gVisor and returns the duration.
    pub(crate) fn run(&self, label: &str, image: &str) -> Result<(Duration, Container)> {
        let (took, id) = timed(&[
            "run",
            "--detach",
            "--runtime=runsc",
            "--label",
            label,
            "--network",
            &self.network,
            "--cpus",
            &self.cpus,
            "--memory",
            &self.memory,
            "--memory-swap",
            &self.memory,
            "--pids-limit",
            &self.pids,
            image,
            "sleep",
            "1000",
        ])?;
        Ok((took, Container(id)))
    }
}
