//! Checks of gVisor: its runtime is registered, starts a container and keeps files.

use std::path::Path;
use std::process::{Command, Stdio};

use super::docker::Engine;
use super::host;
use super::probe::{self, Probe};
use super::report::Check;

pub(super) const RUNTIME: &str = "gVisor runtime";
pub(super) const CONTAINER: &str = "gVisor container";
const WRAPPER: &str = "gVisor on this kernel";
const FILES: &str = "files outside /workspace";
/// runsc refuses to run in the host's network namespace. It takes a namespace that shows this file for the host's. Some kernels
/// show it in every namespace.
const HOST_NAMESPACE_FILE: &str = "/proc/sys/net/core/rmem_default";

/// All checks of gVisor. `image` is the image of the container that is started, `container` its name.
pub(super) async fn checks(engine: &Engine, image: Option<&str>, container: &str) -> Vec<Check> {
    let registered = engine.info.runtimes.as_ref().and_then(|runtimes| runtimes.get("runsc"));
    let Some(runtime) = registered else {
        let missing = Check::fail(
            RUNTIME,
            "the engine has no runtime 'runsc'",
            "make setup   (or install it as https://gvisor.dev/docs/user_guide/install/ says, then run `runsc install` and \
             restart the engine)",
        );
        return vec![missing, Check::skip(CONTAINER, "the runtime is missing")];
    };
    let path = runtime.path.clone().unwrap_or_else(|| "runsc".to_owned());
    let arguments = runtime.runtime_args.clone().unwrap_or_default();
    let mut checks =
        vec![Check::ok(RUNTIME, format!("registered as {path} {}", arguments.join(" ")).trim_end())];
    let Some(image) = image else {
        checks.push(Check::skip(CONTAINER, "the image is missing"));
        return checks;
    };
    let probed = probe::run(&engine.docker, image, container).await;
    if engine.is_local {
        let starts = probed.is_ok();
        let is_wrapped = is_script(Path::new(&path));
        let is_needed = tokio::task::spawn_blocking(needs_wrapper).await.unwrap_or(None);
        checks.push(wrapper(is_needed, is_wrapped, starts, &path));
    }
    checks.extend(judge(&probed, engine.info.kernel_version.as_deref(), &arguments));
    checks
}

fn judge(probed: &Result<Probe, String>, host_kernel: Option<&str>, arguments: &[String]) -> Vec<Check> {
    let probe = match probed {
        Ok(probe) => probe,
        Err(problem) => {
            // `wrapper` finds out by facts whether the kernel needs the wrapper, so the text of the problem decides nothing.
            let fix = "make setup registers runsc again, with a wrapper where the kernel needs it. For details: docker run \
                       --rm --runtime=runsc emergent/workspace:latest true";
            let failed = Check::fail(CONTAINER, format!("it does not start: {problem}"), fix);
            return vec![failed, Check::skip(FILES, "no gVisor container starts")];
        }
    };
    let is_hosts = host_kernel.is_some_and(|kernel| probe.kernel.contains(&format!(" {kernel} ")));
    if is_hosts {
        let failed = Check::fail(
            CONTAINER,
            format!(
                "a container on 'runsc' runs on this host's kernel: the runtime is not gVisor ({})",
                probe.kernel
            ),
            "make setup registers gVisor (see runtimes.runsc in /etc/docker/daemon.json)",
        );
        return vec![failed];
    }
    let version = probe.kernel.split(" #").next().unwrap_or_default();
    let started = Check::ok(
        CONTAINER,
        format!("created and started in {} ms, with its own kernel ({version})", probe.start_ms),
    );
    let overlay = arguments.iter().any(|argument| argument == "--overlay2=none");
    let files = if probe.keeps_files {
        let how = if overlay { " (--overlay2=none)" } else { "" };
        Check::ok(FILES, format!("they survive stop and resume{how}"))
    } else {
        Check::warn(
            FILES,
            "runsc keeps them in memory: they are lost when a workspace is stopped (/workspace is kept)",
            "add \"--overlay2=none\" to runtimes.runsc.runtimeArgs in /etc/docker/daemon.json, then reload the engine: \
             kill -HUP $(cat /var/run/docker.pid)   (or: make setup)",
        )
    };
    vec![started, files]
}

