//! The Docker engine: a connection, and the calls we need, each bounded in time and with its errors sorted.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bollard::errors::Error as BollardError;
use bollard::models::{ContainerCreateBody, ContainerInspectResponse, ImageConfig, SystemInfo};
use bollard::query_parameters::{
    AttachContainerOptionsBuilder, CreateContainerOptionsBuilder, ListContainersOptionsBuilder,
    ListVolumesOptionsBuilder, RemoveContainerOptionsBuilder, StopContainerOptionsBuilder,
    WaitContainerOptionsBuilder,
};
use bollard::{API_DEFAULT_VERSION, Docker};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::sync::OnceCell;

use super::stream::Attached;

/// Where the engine listens, when it is not the usual socket.
pub const DOCKER_HOST_VARIABLE: &str = "DOCKER_HOST";
/// For questions.
pub(super) const ASK: Duration = Duration::from_secs(15);
/// For calls that start or stop something.
pub(super) const ACT: Duration = Duration::from_secs(90);

/// A connection to the engine. Clones share it.
#[derive(Clone)]
pub struct Engine {
    /// Not yet spoken with.
    unversioned: Docker,
    /// Speaking the newest version of the API that both sides know.
    docker: Arc<OnceCell<Docker>>,
}

/// Why the engine did not do something.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// It does not answer.
    #[error("the Docker engine does not answer ({0}): start it, or set DOCKER_HOST to where it listens")]
    Unreachable(String),
    /// It did not answer in time.
    #[error("the Docker engine did not answer within {0} s")]
    TimedOut(u64),
    /// There is no such container, volume, network or image.
    #[error("{0}")]
    NotFound(String),
    /// It is there already, in use, or not in the right state.
    #[error("{0}")]
    Conflict(String),
    /// The engine refused the request.
    #[error("{0}")]
    Refused(String),
    /// Something else.
    #[error("{0}")]
    Other(String),
}

impl From<BollardError> for EngineError {
    fn from(error: BollardError) -> Self {
        match error {
            BollardError::DockerResponseServerError { status_code, message } => match status_code {
                404 => Self::NotFound(message),
                409 => Self::Conflict(message),
                400..500 => Self::Refused(message),
                _ => Self::Other(message),
            },
            BollardError::RequestTimeoutError => Self::TimedOut(ACT.as_secs()),
            error @ (BollardError::HyperResponseError { .. }
            | BollardError::HyperLegacyError { .. }
            | BollardError::IOError { .. }
            | BollardError::SocketNotFoundError(_)) => Self::Unreachable(describe(&error)),
            other => Self::Other(describe(&other)),
        }
    }
}

/// An error with its causes.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
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

/// Success also when it was not there.
pub(crate) fn gone_is_fine(result: Result<(), EngineError>) -> Result<(), EngineError> {
    match result {
        Err(EngineError::NotFound(_)) => Ok(()),
        result => result,
    }
}

