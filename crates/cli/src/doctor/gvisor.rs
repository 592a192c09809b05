//! gVisor: is its runtime registered, does it start a container, and does it keep files?

use std::path::Path;
use std::process::{Command, Stdio};

use super::docker::Engine;
use super::host;
use super::probe::{self, Seen};
use super::report::Check;

pub(super) const RUNTIME: &str = "gVisor runtime";
pub(super) const CONTAINER: &str = "gVisor container";
const WRAPPER: &str = "gVisor on this kernel";
const FILES: &str = "files outside /workspace";
/// runsc takes this file for the sign of the host's network namespace, where it refuses to run.
const SIGN_OF_THE_HOST: &str = "/proc/sys/net/core/rmem_default";

/// All checks of gVisor. `image` is one to start a container from, `container` the container's name.
pub(super) async fn checks(engine: &Engine, image: Option<&str>, container: &str) -> Vec<Check> {
    let registered = engine.info.runtimes.as_ref().and_then(|runtimes| runtimes.get("runsc"));
    let Some(runtime) = registered else {
        let missing = Check::fail(
            RUNTIME,
            "the engine has no runtime 'runsc'",
            "make setup installs and registers it (by hand: https://gvisor.dev/docs/user_guide/install/, then \
             `runsc install` and a restart of the engine)",
        );
        return vec![missing, Check::skip(CONTAINER, "there is no runtime to start it with")];
    };
    let path = runtime.path.clone().unwrap_or_else(|| "runsc".to_owned());
    let arguments = runtime.runtime_args.clone().unwrap_or_default();
    let mut checks =
        vec![Check::ok(RUNTIME, format!("registered as {path} {}", arguments.join(" ")).trim_end())];
    let Some(image) = image else {
        checks.push(Check::skip(CONTAINER, "there is no image to start it from"));
        return checks;
    };
    let seen = probe::run(&engine.docker, image, container).await;
    if engine.is_local {
        let works = seen.is_ok();
        let wrapped = is_script(Path::new(&path));
        let needed = tokio::task::spawn_blocking(needs_wrapper).await.unwrap_or(None);
        checks.push(wrapper(needed, wrapped, works, &path));
    }
    checks.extend(judge(&seen, engine.info.kernel_version.as_deref(), &arguments));
    checks
}

fn judge(seen: &Result<Seen, String>, host_kernel: Option<&str>, arguments: &[String]) -> Vec<Check> {
    let seen = match seen {
        Ok(seen) => seen,
        Err(problem) => {
            let fix = if problem.contains("root network namespace") {
                "make setup registers runsc behind a wrapper that this kernel needs"
            } else {
                "make setup registers it anew; to see more: docker run --rm --runtime=runsc emergent/workspace:latest true"
            };
            let failed = Check::fail(CONTAINER, format!("it does not start: {problem}"), fix);
            return vec![failed, Check::skip(FILES, "no gVisor container starts")];
        }
    };
    let is_hosts = host_kernel.is_some_and(|kernel| seen.kernel.contains(&format!(" {kernel} ")));
    if is_hosts {
        let failed = Check::fail(
            CONTAINER,
            format!(
                "a container on 'runsc' sees this host's kernel: the runtime is not gVisor ({})",
                seen.kernel
            ),
            "make setup registers the real one (see runtimes.runsc in /etc/docker/daemon.json)",
        );
        return vec![failed];
    }
    let version = seen.kernel.split(" #").next().unwrap_or_default();
    let started = Check::ok(
        CONTAINER,
        format!("created and started in {} ms, as its own kernel ({version})", seen.start_ms),
    );
    let overlay = arguments.iter().any(|argument| argument == "--overlay2=none");
    let files = if seen.keeps_files {
        let how = if overlay { " (--overlay2=none)" } else { "" };
        Check::ok(FILES, format!("they survive stop and resume{how}"))
    } else {
        Check::warn(
            FILES,
            "runsc keeps them in memory and loses them when a workspace is stopped (/workspace itself is kept)",
            "add \"--overlay2=none\" to runtimes.runsc.runtimeArgs in /etc/docker/daemon.json, then reload the engine: \
             kill -HUP $(cat /var/run/docker.pid)   (or: make setup)",
        )
    };
    vec![started, files]
}

