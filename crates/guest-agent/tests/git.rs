//! The reasons of failed git operations, with the real agent and the image's git.
#![allow(clippy::unwrap_used, reason = "a test that fails shall say where")]

mod sandbox;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use emergent_guest_client::CallError;
use emergent_guest_protocol::{BashCall, Configuration, GitFailureReason, GuestCall};
use emergent_wire::git::{GitAction, GitAnswer, GitRequest};
use emergent_wire::tools::{BashAnswer, BashRequest};
use emergent_wire::{ErrorCode, ErrorDetail, OperationId};
use sandbox::{Agent, WORKSPACE_BYTES, inside};

/// Runs git beside the agent.
fn git(directory: &Path, arguments: &[&str]) {
    let identity = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"];
    let output = Command::new("git").current_dir(directory).args(identity).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Runs the git tool.
async fn run(agent: &Agent, request: GitRequest) -> Result<GitAnswer, ErrorDetail> {
    match agent.client.start(&GuestCall::Git(request)).await.unwrap().answer().await {
        Ok(answer) => Ok(answer),
        Err(CallError::Failed(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

async fn clone(agent: &Agent, url: &str) -> Result<GitAnswer, ErrorDetail> {
    run(agent, GitRequest { repository_url: Some(url.to_owned()), ..GitRequest::new(GitAction::Clone) }).await
}

/// The code and the reason of a failure.
fn told(result: Result<GitAnswer, ErrorDetail>) -> (ErrorCode, Option<GitFailureReason>) {
    let error = result.unwrap_err();
    (error.code, GitFailureReason::of(&error))
}

/// An HTTP server that answers every request with this head.
fn http_server(head: &'static str) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            answer(stream.unwrap(), head);
        }
    });
    port
}

fn answer(mut stream: TcpStream, head: &str) {
    let reader = BufReader::new(stream.try_clone().unwrap());
    let _ = reader.lines().map_while(Result::ok).find(String::is_empty);
    let _ = write!(stream, "HTTP/1.1 {head}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
}

const UNAUTHORIZED: &str = "401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"git\"";

#[test]
fn a_remote_that_asks_for_credentials_or_rejects_them_needs_authentication() {
    inside(
        "a_remote_that_asks_for_credentials_or_rejects_them_needs_authentication",
        WORKSPACE_BYTES,
        async || {
            let agent = Agent::start().await;
            let needed = (ErrorCode::GitFailed, Some(GitFailureReason::AuthenticationRequired));
            let port = http_server(UNAUTHORIZED);
            assert_eq!(told(clone(&agent, &format!("http://127.0.0.1:{port}/a.git")).await), needed);
            // The agent is not asked for credentials that the remote's URL has, but git tells it that they are wrong.
            let workspace = Path::new("/workspace");
            git(workspace, &["init", "--quiet"]);
            git(workspace, &["commit", "--quiet", "--allow-empty", "--message=First"]);
            let url = format!("http://user:wrong@127.0.0.1:{port}/a.git");
            git(workspace, &["remote", "add", "origin", &url]);
            for action in [GitAction::Pull, GitAction::Push] {
                let error = run(&agent, GitRequest::new(action)).await.unwrap_err();
                assert!(!error.message.contains("wrong"), "{error}");
                if action == GitAction::Push {
                    assert_eq!(GitFailureReason::of(&error), needed.1, "{error}");
                }
            }
        },
    );
}

#[test]
fn a_remote_that_refuses_has_another_reason_than_one_that_is_not_reached() {
    inside(
        "a_remote_that_refuses_has_another_reason_than_one_that_is_not_reached",
        WORKSPACE_BYTES,
        async || {
            let agent = Agent::start().await;
            let port = http_server("404 Not Found");
            let mut daemon = Daemon::start(&[]);
            for url in [
                format!("http://127.0.0.1:{port}/a.git"),
                format!("git://127.0.0.1:{}/no-such-repository", daemon.port),
            ] {
                assert_eq!(told(clone(&agent, &url).await), (ErrorCode::GitFailed, None), "{url}");
            }
            daemon.stop();
            let unreachable = (ErrorCode::GitFailed, Some(GitFailureReason::NetworkUnreachable));
            for url in ["http://127.0.0.1:1/a.git", "https://no-such-host.invalid/a.git"] {
                assert_eq!(told(clone(&agent, url).await), unreachable, "{url}");
            }
            assert_eq!(std::fs::read_dir("/workspace").unwrap().count(), 0);
        },
    );
}

/// Sets variables of the workspace.
async fn configure(agent: &Agent, variables: &[(&str, &str)]) {
    let environment =
        variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let configuration = Configuration { environment, ..Configuration::default() };
    let call = agent.client.start(&GuestCall::Configure(configuration)).await.unwrap();
    call.answer::<serde_json::Value>().await.unwrap();
}

/// A repository with one commit in a directory of the workspace.
fn repository(path: &str) -> &Path {
    let path = Path::new(path);
    std::fs::create_dir(path).unwrap();
    git(path, &["init", "--quiet"]);
    git(path, &["commit", "--quiet", "--allow-empty", "--message=First"]);
    path
}

fn in_directory(action: GitAction, path: &str) -> GitRequest {
    GitRequest { path: Some(path.to_owned()), ..GitRequest::new(action) }
}

#[test]
fn a_remote_that_refuses_through_a_proxy_is_reached() {
    inside("a_remote_that_refuses_through_a_proxy_is_reached", WORKSPACE_BYTES, async || {
        const DEAD: &str = "http://127.0.0.1:1";
        let agent = Agent::start().await;
        let port = http_server("404 Not Found");
        let (url, proxy) = (format!("http://127.0.0.1:{port}/a.git"), format!("http://127.0.0.1:{port}"));
        let refused = (ErrorCode::GitFailed, None);
        // Neither variable is for this URL.
        configure(&agent, &[("https_proxy", DEAD)]).await;
        assert_eq!(told(clone(&agent, &url).await), refused);
        configure(&agent, &[("http_proxy", DEAD), ("no_proxy", "127.0.0.1")]).await;
        assert_eq!(told(clone(&agent, &url).await), refused);
        configure(&agent, &[("http_proxy", DEAD)]).await;
        let unreachable = (ErrorCode::GitFailed, Some(GitFailureReason::NetworkUnreachable));
        assert_eq!(told(clone(&agent, &url).await), unreachable);
        // A remote with a proxy of its own.
        configure(&agent, &[]).await;
        let directory = repository("/workspace/repository");
        git(directory, &["remote", "add", "origin", "http://no-such-host.invalid/a.git"]);
        git(directory, &["config", "remote.origin.proxy", &proxy]);
        for action in [GitAction::Pull, GitAction::Push] {
            assert_eq!(told(run(&agent, in_directory(action, "repository")).await), refused, "{action:?}");
        }
    });
}

#[test]
fn a_push_that_a_remote_rejects_has_reached_it() {
    /// Runs the remote's command here, as `ssh` does elsewhere.
    const SSH: &str = "sh -c 'eval \"$2\"' ssh";
    inside("a_push_that_a_remote_rejects_has_reached_it", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        configure(&agent, &[("GIT_SSH_COMMAND", SSH), ("GIT_SSH_VARIANT", "simple")]).await;
        repository("/workspace/theirs");
        let directory = repository("/workspace/ours");
        // The name is an alias of ssh's configuration; the remote's branch is not an ancestor of this one.
        git(directory, &["remote", "add", "origin", "git@work:/workspace/theirs"]);
        git(directory, &["checkout", "--quiet", "-b", "other"]);
        git(Path::new("/workspace/theirs"), &["checkout", "--quiet", "-b", "other"]);
        git(directory, &["commit", "--quiet", "--allow-empty", "--amend", "--message=Other"]);
        let error = run(&agent, in_directory(GitAction::Push, "ours")).await.unwrap_err();
        assert!(error.message.contains("rejected"), "{error}");
        assert_eq!((error.code, GitFailureReason::of(&error)), (ErrorCode::GitFailed, None), "{error}");
    });
}

#[test]
fn a_git_that_can_not_be_started_does_not_make_a_directory_no_repository() {
    inside(
        "a_git_that_can_not_be_started_does_not_make_a_directory_no_repository",
        WORKSPACE_BYTES,
        async || {
            let agent = Agent::start().await;
            repository("/workspace/repository");
            // Fails once, and can't be started again.
            std::fs::create_dir("/workspace/bin").unwrap();
            let program = Path::new("/workspace/bin/git");
            std::fs::write(program, "#!/bin/sh\nchmod a-x \"$0\"\nexit 128\n").unwrap();
            std::fs::set_permissions(program, PermissionsExt::from_mode(0o755)).unwrap();
            configure(&agent, &[("PATH", "/workspace/bin:/usr/bin:/bin")]).await;
            let failed = run(&agent, in_directory(GitAction::Status, "repository")).await;
            assert_eq!(told(failed), (ErrorCode::GitFailed, None));
        },
    );
}

#[test]
fn a_remote_that_breaks_connections_or_is_broken_does_not_answer() {
    inside("a_remote_that_breaks_connections_or_is_broken_does_not_answer", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        let resetting = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = resetting.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in resetting.incoming() {
                // Bytes that were not read make the close a reset.
                stream.unwrap().peek(&mut [0]).unwrap();
            }
        });
        let unreachable = (ErrorCode::GitFailed, Some(GitFailureReason::NetworkUnreachable));
        for url in [
            format!("http://127.0.0.1:{port}/a.git"),
            format!("https://127.0.0.1:{port}/a.git"),
            format!("git://127.0.0.1:{port}/a.git"),
            format!("http://127.0.0.1:{}/a.git", http_server("503 Service Unavailable")),
        ] {
            assert_eq!(told(clone(&agent, &url).await), unreachable, "{url}");
        }
    });
}

