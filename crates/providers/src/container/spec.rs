//! The engine's specification of a container, from the sandbox's specification: a pure function.

use std::collections::HashMap;
use std::path::Path;

use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigLogConfig, Mount, MountType, MountVolumeOptions,
    MountVolumeOptionsDriverConfig, ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
};
use emergent_guest_protocol::{AGENT_PATH, INIT_COMMAND};
use emergent_wire::id::InstallationId;
use emergent_wire::tools::{AGENT_DIR, WORKSPACE_DIR};
use emergent_wire::workspace::NetworkMode;
use emergent_wire::{ByteSize, WorkspaceId};

use super::disk::{Disks, disk_of};
use super::guest_image::GuestVolume;
use super::{LABEL_INSTALLATION, LABEL_ROOT_LIMIT, LABEL_WORKSPACE, name_of, volume_name_of};
use crate::sandbox::SandboxSpec;

/// Mount options of a workspace's disk.
const DISK_MOUNT_OPTIONS: &str = "noatime,nosuid,nodev,noinit_itable";
/// The further option of a disk whose deleted blocks go back to the host.
const DISCARD: &str = ",discard";
/// Mount options of the guest agent's image.
const GUEST_MOUNT_OPTIONS: &str = "ro,noatime,nosuid,nodev";
/// Tasks of the guest agent, beside those of commands.
const AGENT_TASKS: u32 = 128;
/// Host threads of gVisor's kernel itself.
const GVISOR_TASKS: u32 = 512;
/// Host threads that gVisor may need for one task of the sandbox.
const GVISOR_TASKS_EACH: u32 = 4;
/// The lowest limit for files outside the volumes, also where the disk is smaller.
const LEAST_ROOT_LIMIT: ByteSize = ByteSize::mib(256);
/// The CPU weight of a sandbox. The server, the engine and other programs have 1024 and come first.
pub(crate) const CPU_SHARES: u32 = 256;
/// Capabilities that building and installing software needs. All others are dropped.
const CAPABILITIES: [&str; 9] =
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETFCAP", "NET_BIND_SERVICE"];

/// The settings of a container besides the sandbox's specification.
pub(crate) struct ContainerContext<'a> {
    pub(crate) installation: InstallationId,
    /// The engine's name of the runtime. None: its default.
    pub(crate) runtime: Option<&'a str>,
    /// The volume with the guest binaries. None: they are copied into the container.
    pub(crate) guest: Option<&'a GuestVolume>,
    /// The disks behind the volumes. None: ordinary volumes of the engine.
    pub(crate) disks: Option<&'a Disks>,
    /// The network of this installation.
    pub(crate) network: &'a str,
    /// CPUs of the engine's host.
    pub(crate) host_cpus: u32,
}

/// Labels of everything that belongs to a workspace.
pub(crate) fn labels(installation: InstallationId, id: WorkspaceId) -> HashMap<String, String> {
    HashMap::from([
        (LABEL_INSTALLATION.to_owned(), installation.to_string()),
        (LABEL_WORKSPACE.to_owned(), id.to_string()),
    ])
}

