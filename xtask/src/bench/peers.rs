//! Other bridges from stdio to HTTP, for comparison. They are installed from their registries, if these can be reached.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::process::{Child, Command};

use super::session::{Session, target_dir};

const SUPERGATEWAY: &str = "supergateway@4.0.0";
const MCP_PROXY: &str = "mcp-proxy==0.13.0";
/// The time limit for a start.
const STARTS_WITHIN: Duration = Duration::from_secs(30);
/// The time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_millis(300);

/// A running bridge.
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    pub(crate) url: String,
    process: Child,
}

/// All bridges.
#[derive(Default)]
pub(crate) struct Peers {
    pub(crate) running: Vec<Peer>,
    /// The bridges that could not be installed or started, with the reason.
    pub(crate) missing: Vec<(&'static str, String)>,
}

impl Peers {
    /// Starts each bridge with the fixture beside the server's binary as its child.
    pub(crate) async fn start(session: &Session, server_binary: &str) -> Self {
        let mut peers = Self::default();
        let fixture = Path::new(server_binary).with_file_name("mcp-chaos");
        session.progress("installing other bridges …");
        for (name, started) in
            [("supergateway", supergateway(&fixture).await), ("mcp-proxy", mcp_proxy(&fixture).await)]
        {
            match started {
                Ok((url, process)) => peers.running.push(Peer { name, url, process }),
                Err(error) => peers.missing.push((name, format!("{error:#}"))),
            }
        }
        peers
    }

    /// Ends the bridges and their children.
    pub(crate) async fn end(self) {
        for mut peer in self.running {
            if let Some(pid) = peer.process.id() {
                // Each bridge leads a process group.
                let group = format!("-{pid}");
                let _ = Command::new("kill").args(["-TERM", "--", &group]).status().await;
                // Children may need the whole time, though the bridge has ended. The group has no event for its end.
                tokio::time::sleep(GRACE).await;
                let _ =
                    Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status().await;
            }
            let _ = peer.process.wait().await;
        }
    }
}

async fn supergateway(fixture: &Path) -> Result<(String, Child)> {
    let directory = directory("supergateway")?;
    let script = directory.join("node_modules/supergateway/dist/index.js");
    if !script.exists() {
        let prefix = directory.to_string_lossy().into_owned();
        let npm =
            ["install", "--prefix", &prefix, "--ignore-scripts", "--no-audit", "--no-fund", SUPERGATEWAY];
        run("npm", &npm).await?;
    }
    let port = free_port()?;
    let mut command = Command::new("node");
    command.arg(script).arg("--stdio").arg(fixture);
    command.args(["--outputTransport", "streamableHttp", "--stateful", "--logLevel", "none", "--port"]);
    listening(command.arg(port.to_string()), port).await
}

async fn mcp_proxy(fixture: &Path) -> Result<(String, Child)> {
    let directory = directory("mcp-proxy")?;
    let program = directory.join("bin/mcp-proxy");
    if !program.exists() {
        run("python3", &["-m", "venv", &directory.to_string_lossy()]).await?;
        run(&directory.join("bin/pip").to_string_lossy(), &["install", "--quiet", MCP_PROXY]).await?;
    }
    let port = free_port()?;
    let mut command = Command::new(program);
    command.args(["--port", &port.to_string(), "--log-level", "ERROR", "--"]).arg(fixture);
    listening(&mut command, port).await
}

fn directory(name: &str) -> Result<PathBuf> {
    let directory = target_dir()?.join("bench-peers").join(name);
    std::fs::create_dir_all(&directory)?;
    Ok(directory)
}

async fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .await
        .with_context(|| program.to_owned())?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{program} failed: {}", stderr.lines().last().unwrap_or_default());
    }
    Ok(())
}

/// A free port. Another process may take it before the caller does.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Starts a bridge and waits until it listens.
async fn listening(command: &mut Command, port: u16) -> Result<(String, Child)> {
    let mut process =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn()?;
    let begun = Instant::now();
    while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        if let Some(status) = process.try_wait()? {
            bail!("it ended with {status}");
        }
        if begun.elapsed() > STARTS_WITHIN {
            process.kill().await?;
            bail!("it does not listen within {} s", STARTS_WITHIN.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok((format!("http://127.0.0.1:{port}/mcp"), process))
}
