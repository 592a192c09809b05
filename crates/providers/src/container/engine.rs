//! The Docker engine: a connection and the calls that the providers need. Each call has a time limit.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bollard::errors::Error as BollardError;
use bollard::models::{
    ContainerCreateBody, ContainerInspectResponse, ContainerSummary, ContainerSummaryStateEnum, ImageConfig,
    SystemInfo, Volume,
};
use bollard::query_parameters::{
    AttachContainerOptionsBuilder, CreateContainerOptionsBuilder, ListContainersOptionsBuilder,
    ListVolumesOptionsBuilder, RemoveContainerOptionsBuilder, StopContainerOptionsBuilder,
    WaitContainerOptionsBuilder,
};
use bollard::{API_DEFAULT_VERSION, Docker};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::sync::OnceCell;

use super::engine_error::{EngineError, ignore_not_found};
use super::stream::Attached;

/// The variable with the engine's address. Without it the engine listens at the usual socket.
const DOCKER_HOST_VARIABLE: &str = "DOCKER_HOST";
/// Time limit of questions.
pub(super) const ASK: Duration = Duration::from_secs(15);
/// Time limit of calls that start or stop something.
pub(super) const ACT: Duration = Duration::from_secs(90);

/// A connection to the engine. Clones share it.
#[derive(Clone)]
pub(crate) struct Engine {
    /// The connection before the version of the API is negotiated.
    unversioned: Docker,
    /// The connection that speaks the newest version that both sides know.
    docker: Arc<OnceCell<Docker>>,
}

pub(super) async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, BollardError>>,
) -> Result<T, EngineError> {
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result.map_err(EngineError::from),
        Err(_) => Err(EngineError::TimedOut(limit.as_secs())),
    }
}

/// A container in a list.
#[derive(Clone, Debug)]
pub(crate) struct ContainerEntry {
    pub(crate) name: String,
    pub(crate) labels: HashMap<String, String>,
    /// A paused container runs, too.
    pub(crate) is_running: bool,
    pub(crate) created: SystemTime,
    /// The paths on the host that it mounts.
    pub(crate) mount_sources: Vec<String>,
}

impl Engine {
    /// A connection to the engine at `host`, else at `DOCKER_HOST`, else at the usual socket. Does not connect yet.
    pub(crate) fn open(host: Option<&str>) -> Result<Self, EngineError> {
        let variable = std::env::var(DOCKER_HOST_VARIABLE).ok().filter(|host| !host.is_empty());
        let host = host.map(str::to_owned).or(variable);
        let seconds = ACT.as_secs();
        let docker = match host.as_deref() {
            None => Docker::connect_with_unix("/var/run/docker.sock", seconds, API_DEFAULT_VERSION),
            Some(host) if host.starts_with("unix://") => {
                Docker::connect_with_unix(host.trim_start_matches("unix://"), seconds, API_DEFAULT_VERSION)
            }
            Some(host) if host.starts_with("tcp://") || host.starts_with("http://") => {
                Docker::connect_with_http(host, seconds, API_DEFAULT_VERSION)
            }
            Some(host) => {
                return Err(EngineError::Refused(format!("'{host}' is not a unix:// or tcp:// address")));
            }
        };
        Ok(Self { unversioned: docker?.with_timeout(ACT), docker: Arc::default() })
    }

    /// The connection, after negotiation.
    pub(crate) async fn docker(&self) -> Result<&Docker, EngineError> {
        let negotiate = || within(ASK, self.unversioned.clone().negotiate_version());
        self.docker.get_or_try_init(negotiate).await
    }

    /// Checks that the engine answers. A hung engine accepts requests, and a long one would wait for [`ACT`].
    pub(crate) async fn check_answers(&self) -> Result<(), EngineError> {
        within(ASK, self.docker().await?.ping()).await.map(drop)
    }

    /// The engine's description of itself and its host.
    pub(crate) async fn info(&self) -> Result<SystemInfo, EngineError> {
        within(ASK, self.docker().await?.info()).await
    }

    /// Whether the engine has an OCI runtime of this name.
    pub(crate) async fn has_runtime(&self, name: &str) -> Result<bool, EngineError> {
        Ok(has_runtime(&self.info().await?, name))
    }

    /// The digest of an image.
    pub(crate) async fn image_id(&self, image: &str) -> Result<String, EngineError> {
        let found = within(ASK, self.docker().await?.inspect_image(image)).await?;
        found.id.ok_or_else(|| EngineError::Other(format!("the image {image} has no id")))
    }

    /// The settings of an image.
    pub(crate) async fn image_config(&self, image: &str) -> Result<ImageConfig, EngineError> {
        let found = within(ASK, self.docker().await?.inspect_image(image)).await?;
        Ok(found.config.unwrap_or_default())
    }

