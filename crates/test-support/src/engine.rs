//! A second Docker engine, for what the host's engine must not be put through: one without gVisor, or with a gVisor
//! that does not work.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::keeper::Keeper;
use crate::server::run;

/// Starts and ends the engine as it is told to on its standard input, and removes everything when that ends.
const SCRIPT: &str = r#"
dir=$1
trap '' INT TERM HUP
start() {
    rm -f "$dir/ended" "$dir/pid" "$dir/exec/containerd/containerd.pid"
    # In a network of its own: an engine without a bridge removes that of another.
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

/// A Docker engine of its own.
pub struct TestEngine {
    directory: PathBuf,
    keeper: Keeper,
}

impl TestEngine {
    /// Starts an engine with this configuration (`daemon.json`).
    pub fn start(configuration: &str) -> Self {
        let directory =
            tempfile::Builder::new().prefix("emergent-engine-").tempdir().expect("a directory").keep();
        std::fs::write(directory.join("daemon.json"), configuration).expect("a file");
        let keeper = Keeper::start("emergent-test-engine", SCRIPT, &directory, Stdio::null());
        let engine = Self { directory, keeper };
        engine.wait_until_it_answers();
        engine
    }

    /// An engine with the host engine's gVisor and workspace image.
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
            assert!(begun.elapsed() < Duration::from_secs(60), "the engine did not start:\n{log}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends the engine with a signal (`TERM`, `KILL`).
    pub fn end(&mut self, signal: &str) {
        self.keeper.tell(signal);
        while !self.directory.join("ended").exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Makes the engine hang: it takes connections and answers nothing, until [`wake`](Self::wake).
    pub fn hang(&mut self) {
        self.signal("STOP");
    }

    /// Lets the engine go on after [`hang`](Self::hang).
    pub fn wake(&mut self) {
        self.signal("CONT");
    }

    fn signal(&mut self, signal: &str) {
        let done = self.directory.join(signal);
        let _ = std::fs::remove_file(&done);
        self.keeper.tell(signal);
        while !done.exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts it again.
    pub fn start_again(&mut self) {
        self.keeper.tell("start");
        self.wait_until_it_answers();
    }

    /// Its address, for `DOCKER_HOST`.
    pub fn host(&self) -> String {
        format!("unix://{}/docker.sock", self.directory.display())
    }

    /// The `docker` command, speaking to this engine.
    fn docker(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("docker");
        command.args(["--host", &self.host()]).args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Makes an empty image with this name.
    pub fn import_empty_image(&self, name: &str) {
        let mut child =
            self.docker(&["import", "-", name]).stdin(Stdio::piped()).spawn().expect("docker starts");
        // An archive of nothing: two empty blocks.
        child.stdin.take().expect("a pipe").write_all(&[0; 1024]).expect("docker reads");
        assert!(child.wait().expect("docker ends").success());
    }
}
