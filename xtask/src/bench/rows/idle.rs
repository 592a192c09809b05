//! The cost of idle workspaces: the memory of each guest agent, and of the server.

use anyhow::{Context, Result};
use serde_json::json;

use crate::bench::docker::docker;
use crate::bench::report::{Promise, Row, Unit};
use crate::bench::session::{Session, Workspace};
use crate::bench::stats::Summary;

const WORKSPACES: usize = 3;

pub(super) async fn measure(session: &Session) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut workspaces = Vec::new();
    for _ in 0..WORKSPACES {
        workspaces.push(session.create("gvisor").await?.1);
    }
    let name = format!("server RSS, {WORKSPACES} idle workspaces");
    let server = resident(&std::fs::read_to_string(format!("/proc/{}/status", session.server_pid()))?)?;
    rows.push(agents("guest agent RSS, gVisor, new", &workspaces, &[Promise::AtMost(4.0)])?);
    for workspace in &workspaces {
        call_tools(session, workspace).await?;
    }
    rows.push(agents("  … RSS after some calls", &workspaces, &[])?);
    for workspace in workspaces {
        session.destroy(workspace).await?;
    }

    let plain = [session.create("docker").await?.1];
    rows.push(agents("guest agent RSS, plain Docker, new", &plain, &[])?);
    for workspace in plain {
        session.destroy(workspace).await?;
    }
    rows.push(Row::alone(&name, Unit::Mebibytes, Summary::of(vec![server]).context("no sample")?, &[]));
    Ok(rows)
}

/// The agents' memory. A process of its own reads it, because a tool call would wake the agent.
fn agents(name: &str, workspaces: &[Workspace], promises: &[Promise]) -> Result<Row> {
    let sizes: Result<Vec<f64>> = workspaces
        .iter()
        .map(|workspace| resident(&docker(&["exec", &workspace.container(), "cat", "/proc/1/status"])?))
        .collect();
    let summary = Summary::of(sizes?).context("no workspace")?;
    Ok(Row::alone(name, Unit::Mebibytes, summary, promises))
}

/// Calls each of the common tools.
async fn call_tools(session: &Session, workspace: &Workspace) -> Result<()> {
    let calls = [
        ("write", json!({ "file_path": "a.txt", "content": "one\ntwo\n" })),
        ("read", json!({ "file_path": "a.txt" })),
        ("edit", json!({ "file_path": "a.txt", "old_string": "two", "new_string": "three" })),
        ("bash", json!({ "command": "seq 1000" })),
        ("glob", json!({ "pattern": "**/*.txt" })),
        ("grep", json!({ "pattern": "thr.e" })),
    ];
    for (tool, request) in &calls {
        session.tool(workspace, tool, request).await?;
    }
    Ok(())
}

/// VmRSS of a `/proc/PID/status`, in MiB.
pub(crate) fn resident(status: &str) -> Result<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kibibytes: f64 = line.trim().trim_end_matches("kB").trim().parse().context("VmRSS")?;
    Ok(kibibytes / 1024.0)
}