    /// The files of a container as a tar archive. Reading the archive has no time limit.
    pub(crate) async fn export(
        &self,
        name: &str,
    ) -> Result<impl Stream<Item = Result<Bytes, EngineError>> + use<>, EngineError> {
        let docker = self.docker().await?.clone();
        Ok(docker.export_container(name).map(|bytes| bytes.map_err(EngineError::from)))
    }

    /// Creates a container. One of this name that exists is success: an interrupted call has created it.
    pub(crate) async fn create(&self, name: &str, body: ContainerCreateBody) -> Result<(), EngineError> {
        let image = body.image.clone().unwrap_or_default();
        let options = CreateContainerOptionsBuilder::new().name(name).build();
        match within(ACT, self.docker().await?.create_container(Some(options), body)).await {
            Err(error @ EngineError::Conflict(_)) => match self.inspect(name).await {
                Err(EngineError::NotFound(_)) => Err(error),
                found => found.map(drop),
            },
            Err(error @ EngineError::NotFound(_)) => match self.image_id(&image).await {
                Err(EngineError::NotFound(_)) => Err(EngineError::NoImage(image)),
                _ => Err(error),
            },
            created => created.map(drop),
        }
    }

    /// Attaches to a container's standard streams; must come before the start, so that nothing is missed.
    pub(crate) async fn attach(&self, name: &str) -> Result<Attached, EngineError> {
        let options =
            AttachContainerOptionsBuilder::new().stream(true).stdin(true).stdout(true).stderr(true).build();
        let attached = within(ASK, self.docker().await?.attach_container(name, Some(options))).await?;
        Ok(Attached::new(name, attached.output, attached.input))
    }

    /// Starts a container.
    pub(crate) async fn start(&self, name: &str) -> Result<(), EngineError> {
        within(ACT, self.docker().await?.start_container(name, None)).await
    }

    /// Stops a container: SIGTERM, and SIGKILL after `grace_s`.
    pub(crate) async fn stop(&self, name: &str, grace_s: i32) -> Result<(), EngineError> {
        let options = StopContainerOptionsBuilder::new().t(grace_s).build();
        within(ACT, self.docker().await?.stop_container(name, Some(options))).await
    }

    /// Pauses all processes of a container. One that is paused is success.
    pub(crate) async fn pause(&self, name: &str) -> Result<(), EngineError> {
        match within(ACT, self.docker().await?.pause_container(name)).await {
            Err(error @ EngineError::Conflict(_)) => {
                if self.is_paused(name).await? {
                    Ok(())
                } else {
                    Err(error)
                }
            }
            paused => paused,
        }
    }

    /// Unpauses a container. One that is not paused, or is gone, is success.
    pub(crate) async fn unpause(&self, name: &str) -> Result<(), EngineError> {
        let unpaused = within(ACT, self.docker().await?.unpause_container(name)).await;
        match unpaused {
            // Engines refuse to unpause a container that is not paused, with different status codes.
            Err(
                error @ (EngineError::Conflict(_)
                | EngineError::Refused(_)
                | EngineError::Runtime { .. }
                | EngineError::Other(_)),
            ) => match self.is_paused(name).await {
                Ok(false) | Err(EngineError::NotFound(_)) => Ok(()),
                Ok(true) | Err(_) => Err(error),
            },
            unpaused => ignore_not_found(unpaused),
        }
    }

    async fn is_paused(&self, name: &str) -> Result<bool, EngineError> {
        let state = self.inspect(name).await?.state.unwrap_or_default();
        Ok(state.paused == Some(true))
    }

    /// The directory that a volume is mounted at on the engine's host.
    pub(crate) async fn volume_path(&self, name: &str) -> Result<String, EngineError> {
        Ok(within(ASK, self.docker().await?.inspect_volume(name)).await?.mountpoint)
    }

    /// Removes a container, running or not.
    pub(crate) async fn remove(&self, name: &str) -> Result<(), EngineError> {
        let options = RemoveContainerOptionsBuilder::new().force(true).build();
        match within(ACT, self.docker().await?.remove_container(name, Some(options))).await {
            // A forced removal has one conflict: another removal is in progress, begun by a server that is gone.
            Err(EngineError::Conflict(_)) => self.wait_until_removed(name).await,
            removed => ignore_not_found(removed),
        }
    }

