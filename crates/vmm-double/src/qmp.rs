//! A client of QEMU's control socket (QMP).

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// The time limit for a state that is waited for.
const STATE_TIME: Duration = Duration::from_secs(60);

/// A connection to QEMU.
pub(crate) struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    pub(crate) async fn greet(stream: UnixStream) -> anyhow::Result<Self> {
        let mut qmp = Self { stream: BufReader::new(stream) };
        qmp.line().await.context("QEMU does not greet")?;
        qmp.run("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Runs a command and waits for its answer. Events meanwhile are skipped.
    pub(crate) async fn run(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes()).await?;
        loop {
            let answer = self.line().await?;
            if let Some(result) = answer.get("return") {
                return Ok(result.clone());
            }
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
        }
    }

    /// Repeats a query until its answer has the wanted state.
    pub(crate) async fn wait_until(
        &mut self,
        question: &str,
        arguments: Value,
        is_wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let begun = Instant::now();
        loop {
            let answer = self.run(question, arguments.clone()).await?;
            if is_wanted(&answer) {
                return Ok(answer);
            }
            if begun.elapsed() > STATE_TIME {
                bail!("QEMU still answers {question} with {answer}");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn line(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).await? == 0 {
            bail!("QEMU has ended");
        }
        Ok(serde_json::from_str(&line)?)
    }
}