/// Whether the kernel shows the sign in every network namespace; none when that can't be found out.
fn needs_wrapper() -> Option<bool> {
    if !Path::new(SIGN_OF_THE_HOST).exists() {
        return Some(false);
    }
    let unshare = host::find_program("unshare")?;
    let mut command = Command::new(unshare);
    if !host::is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let output =
        command.args(["--net", "test", "-e", SIGN_OF_THE_HOST]).stdin(Stdio::null()).output().ok()?;
    match output.status.code() {
        Some(0) => Some(true),
        Some(1) if output.stderr.is_empty() => Some(false),
        _ => None,
    }
}

/// Whether the registered runtime is a script around the real binary.
fn is_script(path: &Path) -> bool {
    std::fs::File::open(path)
        .and_then(|mut file| {
            let mut start = [0; 2];
            std::io::Read::read_exact(&mut file, &mut start).map(|()| start == *b"#!")
        })
        .unwrap_or(false)
}

fn wrapper(needed: Option<bool>, wrapped: bool, works: bool, path: &str) -> Check {
    let why =
        format!("it shows {SIGN_OF_THE_HOST} in every network namespace, so runsc takes each for the host's");
    match needed {
        Some(true) if works && wrapped => {
            Check::ok(WRAPPER, format!("{why}; the wrapper {path} hides the file from it"))
        }
        Some(true) if works => Check::ok(WRAPPER, format!("{why}, but this runsc starts all the same")),
        Some(true) => Check::fail(
            WRAPPER,
            format!("{why} and refuses to start"),
            "make setup registers scripts/runsc-wrapper, which runs runsc where /proc/sys/net is empty (unshare --mount, \
             a tmpfs over it, exec runsc)",
        ),
        Some(false) => Check::ok(WRAPPER, "it needs no wrapper for runsc"),
        None if works => {
            Check::ok(WRAPPER, "whether it needs a wrapper can't be found out without root, but runsc works")
        }
        None => Check::warn(
            WRAPPER,
            "whether it needs a wrapper for runsc can't be found out without root",
            "sudo emergent doctor",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(kernel: &str, keeps_files: bool) -> Result<Seen, String> {
        Ok(Seen { kernel: kernel.into(), keeps_files, start_ms: 600 })
    }

    fn all_ok(checks: &[Check]) -> bool {
        checks.iter().all(Check::is_ok)
    }

    #[test]
    fn a_runtime_in_name_only_is_found_out() {
        let host = "Linux version 6.18.44-x (gcc) #1 SMP";
        assert!(!all_ok(&judge(&seen(host, true), Some("6.18.44-x"), &[])));
        let gvisor = "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016";
        assert!(all_ok(&judge(&seen(gvisor, true), Some("6.18.44-x"), &[])));
    }

    #[test]
    fn lost_files_and_refused_starts_are_told_with_their_fix() {
        let text = |checks: &[Check]| serde_json::to_string(checks).unwrap();
        let lost = judge(&seen("Linux version 4.4.0 #1", false), None, &[]);
        assert!(text(&lost).contains("--overlay2=none") && text(&lost).contains("warn"));
        let refused =
            judge(&Err("cannot run with network enabled in root network namespace".into()), None, &[]);
        assert!(text(&refused).contains("wrapper") && text(&refused).contains("fail"));
    }

    #[test]
    fn the_wrapper_is_asked_for_only_where_it_is_needed() {
        assert!(wrapper(Some(false), false, false, "runsc").is_ok());
        assert!(wrapper(Some(true), true, true, "/wrapper").is_ok());
        assert!(!wrapper(Some(true), false, false, "runsc").is_ok());
        assert!(!wrapper(None, false, false, "runsc").is_ok());
    }
}