/// The container of a sandbox.
pub(crate) fn container(spec: &SandboxSpec, context: &ContainerContext<'_>) -> ContainerCreateBody {
    let labels = labels(context.installation, spec.id);
    let mut own_labels = labels.clone();
    own_labels.insert(LABEL_ROOT_LIMIT.to_owned(), root_limit(spec).to_string());
    let memory = i64::try_from(spec.limits.memory.bytes()).unwrap_or(i64::MAX);
    let millis = spec.limits.cpu.millis().min(context.host_cpus.saturating_mul(1000));
    let host = HostConfig {
        runtime: context.runtime.map(str::to_owned),
        nano_cpus: Some(i64::from(millis) * 1_000_000),
        memory: Some(memory),
        // Equal to memory: no swap.
        memory_swap: Some(memory),
        cpu_shares: Some(i64::from(CPU_SHARES)),
        pids_limit: Some(i64::from(host_tasks(spec.max_tasks, context.runtime.is_some()))),
        security_opt: Some(vec!["no-new-privileges".to_owned()]),
        cap_drop: Some(vec!["ALL".to_owned()]),
        cap_add: Some(CAPABILITIES.iter().map(|name| (*name).to_owned()).collect()),
        mounts: Some(mounts(spec, &labels, context)),
        network_mode: Some(match spec.network {
            NetworkMode::Nat => context.network.to_owned(),
            NetworkMode::Isolated => "none".to_owned(),
        }),
        // Standard output is the channel and must not go to the engine's logs.
        log_config: Some(HostConfigLogConfig { typ: Some("none".to_owned()), config: None }),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        // On gVisor all of the agent's stack is resident, so it is small. The agent's children get the usual size.
        ulimits: context.runtime.map(|_| vec![small_stack()]),
        ..HostConfig::default()
    };
    ContainerCreateBody {
        image: Some(spec.image.clone()),
        hostname: Some("workspace".to_owned()),
        user: Some("0:0".to_owned()),
        working_dir: Some(WORKSPACE_DIR.to_owned()),
        entrypoint: Some(vec![AGENT_PATH.to_owned()]),
        cmd: Some(vec![INIT_COMMAND.to_owned()]),
        open_stdin: Some(true),
        // When the server is gone, the agent must see the end of the channel.
        stdin_once: Some(true),
        attach_stdin: Some(true),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        labels: Some(own_labels),
        host_config: Some(host),
        ..ContainerCreateBody::default()
    }
}

/// The container without a disk and with other labels, for a probe.
pub(crate) fn without_disk(
    spec: &SandboxSpec,
    context: &ContainerContext<'_>,
    labels: HashMap<String, String>,
) -> ContainerCreateBody {
    let mut body = container(spec, context);
    body.labels = Some(labels);
    let guest = context.guest.map(|guest| guest_volume(guest, context.installation));
    if let Some(host) = &mut body.host_config {
        host.mounts = Some(guest.into_iter().collect());
    }
    body
}

/// The limit for files outside the volumes: the size of the disk, and at least enough to install software.
fn root_limit(spec: &SandboxSpec) -> u64 {
    spec.limits.disk.max(LEAST_ROOT_LIMIT).bytes()
}

/// The limit of host tasks of a container. It applies if the limit inside the sandbox fails.
fn host_tasks(max_tasks: u32, is_gvisor: bool) -> u32 {
    let most = max_tasks.saturating_add(AGENT_TASKS);
    if is_gvisor { most.saturating_mul(GVISOR_TASKS_EACH).saturating_add(GVISOR_TASKS) } else { most }
}

fn small_stack() -> ResourcesUlimits {
    ResourcesUlimits { name: Some("stack".to_owned()), soft: Some(128 << 10), hard: Some(-1) }
}

fn mounts(
    spec: &SandboxSpec,
    labels: &HashMap<String, String>,
    context: &ContainerContext<'_>,
) -> Vec<Mount> {
    let volume = |name: String, target: &str, disk: &str| {
        let device = context.disks.map(|disks| (disks.device(disk), disk_mount_options(disks)));
        let device = device.as_ref().map(|(path, options)| (path.as_path(), options.as_str()));
        volume_with_options(name, target, device, labels)
    };
    let own = volume(name_of(spec.id), WORKSPACE_DIR, &disk_of(spec.id, None));
    let named = spec.volumes.iter().map(|named| {
        let disk = disk_of(spec.id, Some(&named.name));
        volume(volume_name_of(spec.id, &named.name), &named.path, &disk)
    });
    let guest = context.guest.map(|guest| guest_volume(guest, context.installation));
    std::iter::once(own).chain(named).chain(guest).collect()
}

/// The volume with the guest binaries, for all containers of the installation. The engine mounts it read-only, so the host
/// refuses writes; a read-only flag inside the sandbox could be cleared there.
fn guest_volume(guest: &GuestVolume, installation: InstallationId) -> Mount {
    let labels = HashMap::from([(LABEL_INSTALLATION.to_owned(), installation.to_string())]);
    let mount = volume_with_options(
        guest.name.clone(),
        AGENT_DIR,
        Some((&guest.device, GUEST_MOUNT_OPTIONS)),
        &labels,
    );
    Mount { read_only: Some(true), ..mount }
}