#[test]
fn a_directory_outside_a_repository_is_not_a_repository() {
    inside("a_directory_outside_a_repository_is_not_a_repository", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        let expected = (ErrorCode::GitFailed, Some(GitFailureReason::NotARepository));
        for action in [GitAction::Status, GitAction::Diff, GitAction::Log, GitAction::Pull] {
            assert_eq!(told(run(&agent, GitRequest::new(action)).await), expected, "{action:?}");
        }
        // In a repository, a branch that is not there is git's refusal.
        git(Path::new("/workspace"), &["init", "--quiet"]);
        let checkout =
            GitRequest { branch: Some("no-such-branch".into()), ..GitRequest::new(GitAction::Checkout) };
        assert_eq!(told(run(&agent, checkout).await), (ErrorCode::GitFailed, None));
    });
}

#[test]
fn a_clone_that_fills_the_disk_and_one_that_fits_differ() {
    const DISK_BYTES: u64 = 8 << 20;
    inside("a_clone_that_fills_the_disk_and_one_that_fits_differ", DISK_BYTES, async || {
        let agent = Agent::start().await;
        let mut daemon = Daemon::start(&[("small", 1 << 10), ("large", 16 << 20)]);
        let port = daemon.port;
        let url = |name| format!("git://127.0.0.1:{port}/{name}");
        let full = told(clone(&agent, &url("large")).await);
        assert_eq!(full, (ErrorCode::DiskFull, Some(GitFailureReason::DiskFull)));
        assert_eq!(std::fs::read_dir("/workspace").unwrap().count(), 0);
        assert!(clone(&agent, &url("small")).await.unwrap().success);
        daemon.stop();
    });
}

