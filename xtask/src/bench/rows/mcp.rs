//! A tool of a hosted MCP server is called: against the same server on raw stdio, and against other bridges to stdio.
//!
//! The server answers at once, so what is measured is the way to it and back. Raw stdio is `docker run --interactive` of the
//! same image on the same runtime, by one process that does nothing else. The other bridges run the server as a plain
//! child, without a sandbox; ours runs it in a container of plain Docker there.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use emergent_test_support::mcp;
use futures_util::future::try_join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::bench::peers::{Peer, Peers};
use crate::bench::report::{Promise, Ratio, Row};
use crate::bench::session::{Session, release_binary};
use crate::bench::turns::{Pair, Rounds, in_turns};

const SERVERS: &str = "/api/v1/mcp/servers";
/// Clients at once.
const MANY: usize = 16;

pub(super) async fn measure(session: &Session) -> Result<Vec<Row>> {
    let image = mcp::image(&release_binary()?);
    let mut rows = Vec::new();
    for (provider, runtime) in [("gvisor", Some("runsc")), ("docker", None)] {
        let hosted = Hosted::register(session, provider, &image).await?;
        let pair = against_raw_stdio(session, &hosted, runtime, &image).await?;
        let name = format!("mcp call / raw stdio, {provider}");
        rows.push(Row::compared(&name, pair, Ratio::TimesAsLong, &[Promise::AtMostOver(1.0)]));
        if provider == "docker" {
            rows.extend(against_bridges(session, &hosted).await?);
        }
        hosted.remove().await?;
    }
    Ok(rows)
}

/// A hosted server.
struct Hosted<'a> {
    session: &'a Session,
    name: String,
}

impl<'a> Hosted<'a> {
    async fn register(session: &'a Session, provider: &str, image: &str) -> Result<Self> {
        let name = format!("bench-{provider}");
        let limits = json!({ "cpu": "2" });
        let body = json!({ "name": name, "image": image, "provider": provider, "resource_limits": limits });
        let (_, made) = session.request(Method::POST, SERVERS, Some(&body)).await?;
        ensure!(made["status"] == "ready", "the MCP server is not ready: {made}");
        Ok(Self { session, name })
    }

    async fn call(&self) -> Result<Duration> {
        let body = json!({ "method": "tools/call", "params": echo() });
        let path = format!("{SERVERS}/{}/call", self.name);
        let (took, answer) = self.session.request(Method::POST, &path, Some(&body)).await?;
        ensure!(answer["result"]["content"][0]["text"] == "hello", "{answer}");
        Ok(took)
    }

    async fn remove(self) -> Result<()> {
        self.session.request(Method::DELETE, &format!("{SERVERS}/{}", self.name), None).await.map(drop)
    }
}

fn echo() -> Value {
    json!({ "name": "echo", "arguments": { "text": "hello" } })
}

fn initialize() -> Value {
    let info = json!({ "name": "bench", "version": "1" });
    json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info })
}

fn request(id: u64, method: &str, params: &Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
}

async fn against_raw_stdio(
    session: &Session,
    hosted: &Hosted<'_>,
    runtime: Option<&str>,
    image: &str,
) -> Result<Pair> {
    let mut raw = Raw::start(session, runtime, image).await?;
    let rounds = Rounds { warm_up: 20, counted: session.either(200, 1000) };
    let pair = in_turns(rounds, async || hosted.call().await, async || raw.call().await).await?;
    raw.end().await?;
    Ok(pair)
}

/// The same server, spoken to directly.
struct Raw {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Raw {
    async fn start(session: &Session, runtime: Option<&str>, image: &str) -> Result<Self> {
        let mut docker = Command::new("docker");
        docker.args(["run", "--interactive", "--rm", "--network", "none", "--label", &session.label()]);
        docker.args(runtime.map(|runtime| format!("--runtime={runtime}")));
        let mut process =
            docker.arg(image).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let (input, output) =
            (process.stdin.take().context("stdin")?, process.stdout.take().context("stdout")?);
        let mut raw = Self { process, input, output: BufReader::new(output).lines() };
        raw.ask("initialize", &initialize()).await?;
        Ok(raw)
    }

    async fn ask(&mut self, method: &str, params: &Value) -> Result<String> {
        let line = format!("{}\n", request(1, method, params));
        self.input.write_all(line.as_bytes()).await?;
        self.output.next_line().await?.context("the server has ended")
    }