    /// Waits until the engine notices that a container has ended. True: it has noticed, or there is no such container.
    pub(crate) async fn wait_until_ended(&self, name: &str, most: Duration) -> bool {
        let waited = async {
            let options = WaitContainerOptionsBuilder::new().condition("not-running").build();
            let mut ended = self.docker().await?.wait_container(name, Some(options));
            // The exit code comes as an answer or as an error. Either means that the container has ended or is gone.
            let _ = ended.next().await;
            Ok::<(), EngineError>(())
        };
        matches!(tokio::time::timeout(most, waited).await, Ok(Ok(())))
    }

    async fn wait_until_removed(&self, name: &str) -> Result<(), EngineError> {
        let options = WaitContainerOptionsBuilder::new().condition("removed").build();
        let mut ended = self.docker().await?.wait_container(name, Some(options));
        // The answer is an exit code or an error. Only the container's absence shows that it was removed.
        let _ = tokio::time::timeout(ACT, ended.next()).await;
        match self.inspect(name).await {
            Err(EngineError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(EngineError::Conflict(format!("{name} is still being removed"))),
        }
    }

    /// A container's state.
    pub(crate) async fn inspect(&self, name: &str) -> Result<ContainerInspectResponse, EngineError> {
        within(ASK, self.docker().await?.inspect_container(name, None)).await
    }

    /// Runs a program in a container and attaches to its streams.
    pub(crate) async fn exec(&self, name: &str, program: Vec<String>) -> Result<Attached, EngineError> {
        let options = bollard::models::ExecConfig {
            attach_stdin: Some(true),
            attach_stdout: Some(true),
            attach_stderr: Some(true),
            cmd: Some(program),
            ..Default::default()
        };
        let exec = within(ASK, self.docker().await?.create_exec(name, options)).await?;
        match within(ACT, self.docker().await?.start_exec(&exec.id, None)).await? {
            bollard::exec::StartExecResults::Attached { output, input } => {
                Ok(Attached::new(name, output, input))
            }
            bollard::exec::StartExecResults::Detached => {
                Err(EngineError::Other("the engine started an exec without its streams".to_owned()))
            }
        }
    }

    /// Whether there is such a volume.
    pub(crate) async fn has_volume(&self, name: &str) -> Result<bool, EngineError> {
        match within(ASK, self.docker().await?.inspect_volume(name)).await {
            Ok(_) => Ok(true),
            Err(EngineError::NotFound(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a volume. One that is in use is [`EngineError::Conflict`]; one whose mounts the engine miscounts is
    /// [`EngineError::VolumeMounted`].
    pub(crate) async fn remove_volume(&self, name: &str) -> Result<(), EngineError> {
        let docker = self.docker().await?;
        let options = None::<bollard::query_parameters::RemoveVolumeOptions>;
        let removed = within(ACT, docker.remove_volume(name, options)).await;
        ignore_not_found(removed).map_err(EngineError::sort_volume_removal)
    }

    /// All containers with this label.
    pub(crate) async fn containers(&self, label: &str) -> Result<Vec<ContainerEntry>, EngineError> {
        let filters = HashMap::from([("label".to_owned(), vec![label.to_owned()])]);
        let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
        let found = within(ASK, self.docker().await?.list_containers(Some(options))).await?;
        Ok(found.into_iter().map(ContainerEntry::from).collect())
    }

    /// All volumes with this label.
    pub(crate) async fn volumes(&self, label: &str) -> Result<Vec<Volume>, EngineError> {
        let filters = HashMap::from([("label".to_owned(), vec![label.to_owned()])]);
        let options = ListVolumesOptionsBuilder::new().filters(&filters).build();
        let found = within(ASK, self.docker().await?.list_volumes(Some(options))).await?;
        Ok(found.volumes.unwrap_or_default())
    }
}

impl From<ContainerSummary> for ContainerEntry {
    fn from(summary: ContainerSummary) -> Self {
        use ContainerSummaryStateEnum::{PAUSED, RESTARTING, RUNNING};
        let name = summary.names.unwrap_or_default().into_iter().next().unwrap_or_default();
        let created = u64::try_from(summary.created.unwrap_or(0)).unwrap_or(0);
        let mounts = summary.mounts.unwrap_or_default();
        Self {
            name: name.trim_start_matches('/').to_owned(),
            labels: summary.labels.unwrap_or_default(),
            is_running: matches!(summary.state, Some(RUNNING | RESTARTING | PAUSED)),
            created: UNIX_EPOCH + Duration::from_secs(created),
            mount_sources: mounts.into_iter().filter_map(|mount| mount.source).collect(),
        }
    }
}

/// Whether the engine that gave this description has an OCI runtime of this name.
pub(super) fn has_runtime(info: &SystemInfo, name: &str) -> bool {
    info.runtimes.as_ref().is_some_and(|runtimes| runtimes.contains_key(name))
}
