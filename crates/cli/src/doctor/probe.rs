//! The probe of gVisor: starts one container twice and removes it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bollard::Docker;
use bollard::errors::Error;
use bollard::models::{ContainerCreateBody, HostConfig, HostConfigLogConfig};
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, ListContainersOptionsBuilder, LogsOptionsBuilder,
    RemoveContainerOptionsBuilder,
};
use emergent_wire::error::with_causes;
use futures_util::StreamExt;

/// The label of the doctor's containers.
const LABEL: &str = "emergent.doctor";
/// The time limit for both starts.
const LIMIT: Duration = Duration::from_secs(90);
/// The time limit for removing the container.
const REMOVE: Duration = Duration::from_secs(30);
/// A container of this age belongs to a doctor that was killed. A doctor that still runs has a younger one.
const STALE_SECONDS: i64 = 600;
/// The size limit of the container's output.
const MAX_OUTPUT_BYTES: usize = 64 << 10;
/// Prints the version of the kernel, and at the second start whether a file outside of volumes was kept.
const SCRIPT: &str =
    "cat /proc/version; if [ -e /emergent-doctor ]; then echo kept; else : >/emergent-doctor; fi";

/// The result of the probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Probe {
    /// The content of the container's `/proc/version`.
    pub(super) kernel: String,
    /// Whether files of the root filesystem survived a stop.
    pub(super) keeps_files: bool,
    /// The duration of create and first start.
    pub(super) start_ms: u128,
}

/// Runs the container on the runtime `runsc`, and removes it in every case.
pub(super) async fn run(docker: &Docker, image: &str, name: &str) -> Result<Probe, String> {
    remove_stale(docker).await;
    let probe = match tokio::time::timeout(LIMIT, start_twice(docker, image, name)).await {
        Ok(probe) => probe.map_err(|error| with_causes(&error)),
        Err(_) => Err(format!("the container did not start and end within {} s", LIMIT.as_secs())),
    };
    remove(docker, name).await;
    probe
}

async fn start_twice(docker: &Docker, image: &str, name: &str) -> Result<Probe, Error> {
    let body = ContainerCreateBody {
        image: Some(image.to_owned()),
        entrypoint: Some(vec!["/bin/sh".to_owned(), "-c".to_owned(), SCRIPT.to_owned()]),
        cmd: Some(Vec::new()),
        labels: Some(HashMap::from([(LABEL.to_owned(), "1".to_owned())])),
        host_config: Some(HostConfig {
            runtime: Some("runsc".to_owned()),
            memory: Some(256 << 20),
            cap_drop: Some(vec!["ALL".to_owned()]),
            security_opt: Some(vec!["no-new-privileges".to_owned()]),
            log_config: Some(HostConfigLogConfig { typ: Some("json-file".to_owned()), config: None }),
            ..HostConfig::default()
        }),
        ..ContainerCreateBody::default()
    };
    let options = CreateContainerOptionsBuilder::new().name(name).build();
    let started = Instant::now();
    docker.create_container(Some(options), body).await?;
    docker.start_container(name, None).await?;
    let start_ms = started.elapsed().as_millis();
    wait(docker, name).await?;
    docker.start_container(name, None).await?;
    wait(docker, name).await?;
    let output = logs(docker, name).await?;
    let kernel = output.lines().next().unwrap_or_default().to_owned();
    let keeps_files = output.lines().any(|line| line == "kept");
    Ok(Probe { kernel, keeps_files, start_ms })
}

async fn wait(docker: &Docker, name: &str) -> Result<(), Error> {
    // bollard returns an error for an exit code other than 0.
    let ended = std::pin::pin!(docker.wait_container(name, None)).next().await;
    match ended {
        Some(Err(error)) => Err(error),
        Some(Ok(_)) | None => Ok(()),
    }
}

async fn logs(docker: &Docker, name: &str) -> Result<String, Error> {
    let options = LogsOptionsBuilder::new().stdout(true).stderr(true).build();
    let mut output = String::new();
    let mut lines = std::pin::pin!(docker.logs(name, Some(options)));
    while let Some(line) = lines.next().await {
        output.push_str(&String::from_utf8_lossy(&line?.into_bytes()));
        if output.len() > MAX_OUTPUT_BYTES {
            break;
        }
    }
    Ok(output)
}

/// Removes a container, running or not, if it exists.
pub(super) async fn remove(docker: &Docker, name: &str) {
    let options = RemoveContainerOptionsBuilder::new().force(true).v(true).build();
    // After a failure the next run removes it as a stale one.
    let _ = tokio::time::timeout(REMOVE, docker.remove_container(name, Some(options))).await;
}

/// Removes the containers of doctors that were killed.
async fn remove_stale(docker: &Docker) {
    let filters = HashMap::from([("label".to_owned(), vec![LABEL.to_owned()])]);
    let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
    let listed = tokio::time::timeout(REMOVE, docker.list_containers(Some(options))).await;
    let Ok(Ok(containers)) = listed else { return };
    let oldest_alive = chrono::Utc::now().timestamp() - STALE_SECONDS;
    for container in containers {
        if let (Some(id), Some(created)) = (container.id, container.created)
            && created < oldest_alive
        {
            remove(docker, &id).await;
        }
    }
}