    async fn call(&mut self) -> Result<Duration> {
        let begun = Instant::now();
        let answer = self.ask("tools/call", &echo()).await?;
        let took = begun.elapsed();
        ensure!(answer.contains("hello"), "{answer}");
        Ok(took)
    }

    async fn end(mut self) -> Result<()> {
        drop(self.input);
        tokio::time::timeout(Duration::from_secs(20), self.process.wait()).await??;
        Ok(())
    }
}

/// As many calls, by one client and by many, through ours and through each of the others.
async fn against_bridges(session: &Session, hosted: &Hosted<'_>) -> Result<Vec<Row>> {
    let ours = Endpoint {
        url: format!("{}{SERVERS}/{}/mcp", session.url(), hosted.name),
        token: Some(session.token().to_owned()),
    };
    let peers = Peers::start(session, &release_binary()?).await;
    let mut rows = Vec::new();
    for Peer { name, url, .. } in &peers.running {
        let theirs = Endpoint { url: url.clone(), token: None };
        for (clients, calls) in [(1, 100), (MANY, session.either(10, 30))] {
            let (ours, theirs) = (ours.open(clients).await?, theirs.open(clients).await?);
            let rounds = Rounds { warm_up: 1, counted: session.either(3, 9) };
            let run = async |clients: &[Client]| {
                let begun = Instant::now();
                try_join_all(clients.iter().map(|client| client.calls(calls))).await?;
                Ok(begun.elapsed())
            };
            let pair = in_turns(rounds, async || run(&ours).await, async || run(&theirs).await).await?;
            let rate = |summary: &crate::bench::stats::Summary| {
                #[allow(clippy::cast_precision_loss, reason = "a few hundred calls")]
                let all = (clients * calls) as f64;
                all / summary.p50 * 1e3
            };
            session.progress(&format!(
                "{clients} clients: {:.0} calls a second, {name} {:.0}",
                rate(&pair.ours),
                rate(&pair.baseline)
            ));
            let promises: &[Promise] =
                if clients == MANY { &[Promise::AtLeastTimes(5.0)] } else { &[Promise::Wish(5.0)] };
            let row = format!("{} mcp calls, {clients} clients / {name}", clients * calls);
            rows.push(Row::compared(&row, pair, Ratio::TimesFaster, promises));
        }
    }
    for (name, why) in &peers.missing {
        session.progress(&format!("{name} is not compared with: {why}"));
    }
    peers.end().await;
    Ok(rows)
}

/// Where MCP clients connect.
struct Endpoint {
    url: String,
    token: Option<String>,
}

impl Endpoint {
    /// So many clients, each with a session and a connection of its own.
    async fn open(&self, clients: usize) -> Result<Vec<Client>> {
        try_join_all((0..clients).map(|_| Client::open(self))).await
    }
}

struct Client {
    http: reqwest::Client,
    url: String,
    token: Option<String>,
    session: Option<String>,
}

impl Client {
    async fn open(endpoint: &Endpoint) -> Result<Self> {
        let http = reqwest::Client::builder().pool_max_idle_per_host(1).no_proxy().build()?;
        let (url, token) = (endpoint.url.clone(), endpoint.token.clone());
        let mut client = Self { http, url, token, session: None };
        let answer = client.post(&request(0, "initialize", &initialize())).await?;
        let session = answer.headers().get("mcp-session-id");
        client.session = session.map(|id| id.to_str().map(str::to_owned)).transpose()?;
        answer.bytes().await?;
        let initialized = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        client.post(&initialized).await?.bytes().await?;
        Ok(client)
    }

    async fn post(&self, message: &Value) -> Result<reqwest::Response> {
        let mut call = self.http.post(&self.url).json(message);
        call = call.header("accept", "application/json, text/event-stream");
        if let Some(token) = &self.token {
            call = call.bearer_auth(token);
        }
        if let Some(session) = &self.session {
            call = call.header("mcp-session-id", session).header("mcp-protocol-version", "2025-06-18");
        }
        let answer = call.send().await?;
        ensure!(answer.status().is_success(), "{} {}", self.url, answer.status());
        Ok(answer)
    }

    async fn calls(&self, count: usize) -> Result<()> {
        for id in 1..=count as u64 {
            let body = self.post(&request(id, "tools/call", &echo())).await?.bytes().await?;
            ensure!(
                body.windows(5).any(|window| window == b"hello"),
                "{}: {}",
                self.url,
                String::from_utf8_lossy(&body)
            );
        }
        Ok(())
    }
}