/// Mount options of disks. A disk with reserved bytes keeps them; the others give deleted blocks back to the host.
fn disk_mount_options(disks: &Disks) -> String {
    let discard = if disks.are_reserved() { "" } else { DISCARD };
    format!("{DISK_MOUNT_OPTIONS}{discard}")
}

/// A volume on a device of its own, or an ordinary one.
fn volume_with_options(
    name: String,
    target: &str,
    device: Option<(&Path, &str)>,
    labels: &HashMap<String, String>,
) -> Mount {
    let driver = device.map(|(device, options)| MountVolumeOptionsDriverConfig {
        name: Some("local".to_owned()),
        options: Some(HashMap::from([
            ("type".to_owned(), "ext4".to_owned()),
            ("device".to_owned(), device.to_string_lossy().into_owned()),
            ("o".to_owned(), options.to_owned()),
        ])),
    });
    Mount {
        typ: Some(MountType::VOLUME),
        source: Some(name),
        target: Some(target.to_owned()),
        volume_options: Some(MountVolumeOptions {
            no_copy: Some(true),
            labels: Some(labels.clone()),
            driver_config: driver,
            subpath: None,
        }),
        ..Mount::default()
    }
}

#[cfg(test)]
mod tests {
    use emergent_guest_protocol::Configuration;
    use emergent_wire::workspace::{ContainerType, ResourceLimits};

    use super::*;

    fn spec(limits: ResourceLimits, network: NetworkMode) -> SandboxSpec {
        SandboxSpec {
            id: WorkspaceId::generate(),
            container_type: ContainerType::AgentWorkspace,
            image: "image".to_owned(),
            limits,
            max_tasks: 512,
            network,
            snapshot: None,
            volumes: Vec::new(),
            configuration: Some(Configuration {
                environment: [("SECRET".to_owned(), "hunter2".to_owned())].into(),
                ..Configuration::default()
            }),
        }
    }

    fn context(installation: InstallationId) -> ContainerContext<'static> {
        ContainerContext {
            installation,
            runtime: Some("runsc"),
            guest: None,
            disks: None,
            network: "net",
            host_cpus: 2,
        }
    }

    #[test]
    fn limits_and_hardening_are_as_documented() {
        let installation = InstallationId::generate();
        let limits = ResourceLimits { cpu: "0.5".parse().unwrap(), ..ResourceLimits::default() };
        let spec = spec(limits, NetworkMode::Nat);
        let body = container(&spec, &context(installation));
        let host = body.host_config.unwrap();
        assert_eq!(host.nano_cpus, Some(500_000_000));
        assert_eq!((host.memory, host.memory_swap), (Some(4 << 30), Some(4 << 30)));
        assert_eq!(host.cap_drop, Some(vec!["ALL".to_owned()]));
        assert!(
            host.cap_add.unwrap().iter().all(|cap| cap != "SYS_ADMIN" && cap != "NET_RAW" && cap != "MKNOD")
        );
        assert_eq!(host.security_opt, Some(vec!["no-new-privileges".to_owned()]));
        assert_eq!(host.runtime.as_deref(), Some("runsc"));
        assert!(host.pids_limit.unwrap() > 64);
        assert_eq!(host.privileged, None);
        let labels = body.labels.unwrap();
        assert_eq!(labels[LABEL_INSTALLATION], installation.to_string());
        assert_eq!(labels[LABEL_WORKSPACE], spec.id.to_string());
    }

    #[test]
    fn variables_are_not_in_the_containers_settings() {
        let body = container(
            &spec(ResourceLimits::default(), NetworkMode::Nat),
            &context(InstallationId::generate()),
        );
        assert!(!serde_json::to_string(&body).unwrap().contains("hunter2"));
    }

    #[test]
    fn isolated_containers_have_no_network_and_cpu_limits_stop_at_the_hosts_cpus() {
        let limits = ResourceLimits { cpu: "8".parse().unwrap(), ..ResourceLimits::default() };
        let body = container(&spec(limits, NetworkMode::Isolated), &context(InstallationId::generate()));
        let host = body.host_config.unwrap();
        assert_eq!(host.network_mode.as_deref(), Some("none"));
        assert_eq!(host.nano_cpus, Some(2_000_000_000));
    }
}
