//! A PostgreSQL cluster for one test process.
//!
//! The cluster has its own directory, Unix socket and TCP port on the loopback address. Each test makes a database in it. A script
//! (`postgres.sh`) owns the cluster: it waits for the end of the test process, then stops PostgreSQL and removes the directory.
//! So nothing is left, even if the test is killed.
//!
//! All functions panic on failure, like assertions.

use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs};

use crate::keeper::Keeper;

const SCRIPT: &str = include_str!("postgres.sh");
/// Another process may take a free port before PostgreSQL does.
const PORTS_TO_TRY: usize = 10;

/// A running cluster. Dropping it stops PostgreSQL and removes its files.
#[derive(Debug)]
pub struct TestPostgres {
    keeper: Keeper,
    bin: PathBuf,
    directory: PathBuf,
    port: u16,
    databases: AtomicU32,
}

impl TestPostgres {
    /// Starts a cluster. This takes one or two seconds.
    pub fn start() -> Self {
        let bin = find_programs();
        let mut keeper = Keeper::start("emergent-test-postgres", SCRIPT, &bin, Stdio::piped());
        let mut answers = Answers(BufReader::new(keeper.output()));
        let directory = answers.next("directory ").expect("PostgreSQL's initdb works").into();
        let mut cluster = Self { keeper, bin, directory, port: 0, databases: AtomicU32::new(0) };
        for _ in 0..PORTS_TO_TRY {
            cluster.port = free_port();
            cluster.keeper.send(&cluster.port.to_string());
            if answers.next("re").as_deref() == Some("ady") {
                return cluster;
            }
        }
        panic!("PostgreSQL did not start on any of {PORTS_TO_TRY} ports");
    }

    /// The cluster of this test process. The first caller starts it, and it stops when the process ends.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<TestPostgres> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// Makes an empty database and returns its URL.
    pub fn fresh_database(&self) -> String {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{number}");
        let create = |options: &[&str]| {
            Command::new(self.bin.join("createdb"))
                .args(options)
                .arg("-h")
                .arg(&self.directory)
                .args(["-p", &self.port.to_string(), "-U", "emergent", &name])
                .stdin(Stdio::null())
                .output()
                .expect("createdb starts")
        };
        // With fsync off this strategy is three times as fast as the default. PostgreSQL 14 does not have it.
        if !create(&["--strategy=file_copy"]).status.success() {
            let made = create(&[]);
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        }
        format!("postgres://emergent@127.0.0.1:{}/{name}", self.port)
    }

    /// The directory with the cluster's files and its Unix socket.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The TCP port on the loopback address.
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// The output of the script.
struct Answers(BufReader<ChildStdout>);

impl Answers {
    /// The rest of the next line that begins with `prefix`. Lines before it are printed.
    fn next(&mut self, prefix: &str) -> Option<String> {
        for line in self.0.by_ref().lines() {
            let line = line.ok()?;
            if let Some(rest) = line.strip_prefix(prefix) {
                return Some(rest.to_owned());
            }
            eprintln!("postgres: {line}");
        }
        None
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
    listener.local_addr().expect("the listener has an address").port()
}

/// The directory of PostgreSQL's programs: Debian's of the newest version, or one on `PATH`.
fn find_programs() -> PathBuf {
    let complete = |directory: &PathBuf| {
        ["initdb", "postgres", "pg_isready", "createdb"]
            .iter()
            .all(|program| directory.join(program).exists())
    };
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .collect();
    versions.sort_unstable_by(|a, b| b.cmp(a));
    let path = env::var_os("PATH").unwrap_or_default();
    versions
        .into_iter()
        .map(|(_, directory)| directory)
        .chain(env::split_paths(&path))
        .find(complete)
        .expect("PostgreSQL is installed (Debian: apt-get install postgresql)")
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// The process id of a cluster's PostgreSQL.
    fn server_process(directory: &Path) -> PathBuf {
        let text = fs::read_to_string(directory.join("data/postmaster.pid")).unwrap();
        Path::new("/proc").join(text.lines().next().unwrap())
    }

    #[test]
    fn dropped_cluster_leaves_no_process_and_no_directory() {
        let cluster = TestPostgres::start();
        let directory = cluster.directory().to_owned();
        let server = server_process(&directory);
        assert_ne!(cluster.fresh_database(), cluster.fresh_database());
        assert!(directory.is_dir() && server.exists());
        drop(cluster);
        assert!(!directory.exists() && !server.exists());
    }

    /// The next test runs this in a process of its own, and kills it.
    #[test]
    #[ignore = "waits to be killed"]
    fn waits_with_a_cluster() {
        let cluster = TestPostgres::start();
        println!("\ndirectory {}", cluster.directory().display());
        loop {
            thread::park();
        }
    }

    #[test]
    fn cluster_of_a_killed_test_leaves_no_process_and_no_directory() {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "postgres::tests::waits_with_a_cluster", "--ignored", "--nocapture"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut answers = Answers(BufReader::new(child.stdout.take().unwrap()));
        let directory = PathBuf::from(answers.next("directory ").unwrap());
        let server = server_process(&directory);
        child.kill().unwrap();
        child.wait().unwrap();
        let start = Instant::now();
        while directory.exists() || server.exists() {
            assert!(start.elapsed() < Duration::from_secs(60), "{} is left", directory.display());
            thread::yield_now();
        }
    }
}