/// Whether the kernel shows [`HOST_NAMESPACE_FILE`] in a new network namespace. `None` if no namespace can be made.
fn needs_wrapper() -> Option<bool> {
    if !Path::new(HOST_NAMESPACE_FILE).exists() {
        return Some(false);
    }
    let unshare = host::find_program("unshare")?;
    let mut command = Command::new(unshare);
    if !host::is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let output =
        command.args(["--net", "test", "-e", HOST_NAMESPACE_FILE]).stdin(Stdio::null()).output().ok()?;
    match output.status.code() {
        Some(0) => Some(true),
        Some(1) if output.stderr.is_empty() => Some(false),
        _ => None,
    }
}

/// Whether the registered runtime is a script, which calls the real binary.
fn is_script(path: &Path) -> bool {
    std::fs::File::open(path)
        .and_then(|mut file| {
            let mut start = [0; 2];
            std::io::Read::read_exact(&mut file, &mut start).map(|()| start == *b"#!")
        })
        .unwrap_or(false)
}

fn wrapper(is_needed: Option<bool>, is_wrapped: bool, starts: bool, path: &str) -> Check {
    let why = format!(
        "it shows {HOST_NAMESPACE_FILE} in every network namespace, so runsc takes each for the host's"
    );
    match is_needed {
        Some(true) if starts && is_wrapped => {
            Check::ok(WRAPPER, format!("{why}; the wrapper {path} hides the file"))
        }
        Some(true) if starts => Check::ok(WRAPPER, format!("{why}, but this runsc starts without a wrapper")),
        Some(true) => Check::fail(
            WRAPPER,
            format!("{why} and refuses to start"),
            "make setup registers scripts/runsc-wrapper, which runs runsc in a mount namespace with an empty /proc/sys/net",
        ),
        Some(false) => Check::ok(WRAPPER, "runsc needs no wrapper"),
        None if starts => {
            Check::ok(WRAPPER, "only root can test whether runsc needs a wrapper, but runsc works")
        }
        None => {
            Check::warn(WRAPPER, "only root can test whether runsc needs a wrapper", "sudo emergent doctor")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(kernel: &str, keeps_files: bool) -> Result<Probe, String> {
        Ok(Probe { kernel: kernel.into(), keeps_files, start_ms: 600 })
    }

    fn all_ok(checks: &[Check]) -> bool {
        checks.iter().all(Check::is_ok)
    }

    #[test]
    fn runtime_with_the_hosts_kernel_is_not_accepted_as_gvisor() {
        let host = "Linux version 6.18.44-x (gcc) #1 SMP";
        assert!(!all_ok(&judge(&probe(host, true), Some("6.18.44-x"), &[])));
        let gvisor = "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016";
        assert!(all_ok(&judge(&probe(gvisor, true), Some("6.18.44-x"), &[])));
    }

    #[test]
    fn lost_files_and_failed_starts_are_reported_with_their_fix() {
        let text = |checks: &[Check]| serde_json::to_string(checks).unwrap();
        let lost = judge(&probe("Linux version 4.4.0 #1", false), None, &[]);
        assert!(text(&lost).contains("--overlay2=none") && text(&lost).contains("warn"));
        let refused =
            judge(&Err("cannot run with network enabled in root network namespace".into()), None, &[]);
        assert!(text(&refused).contains("wrapper") && text(&refused).contains("fail"));
    }

    #[test]
    fn wrapper_is_required_only_on_kernels_that_need_it() {
        assert!(wrapper(Some(false), false, false, "runsc").is_ok());
        assert!(wrapper(Some(true), true, true, "/wrapper").is_ok());
        assert!(!wrapper(Some(true), false, false, "runsc").is_ok());
        assert!(!wrapper(None, false, false, "runsc").is_ok());
    }
}
