//! A call of a tool of a hosted MCP server, against the same server on raw stdio, and against other bridges to stdio.
//!
//! The server answers at once, so the duration is that of the transport. Raw stdio is `docker run --interactive` of the same image on
//! the same runtime. The other bridges run the server as a child process without a sandbox. Ours then runs it in a plain container.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use emergent_test_support::mcp;
use futures_util::future::try_join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::bench::peers::{Peer, Peers};
use crate::bench::report::{Promise, Ratio, Row};
use crate::bench::session::{Session, release_binary};
use crate::bench::turns::{Pair, Rounds, in_turns};

const SERVERS: &str = "/api/v1/mcp/servers";
/// The number of concurrent clients.
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

/// The same server on raw stdio.
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

/// The same calls by one client and by many, through our bridge and through each of the others.
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
            let (mut ours, mut theirs) = (ours.open(clients).await?, theirs.open(clients).await?);
            let rounds = Rounds { warm_up: 1, counted: session.either(3, 9) };
            let run = async |clients: &mut [Client]| {
                let begun = Instant::now();
                try_join_all(clients.iter_mut().map(|client| client.calls(calls))).await?;
                Ok(begun.elapsed())
            };
            let pair =
                in_turns(rounds, async || run(&mut ours).await, async || run(&mut theirs).await).await?;
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
                if clients == MANY { &[Promise::AtLeastTimes(5.0)] } else { &[Promise::Goal(5.0)] };
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

/// The endpoint of a bridge.
struct Endpoint {
    url: String,
    token: Option<String>,
}

impl Endpoint {
    /// Opens clients, each with its own session and connection.
    async fn open(&self, clients: usize) -> Result<Vec<Client>> {
        try_join_all((0..clients).map(|_| Client::open(self))).await
    }
}

/// A minimal client with one connection, which does not parse answers. A real client would take more time than the bridge.
struct Client {
    stream: BufReader<TcpStream>,
    head: String,
}

impl Client {
    async fn open(endpoint: &Endpoint) -> Result<Self> {
        let rest = endpoint.url.strip_prefix("http://").context("a plain URL")?;
        let (host, path) = rest.split_once('/').context("a path")?;
        let stream = TcpStream::connect(host).await?;
        stream.set_nodelay(true)?;
        let mut head = format!(
            "POST /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n\
             accept: application/json, text/event-stream\r\n"
        );
        if let Some(token) = &endpoint.token {
            head += &format!("authorization: Bearer {token}\r\n");
        }
        let mut client = Self { stream: BufReader::new(stream), head };
        let (session, _) = client.post(&request(0, "initialize", &initialize())).await?;
        let session = session.context("no session")?;
        client.head += &format!("mcp-session-id: {session}\r\nmcp-protocol-version: 2025-06-18\r\n");
        client.post(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })).await?;
        Ok(client)
    }

    /// Sends a message. Returns the session's id, if there is one, and the body.
    async fn post(&mut self, message: &Value) -> Result<(Option<String>, Vec<u8>)> {
        let body = message.to_string();
        let text = format!("{}content-length: {}\r\n\r\n{body}", self.head, body.len());
        self.stream.write_all(text.as_bytes()).await?;
        let status = self.line().await?;
        ensure!(status.contains(" 200 ") || status.contains(" 202 "), "{status}");
        let (mut length, mut is_chunked, mut session) = (0, false, None);
        loop {
            let line = self.line().await?;
            let Some((name, value)) = line.split_once(':') else {
                ensure!(line.is_empty(), "{line}");
                break;
            };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.trim().parse()?,
                "transfer-encoding" => is_chunked = value.trim() == "chunked",
                "mcp-session-id" => session = Some(value.trim().to_owned()),
                _ => {}
            }
        }
        let mut body = Vec::new();
        if !is_chunked {
            self.take(&mut body, length).await?;
            return Ok((session, body));
        }
        loop {
            let size = usize::from_str_radix(&self.line().await?, 16)?;
            self.take(&mut body, size).await?;
            self.line().await?;
            if size == 0 {
                return Ok((session, body));
            }
        }
    }

    async fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.stream.read_line(&mut line).await? > 0, "the connection was closed");
        Ok(line.trim_end().to_owned())
    }

    async fn take(&mut self, body: &mut Vec<u8>, length: usize) -> Result<()> {
        let begin = body.len();
        body.resize(begin + length, 0);
        self.stream.read_exact(&mut body[begin..]).await?;
        Ok(())
    }

    async fn calls(&mut self, count: usize) -> Result<()> {
        for id in 1..=count as u64 {
            let (_, body) = self.post(&request(id, "tools/call", &echo())).await?;
            ensure!(body.windows(5).any(|window| window == b"hello"), "{}", String::from_utf8_lossy(&body));
        }
        Ok(())
    }
}
