//! The Docker engine: does it answer, and has it what workspaces need?

use std::path::Path;
use std::time::Duration;

use bollard::models::SystemInfo;
use bollard::{API_DEFAULT_VERSION, Docker};
use emergent_control_plane::Settings;
use emergent_wire::workspace::DEFAULT_IMAGE;

use super::report::{self, Check};
use super::{gvisor, host, probe};

/// For one question to the engine.
const ASK: Duration = Duration::from_secs(15);
/// For everything, a container's start included.
const ALL: Duration = Duration::from_secs(180);
const USUAL_SOCKET: &str = "/var/run/docker.sock";

/// An engine that answers.
pub(super) struct Engine {
    pub(super) docker: Docker,
    pub(super) info: SystemInfo,
    /// Whether it is on this machine, so that what is found here holds for it.
    pub(super) is_local: bool,
}

/// Where the engine listens: as configured, else as `DOCKER_HOST` says.
fn address(settings: &Settings) -> Option<String> {
    let variable = || std::env::var("DOCKER_HOST").ok();
    settings.providers.docker_host.clone().or_else(variable).filter(|host| !host.is_empty())
}

async fn connect(settings: &Settings) -> Result<(Docker, bool), String> {
    let seconds = ALL.as_secs();
    let host = address(settings);
    let (docker, is_local) = match host.as_deref() {
        None => (Docker::connect_with_unix(USUAL_SOCKET, seconds, API_DEFAULT_VERSION), true),
        Some(host) => match host.strip_prefix("unix://") {
            Some(path) => (Docker::connect_with_unix(path, seconds, API_DEFAULT_VERSION), true),
            None if host.starts_with("tcp://") || host.starts_with("http://") => {
                (Docker::connect_with_http(host, seconds, API_DEFAULT_VERSION), false)
            }
            None => {
                return Err(format!("'{host}' (DOCKER_HOST) is not a unix:// or tcp:// address"));
            }
        },
    };
    let docker = docker.map_err(|error| error.to_string())?;
    match tokio::time::timeout(ASK, docker.negotiate_version()).await {
        Ok(Ok(docker)) => Ok((docker, is_local)),
        Ok(Err(error)) => Err(probe::describe(&error)),
        Err(_) => Err(format!("no answer within {} s", ASK.as_secs())),
    }
}

async fn open(settings: &Settings) -> Result<Engine, String> {
    let (docker, is_local) = connect(settings).await?;
    match tokio::time::timeout(ASK, docker.info()).await {
        Ok(Ok(info)) => Ok(Engine { docker, info, is_local }),
        Ok(Err(error)) => Err(probe::describe(&error)),
        Err(_) => Err(format!("no answer within {} s", ASK.as_secs())),
    }
}

/// Everything about the engine and gVisor. `container` is the name for the container that is started.
pub(super) async fn checks(settings: &Settings, container: &str) -> Vec<Check> {
    report::within("Docker engine", ALL, async {
        let engine = match open(settings).await {
            Ok(engine) => engine,
            Err(problem) => {
                let mut checks = vec![unreachable(settings, &problem)];
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

fn unreachable(settings: &Settings, problem: &str) -> Check {
    let host = address(settings);
    let socket = host.as_deref().map_or(Some(USUAL_SOCKET), |host| host.strip_prefix("unix://"));
    let exists = socket.is_some_and(|path| Path::new(path).exists());
    let fix = if exists && problem.to_ascii_lowercase().contains("permission denied") {
        "sudo usermod -aG docker $USER, then log in again (or run as root)".to_owned()
    } else if host.is_some() {
        "start the engine there, or unset DOCKER_HOST (providers.docker_host) to use this machine's"
            .to_owned()
    } else {
        "make setup installs and starts it (or: apt-get install docker.io && systemctl start docker)"
            .to_owned()
    };
    let place = host.unwrap_or_else(|| format!("unix://{USUAL_SOCKET}"));
    Check::fail("Docker engine", format!("no engine answers at {place}: {problem}"), fix)
}

/// The image that workspaces start from, and one to try a container with.
async fn workspace_image(docker: &Docker, wanted: &str) -> (Option<String>, Check) {
    const WHAT: &str = "workspace image";
    let exists = async |image: &str| {
        tokio::time::timeout(ASK, docker.inspect_image(image)).await.is_ok_and(|found| found.is_ok())
    };
    // The usual one is known to have a shell.
    let usual = exists(DEFAULT_IMAGE).await;
    let has_wanted = if wanted == DEFAULT_IMAGE { usual } else { exists(wanted).await };
    let usable = if usual { Some(DEFAULT_IMAGE.to_owned()) } else { has_wanted.then(|| wanted.to_owned()) };
    let check = if has_wanted {
        Check::ok(WHAT, format!("{wanted} is there"))
    } else if wanted == DEFAULT_IMAGE {
        Check::fail(
            WHAT,
            format!("the engine has no {wanted}"),
            "make setup makes it (or, with a registry: docker build -t emergent/workspace:latest images/workspace)",
        )
    } else {
        Check::fail(WHAT, format!("the engine has no {wanted}"), format!("docker pull {wanted}"))
    };
    (usable, check)
}

/// Removes the container that the checks may have left, when they were interrupted.
pub(super) async fn clean_up(settings: &Settings, container: &str) {
    if let Ok((docker, _)) = connect(settings).await {
        probe::remove(&docker, container).await;
    }
}