/// git's own server with repositories of one random file each.
struct Daemon {
    process: Child,
    port: u16,
    repositories: tempfile::TempDir,
}

impl Daemon {
    fn start(sizes: &[(&str, u64)]) -> Self {
        let repositories = tempfile::tempdir().unwrap();
        for (name, bytes) in sizes {
            let repository = repositories.path().join(name);
            std::fs::create_dir(&repository).unwrap();
            git(&repository, &["init", "--quiet"]);
            let mut random = File::open("/dev/urandom").unwrap().take(*bytes);
            std::io::copy(&mut random, &mut File::create(repository.join("file")).unwrap()).unwrap();
            git(&repository, &["add", "--all"]);
            git(&repository, &["commit", "--quiet", "--message=First"]);
        }
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let mut process = Command::new("git")
            .args(["daemon", "--export-all", "--reuseaddr", "--listen=127.0.0.1"])
            .arg(format!("--port={port}"))
            .arg(format!("--base-path={}", repositories.path().display()))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(process.try_wait().unwrap().is_none());
            std::thread::yield_now();
        }
        Self { process, port, repositories }
    }

    fn repository(&self, name: &str) -> PathBuf {
        self.repositories.path().join(name)
    }

    fn stop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

#[test]
fn a_clone_takes_full_names_of_branches_and_tags_and_refuses_other_names() {
    inside(
        "a_clone_takes_full_names_of_branches_and_tags_and_refuses_other_names",
        WORKSPACE_BYTES,
        async || {
            let agent = Agent::start().await;
            let mut daemon = Daemon::start(&[("project", 1 << 10)]);
            let repository = daemon.repository("project");
            git(&repository, &["tag", "v1"]);
            git(&repository, &["update-ref", "refs/pull/1/head", "HEAD"]);
            let clone = |branch: &str, limit: Option<u32>| GitRequest {
                repository_url: Some(format!("git://127.0.0.1:{}/project", daemon.port)),
                branch: Some(branch.to_owned()),
                limit,
                ..in_directory(GitAction::Clone, "clone")
            };
            let directory = Path::new("/workspace/clone");
            for limit in [None, Some(1)] {
                for (name, branch) in [("refs/heads/main", Some("main")), ("refs/tags/v1", None)] {
                    let answer = run(&agent, clone(name, limit)).await.unwrap();
                    assert_eq!(answer.status.unwrap().branch.as_deref(), branch, "{name}");
                    std::fs::remove_dir_all(directory).unwrap();
                }
                // The remote has some of these, but a clone takes branches and tags only.
                for name in ["refs/pull/1/head", "pull/1/head", "heads/main", "HEAD", "no-such-branch"] {
                    let refused = told(run(&agent, clone(name, limit)).await);
                    assert_eq!(refused, (ErrorCode::GitFailed, None), "{name}");
                    assert!(!directory.exists());
                }
            }
            daemon.stop();
        },
    );
}

