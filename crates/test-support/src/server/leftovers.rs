//! Finds everything on the host that belongs to a server or a Firecracker manager.

use std::path::Path;

use serde_json::Value;

use super::TestServer;
use crate::command::{pgrep, run};

impl TestServer {
    /// Everything outside the data directory with the installation's label or name, and the disks and loop devices of workspaces.
    /// Each is a kind and a name.
    pub fn leftovers(&self) -> Vec<String> {
        let id = self.installation();
        let filter = format!("label=emergent.installation={id}");
        let mut found = Vec::new();
        let mut list = |kind: &str, arguments: &[&str]| {
            let text = run("docker", arguments);
            let lines = text.lines().filter(|line| !line.trim().is_empty());
            found.extend(lines.map(|line| format!("{kind} {line}")));
        };
        list("container", &["ps", "--all", "--filter", &filter, "--format", "{{.Names}}"]);
        list("volume", &["volume", "ls", "--filter", &filter, "--format", "{{.Name}}"]);
        list("network", &["network", "ls", "--filter", &filter, "--format", "{{.Name}}"]);
        let short: String = id.replace('-', "").chars().skip(22).collect();
        if !short.is_empty() {
            found.extend(firewall_rules(&format!("em-{short}")));
        }
        let loops = run("losetup", &["--all"]);
        let own = loops.lines().filter(|line| line.contains(&*self.data_dir.to_string_lossy()));
        found.extend(own.map(|line| format!("loop device {line}")));
        for (kind, directory) in [("disk", "disks"), ("snapshot", "snapshots")] {
            let files = std::fs::read_dir(self.data_dir.join(directory)).into_iter().flatten().flatten();
            found.extend(files.map(|entry| format!("{kind} {}", entry.path().display())));
        }
        found.extend(leftovers_of_manager(&self.data_dir.join("firecracker")));
        found
    }
}

/// The firewall rules with this name in them.
fn firewall_rules(name: &str) -> Vec<String> {
    let mut found = Vec::new();
    for program in ["iptables-save", "ip6tables-save"] {
        let rules = run(program, &[]);
        let own = rules.lines().filter(|line| line.contains(name));
        found.extend(own.map(|line| format!("rule of {program} {line}")));
    }
    found
}

/// Everything that a Firecracker manager has made and not removed. Each is a kind and a name, or a path below its directory.
pub fn leftovers_of_manager(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let Ok(identity) = std::fs::read(directory.join("manager.json")) else {
        return found;
    };
    let identity: Value = serde_json::from_slice(&identity).expect("manager.json is JSON");
    let name = format!("fc{:06x}", identity["manager"].as_u64().expect("the manager has a number"));
    let names = |directory: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let interfaces = names(Path::new("/sys/class/net")).into_iter();
    found.extend(interfaces.filter(|each| each.starts_with(&name)).map(|each| format!("interface {each}")));
    found.extend(firewall_rules(&name));
    // Version 1 of control groups has a directory for each controller.
    let root = Path::new("/sys/fs/cgroup");
    let parents = [root.to_owned()].into_iter().chain(names(root).into_iter().map(|each| root.join(each)));
    let groups = parents.map(|parent| parent.join(format!("emergent-{name}")));
    found.extend(groups.filter(|each| each.exists()).map(|each| format!("control group {}", each.display())));
    for place in ["jails/firecracker", "machines", "snapshots"] {
        found.extend(names(&directory.join(place)).iter().map(|each| format!("{place}/{each}")));
    }
    let unfinished = names(&directory.join("images")).into_iter().filter(|each| each.ends_with(".new"));
    found.extend(unfinished.map(|each| format!("images/{each}")));
    // The arguments of Firecracker and of the double have the path of the jail or the id.
    let processes = pgrep(&["-af", &directory.join("jails").to_string_lossy()]);
    found.extend(processes.lines().map(|line| format!("process {line}")));
    found
}
