//! Checks of the Docker engine: it answers, and has the workspace image.

use std::error::Error as StdError;
use std::io;
use std::path::Path;
use std::time::Duration;

use bollard::errors::Error as BollardError;
use bollard::models::SystemInfo;
use bollard::{API_DEFAULT_VERSION, Docker};
use emergent_control_plane::Settings;
use emergent_wire::error::with_causes;
use emergent_wire::workspace::DEFAULT_IMAGE;

use super::report::{self, Check};
use super::{gvisor, host, probe};

/// The time limit of one request to the engine.
const REQUEST: Duration = Duration::from_secs(15);
/// The time limit of all checks, with the start of a container.
const ALL: Duration = Duration::from_secs(180);
const DEFAULT_SOCKET: &str = "/var/run/docker.sock";

/// An engine that answers.
pub(super) struct Engine {
    pub(super) docker: Docker,
    pub(super) info: SystemInfo,
    /// Whether it runs on this machine, so that checks of this machine's kernel apply to it.
    pub(super) is_local: bool,
}

/// The failure to reach the engine.
struct Unreachable {
    problem: String,
    /// Whether this user may not use the engine's socket.
    is_denied: bool,
}

impl Unreachable {
    fn new(error: &BollardError) -> Self {
        Self { problem: with_causes(error), is_denied: is_denied(error) }
    }

    fn other(problem: String) -> Self {
        Self { problem, is_denied: false }
    }
}

/// Whether the error, or one of its causes, is a refused permission.
fn is_denied(error: &BollardError) -> bool {
    // `IOError` is transparent: the I/O error is not among its causes.
    if let BollardError::IOError { err } = error {
        return err.kind() == io::ErrorKind::PermissionDenied;
    }
    let mut causes = std::iter::successors(error.source(), |cause| (*cause).source());
    causes.any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|io| io.kind() == io::ErrorKind::PermissionDenied)
    })
}

/// The engine's address: the configured one, else `DOCKER_HOST`.
fn address(settings: &Settings) -> Option<String> {
    let variable = || std::env::var("DOCKER_HOST").ok();
    settings.providers.docker_host.clone().or_else(variable).filter(|host| !host.is_empty())
}

/// Sends one request to the engine, within the time limit.
async fn ask<T>(request: impl Future<Output = Result<T, BollardError>>) -> Result<T, Unreachable> {
    match tokio::time::timeout(REQUEST, request).await {
        Ok(answer) => answer.map_err(|error| Unreachable::new(&error)),
        Err(_) => Err(Unreachable::other(format!("no answer within {} s", REQUEST.as_secs()))),
    }
}

async fn connect(settings: &Settings) -> Result<(Docker, bool), Unreachable> {
    let seconds = ALL.as_secs();
    let host = address(settings);
    let (docker, is_local) = match host.as_deref() {
        None => (Docker::connect_with_unix(DEFAULT_SOCKET, seconds, API_DEFAULT_VERSION), true),
        Some(host) => match host.strip_prefix("unix://") {
            Some(path) => (Docker::connect_with_unix(path, seconds, API_DEFAULT_VERSION), true),
            None if host.starts_with("tcp://") || host.starts_with("http://") => {
                (Docker::connect_with_http(host, seconds, API_DEFAULT_VERSION), false)
            }
            None => {
                let problem = format!("'{host}' (DOCKER_HOST) is not a unix:// or tcp:// address");
                return Err(Unreachable::other(problem));
            }
        },
    };
    let docker = docker.map_err(|error| Unreachable::new(&error))?;
    let docker = ask(docker.negotiate_version()).await?;
    Ok((docker, is_local))
}

async fn open(settings: &Settings) -> Result<Engine, Unreachable> {
    let (docker, is_local) = connect(settings).await?;
    let info = ask(docker.info()).await?;
    Ok(Engine { docker, info, is_local })
}

/// All checks of the engine and of gVisor. `container` is the name of the container that is started.
pub(super) async fn checks(settings: &Settings, container: &str) -> Vec<Check> {
    report::within("Docker engine", ALL, async {
        let engine = match open(settings).await {
            Ok(engine) => engine,
            Err(failure) => {
                let mut checks = vec![unreachable(settings, &failure)];
                let skip = |what: &&str| Check::skip(what, "the Docker engine does not answer");
                checks.extend(["workspace image", gvisor::RUNTIME, gvisor::CONTAINER].iter().map(skip));
                return checks;
            }
        };
        let version = engine.info.server_version.as_deref().unwrap_or("of unknown version");
        let storage = engine.info.driver.as_deref().unwrap_or("unknown");
        let mut checks = vec![Check::ok("Docker engine", format!("{version} answers (storage {storage})"))];
        if let (true, Some(root)) = (engine.is_local, &engine.info.docker_root_dir) {
            checks.push(host::disk_space("Docker's disk", Path::new(root)));
        }
        let (image, check) = workspace_image(&engine.docker, &settings.workspaces.default_image).await;
        checks.push(check);
        checks.extend(gvisor::checks(&engine, image.as_deref(), container).await);
        checks
    })
    .await
}

fn unreachable(settings: &Settings, failure: &Unreachable) -> Check {
    let host = address(settings);
    let fix = if failure.is_denied {
        "sudo usermod -aG docker $USER, then log in again (or run as root)"
    } else if host.is_some() {
        "start the engine there, or unset DOCKER_HOST (providers.docker_host) to use the engine of this machine"
    } else {
        "make setup installs and starts it (or: apt-get install docker.io && systemctl start docker)"
    };
    let place = host.unwrap_or_else(|| format!("unix://{DEFAULT_SOCKET}"));
    Check::fail("Docker engine", format!("no engine answers at {place}: {}", failure.problem), fix)
}

/// Checks the image that workspaces start from. Also gives an image for the probe.
async fn workspace_image(docker: &Docker, wanted: &str) -> (Option<String>, Check) {
    const WHAT: &str = "workspace image";
    let exists = async |image: &str| ask(docker.inspect_image(image)).await.is_ok();
    // The probe needs a shell, which the default image has.
    let has_default = exists(DEFAULT_IMAGE).await;
    let has_wanted = if wanted == DEFAULT_IMAGE { has_default } else { exists(wanted).await };
    let of_probe =
        if has_default { Some(DEFAULT_IMAGE.to_owned()) } else { has_wanted.then(|| wanted.to_owned()) };
    let check = if has_wanted {
        Check::ok(WHAT, format!("the engine has {wanted}"))
    } else if wanted == DEFAULT_IMAGE {
        Check::fail(
            WHAT,
            format!("the engine has no {wanted}"),
            "make setup builds it (or, with a registry: docker build -t emergent/workspace:latest images/workspace)",
        )
    } else {
        Check::fail(WHAT, format!("the engine has no {wanted}"), format!("docker pull {wanted}"))
    };
    (of_probe, check)
}

/// Removes the container of checks that were interrupted.
pub(super) async fn clean_up(settings: &Settings, container: &str) {
    if let Ok((docker, _)) = connect(settings).await {
        probe::remove(&docker, container).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denied_socket_is_recognised_by_the_kind_of_its_error() {
        let error = |kind| BollardError::from(io::Error::from(kind));
        assert!(is_denied(&error(io::ErrorKind::PermissionDenied)));
        assert!(!is_denied(&error(io::ErrorKind::ConnectionRefused)));
    }
}