/// A proxy that ends connections after some bytes: this number of them, or all.
fn interrupting_proxy(to: u16, interrupted: usize) -> u16 {
    const FIRST_BYTES: u64 = 64 << 10;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for (number, client) in listener.incoming().enumerate() {
            let limit = if number < interrupted { FIRST_BYTES } else { u64::MAX };
            let (mut client, server) = (client.unwrap(), TcpStream::connect(("127.0.0.1", to)).unwrap());
            let (mut requests, mut forward) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut requests, &mut forward);
                let _ = forward.shutdown(Shutdown::Both);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut server.take(limit), &mut client);
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    });
    port
}

#[test]
fn a_clone_whose_connection_broke_was_interrupted() {
    inside("a_clone_whose_connection_broke_was_interrupted", WORKSPACE_BYTES, async || {
        let agent = Agent::start().await;
        let mut daemon = Daemon::start(&[("project", 1 << 20)]);
        let url =
            |interrupted| format!("git://127.0.0.1:{}/project", interrupting_proxy(daemon.port, interrupted));
        let expected = (ErrorCode::GitFailed, Some(GitFailureReason::TransferInterrupted));
        // The remote answers short requests.
        assert_eq!(told(clone(&agent, &url(usize::MAX)).await), expected);
        let url = url(1);
        assert_eq!(told(clone(&agent, &url).await), expected);
        assert_eq!(std::fs::read_dir("/workspace").unwrap().count(), 0);
        assert!(clone(&agent, &url).await.unwrap().success);
        daemon.stop();
    });
}

#[test]
fn a_process_that_was_killed_for_writing_is_not_the_reason_of_another_command() {
    /// Writes until it is killed, and has then written more than any other process here.
    const WRITE: &str = "while printf '%0262144d' 0; do sleep 0.1; done > /workspace/large";
    inside(
        "a_process_that_was_killed_for_writing_is_not_the_reason_of_another_command",
        WORKSPACE_BYTES,
        async || {
            let agent = Agent::start().await;
            let limited = Configuration { watched_disk_bytes: Some(1 << 20), ..Configuration::default() };
            let configured = agent.client.start(&GuestCall::Configure(limited)).await.unwrap();
            configured.answer::<serde_json::Value>().await.unwrap();
            let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let url = format!("http://{}/a.git", server.local_addr().unwrap());
            let request = GitRequest {
                repository_url: Some(url),
                path: Some("clone".into()),
                ..GitRequest::new(GitAction::Clone)
            };
            let clone = agent.client.start(&GuestCall::Git(request)).await.unwrap();
            // git waits for an answer while the other command is killed.
            let (first, _) = server.accept().unwrap();
            let bash = BashCall {
                operation_id: OperationId::generate(),
                request: BashRequest { command: WRITE.to_owned(), ..BashRequest::default() },
                stream: false,
                collect: false,
            };
            let bash: BashAnswer =
                agent.client.start(&GuestCall::Bash(bash)).await.unwrap().answer().await.unwrap();
            assert!(bash.notes.iter().any(|note| note.contains("was killed")), "{bash:?}");
            answer(first, "404 Not Found");
            std::thread::spawn(move || {
                server.incoming().for_each(|next| answer(next.unwrap(), "404 Not Found"))
            });
            match clone.answer::<GitAnswer>().await.unwrap_err() {
                CallError::Failed(error) => assert_eq!(told(Err(error)), (ErrorCode::GitFailed, None)),
                error => panic!("{error}"),
            }
        },
    );
}
