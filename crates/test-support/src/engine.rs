//! A second Docker engine, for tests that would disturb the engine of the host: engines without gVisor, engines that are stopped,
//! killed or hang.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::command::run;
use crate::keeper::Keeper;

/// The time limit for a start, an end or a signal of the engine.
const LIMIT: Duration = Duration::from_secs(60);

/// Starts, ends and signals the engine by the orders on its standard input. When the input ends, it removes the engine.
const SCRIPT: &str = r#"
dir=$1
trap '' INT TERM HUP
start() {
    rm -f "$dir/ended" "$dir/pid" "$dir/exec/containerd/containerd.pid"
    # The engine gets its own network namespace: an engine without a bridge removes the bridge of another engine.
    setsid unshare --net dockerd --config-file "$dir/daemon.json" --data-root "$dir/data" --exec-root "$dir/exec" \
        --pidfile "$dir/pid" --host "unix://$dir/docker.sock" --bridge none --iptables=false --ip6tables=false \
        >>"$dir/log" 2>&1 </dev/null &
    engine=$!
}
start
while read -r order; do
    case $order in
    start) start ;;
    STOP | CONT) kill -s "$order" "$engine"; touch "$dir/$order" ;;
    *) kill -s "$order" "$engine"; wait "$engine"; touch "$dir/ended" ;;
    esac
done
[ ! -e "$dir/ended" ] || start
kill -s CONT "$engine"
for _ in $(seq 100); do docker --host "unix://$dir/docker.sock" version >/dev/null 2>&1 && break; sleep 0.2; done
docker --host "unix://$dir/docker.sock" ps --all --quiet | xargs -r docker --host "unix://$dir/docker.sock" rm --force >/dev/null 2>&1
kill -TERM "$engine"
wait "$engine"
for mount in $(awk -v dir="$dir/" 'index($2, dir) == 1 { print $2 }' /proc/mounts | sort -r); do umount "$mount"; done
rm -rf "$dir"
"#;

/// A running Docker engine.
pub struct TestEngine {
    directory: PathBuf,
    keeper: Keeper,
}

impl TestEngine {
    /// Starts an engine with this configuration (`daemon.json`).
    pub fn start(configuration: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("emergent-engine-").tempdir();
        let directory = directory.expect("a directory can be made").keep();
        std::fs::write(directory.join("daemon.json"), configuration)
            .expect("the configuration can be written");
        let keeper = Keeper::start("emergent-test-engine", SCRIPT, &directory, Stdio::null());
        let engine = Self { directory, keeper };
        engine.wait_until_it_answers();
        engine
    }

    /// Starts an engine with the gVisor runtime and the workspace image of the host's engine. `more` is added to `daemon.json`.
    pub fn start_with_gvisor(more: &str) -> Self {
        let runtime = run("docker", &["info", "--format", "{{json (index .Runtimes \"runsc\")}}"]);
        let engine = Self::start(&format!("{{\"runtimes\":{{\"runsc\":{}}}{more}}}", runtime.trim()));
        let copy = format!("docker save emergent/workspace:latest | docker --host {} load", engine.host());
        run("bash", &["-o", "pipefail", "-c", &copy]);
        engine
    }

    fn wait_until_it_answers(&self) {
        let begun = Instant::now();
        while !self.docker(&["version"]).status().is_ok_and(|status| status.success()) {
            let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            assert!(begun.elapsed() < LIMIT, "the engine did not start:\n{log}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends the engine with a signal (`TERM`, `KILL`).
    pub fn end(&mut self, signal: &str) {
        self.order(signal, "ended");
    }

    /// Stops the engine's process (SIGSTOP). It takes connections and answers nothing, until [`unfreeze`](Self::unfreeze).
    pub fn freeze(&mut self) {
        self.signal("STOP");
    }

    /// Continues the engine's process (SIGCONT).
    pub fn unfreeze(&mut self) {
        self.signal("CONT");
    }

    fn signal(&mut self, signal: &str) {
        let _ = std::fs::remove_file(self.directory.join(signal));
        self.order(signal, signal);
    }

    /// Sends the script an order, and waits for the file that the script makes when the order is done.
    fn order(&mut self, order: &str, file: &str) {
        self.keeper.send(order);
        let (begun, done) = (Instant::now(), self.directory.join(file));
        while !done.exists() {
            assert!(begun.elapsed() < LIMIT, "the order '{order}' is not done");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts the engine again.
    pub fn start_again(&mut self) {
        self.keeper.send("start");
        self.wait_until_it_answers();
    }

    /// The engine's address, for `DOCKER_HOST`.
    pub fn host(&self) -> String {
        format!("unix://{}/docker.sock", self.directory.display())
    }

    /// The `docker` command for this engine.
    fn docker(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("docker");
        command.args(["--host", &self.host()]).args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Makes an empty image with this name.
    pub fn import_empty_image(&self, name: &str) {
        let mut child =
            self.docker(&["import", "-", name]).stdin(Stdio::piped()).spawn().expect("docker starts");
        // Two empty blocks are an empty tar archive.
        child.stdin.take().expect("stdin is piped").write_all(&[0; 1024]).expect("docker reads its stdin");
        assert!(child.wait().expect("docker ends").success());
    }
}