impl Engine {
    /// A connection to the engine at `host`, else at `DOCKER_HOST`, else at the usual socket. Does not connect yet.
    pub fn open(host: Option<&str>) -> Result<Self, EngineError> {
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

    /// The engine itself.
    pub(crate) async fn docker(&self) -> Result<&Docker, EngineError> {
        let negotiate = || within(ASK, self.unversioned.clone().negotiate_version());
        self.docker.get_or_try_init(negotiate).await
    }

    /// Checks that the engine answers: one that hangs takes requests all the same, and long ones would wait for [`ACT`].
    pub(crate) async fn check_answers(&self) -> Result<(), EngineError> {
        within(ASK, self.docker().await?.ping()).await.map(drop)
    }

    /// What the engine says of itself.
    pub async fn info(&self) -> Result<SystemInfo, EngineError> {
        within(ASK, self.docker().await?.info()).await
    }

    /// The content id of an image.
    pub async fn image_id(&self, image: &str) -> Result<String, EngineError> {
        let found = within(ASK, self.docker().await?.inspect_image(image)).await?;
        found.id.ok_or_else(|| EngineError::Other(format!("the image {image} has no id")))
    }

    /// What an image says of how it is run.
    pub(crate) async fn image_config(&self, image: &str) -> Result<ImageConfig, EngineError> {
        let found = within(ASK, self.docker().await?.inspect_image(image)).await?;
        Ok(found.config.unwrap_or_default())
    }

    /// The files of a container, as an archive. The whole of it is not bounded in time.
    pub(crate) async fn export(
        &self,
        name: &str,
    ) -> Result<impl Stream<Item = Result<Bytes, EngineError>> + use<>, EngineError> {
        let docker = self.docker().await?.clone();
        Ok(docker.export_container(name).map(|bytes| bytes.map_err(EngineError::from)))
    }

    /// Makes a container.
    pub(crate) async fn create(&self, name: &str, body: ContainerCreateBody) -> Result<(), EngineError> {
        let options = CreateContainerOptionsBuilder::new().name(name).build();
        within(ACT, self.docker().await?.create_container(Some(options), body)).await.map(drop)
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

    /// Lets nothing in a container run until [`unpause`](Self::unpause).
    pub(crate) async fn pause(&self, name: &str) -> Result<(), EngineError> {
        match within(ACT, self.docker().await?.pause_container(name)).await {
            Err(EngineError::Conflict(message)) if message.contains("already paused") => Ok(()),
            paused => paused,
        }
    }

    /// Lets a paused container go on; one that is not paused, or gone, is as good.
    pub(crate) async fn unpause(&self, name: &str) -> Result<(), EngineError> {
        match within(ACT, self.docker().await?.unpause_container(name)).await {
            Err(EngineError::Conflict(message) | EngineError::Other(message))
                if message.contains("not paused") || message.contains("not running") =>
            {
                Ok(())
            }
            unpaused => gone_is_fine(unpaused),
        }
    }

    /// Where a volume is mounted on the engine's host.
    pub(crate) async fn volume_path(&self, name: &str) -> Result<String, EngineError> {
        Ok(within(ASK, self.docker().await?.inspect_volume(name)).await?.mountpoint)
    }

    /// Removes a container, running or not.
    pub(crate) async fn remove(&self, name: &str) -> Result<(), EngineError> {
        let options = RemoveContainerOptionsBuilder::new().force(true).build();
        let removed = within(ACT, self.docker().await?.remove_container(name, Some(options))).await;
        match removed {
            // A request of a server that is gone is still at it.
            Err(EngineError::Conflict(message)) if message.contains("already in progress") => {
                self.wait_until_removed(name).await
            }
            removed => gone_is_fine(removed),
        }
    }

    /// Waits until the engine has noticed that a container runs no more. True when it has, or there is none.
    pub(crate) async fn wait_until_ended(&self, name: &str, most: Duration) -> bool {
        let waited = async {
            let options = WaitContainerOptionsBuilder::new().condition("not-running").build();
            let mut ended = self.docker().await?.wait_container(name, Some(options));
            // Its exit code comes as an answer or as an error: either says that it has ended, or is not there.
            let _ = ended.next().await;
            Ok::<(), EngineError>(())
        };
        matches!(tokio::time::timeout(most, waited).await, Ok(Ok(())))
    }

    async fn wait_until_removed(&self, name: &str) -> Result<(), EngineError> {
        let options = WaitContainerOptionsBuilder::new().condition("removed").build();
        let mut ended = self.docker().await?.wait_container(name, Some(options));
        // Its end is told as an exit code or as an error; what counts is whether the container is still there.
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

    /// Removes a volume. One that is in use, or that the engine takes to be, is a conflict.
    pub(crate) async fn remove_volume(&self, name: &str) -> Result<(), EngineError> {
        let docker = self.docker().await?;
        let options = None::<bollard::query_parameters::RemoveVolumeOptions>;
        match gone_is_fine(within(ACT, docker.remove_volume(name, options)).await) {
            Err(EngineError::Other(message)) if message.contains("volume has active mounts") => {
                Err(EngineError::Conflict(message))
            }
            removed => removed,
        }
    }

    /// Labels and state of all containers with this label.
    pub(crate) async fn containers(
        &self,
        label: &str,
    ) -> Result<Vec<(HashMap<String, String>, bool)>, EngineError> {
        let filters = HashMap::from([("label".to_owned(), vec![label.to_owned()])]);
        let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
        let found = within(ASK, self.docker().await?.list_containers(Some(options))).await?;
        Ok(found
            .into_iter()
            .map(|container| {
                let state = container.state.map(|state| state.to_string()).unwrap_or_default();
                let running = matches!(state.as_str(), "running" | "restarting" | "paused");
                (container.labels.unwrap_or_default(), running)
            })
            .collect())
    }

    /// Names of all containers with this label, and when they were made.
    pub(crate) async fn containers_with_age(
        &self,
        label: &str,
    ) -> Result<Vec<(String, SystemTime)>, EngineError> {
        let filters = HashMap::from([("label".to_owned(), vec![label.to_owned()])]);
        let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
        let found = within(ASK, self.docker().await?.list_containers(Some(options))).await?;
        let made = |seconds: i64| UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        let each = found.into_iter().filter_map(|container| {
            let name = container.names?.first()?.trim_start_matches('/').to_owned();
            Some((name, made(container.created.unwrap_or(0))))
        });
        Ok(each.collect())
    }

    /// What the containers with this label mount.
    pub(crate) async fn mount_sources(&self, label: &str) -> Result<Vec<String>, EngineError> {
        let filters = HashMap::from([("label".to_owned(), vec![label.to_owned()])]);
        let options = ListContainersOptionsBuilder::new().all(true).filters(&filters).build();
        let found = within(ASK, self.docker().await?.list_containers(Some(options))).await?;
        let mounts = found.into_iter().flat_map(|container| container.mounts.unwrap_or_default());
        Ok(mounts.filter_map(|mount| mount.source).collect())
    }

    /// Labels of all volumes with this label.
    pub(crate) async fn volumes(&self, label: &str) -> Result<Vec<HashMap<String, String>>, EngineError> {
        let filters = HashMap::from([("label".to_owned(), vec![label.to_owned()])]);
        let options = ListVolumesOptionsBuilder::new().filters(&filters).build();
        let found = within(ASK, self.docker().await?.list_volumes(Some(options))).await?;
        Ok(found.volumes.unwrap_or_default().into_iter().map(|volume| volume.labels).collect())
    }

    /// Names of all volumes with this label.
    pub(crate) async fn volume_names(&self, label: &str) -> Result<Vec<String>, EngineError> {
        let filters = HashMap::from([("label".to_owned(), vec![label.to_owned()])]);
        let options = ListVolumesOptionsBuilder::new().filters(&filters).build();
        let found = within(ASK, self.docker().await?.list_volumes(Some(options))).await?;
        Ok(found.volumes.unwrap_or_default().into_iter().map(|volume| volume.name).collect())
    }
}
