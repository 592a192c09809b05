//! read, write and edit of a 10 KiB file, against `docker exec CONTAINER cat FILE` in the same sandbox.
//!
//! A duration depends on the work of the machine just before it, so there are three rows. The promise is about runs of several calls
//! between two `docker exec`, as agents make them. The second row is a single call right after a `docker exec`, without a promise:
//! it is slower, because it wakes sleeping processes while the machine still cleans up. The third row is calls without pauses.

use anyhow::Result;
use serde_json::{Value, json};

use crate::bench::docker;
use crate::bench::report::{Promise, Ratio, Row};
use crate::bench::session::Session;
use crate::bench::turns::{Pair, Rounds, back_to_back, in_turns, runs_in_turns};

const FILE: &str = "/workspace/file.txt";
const SIZE: usize = 10 * 1024;
/// The number of calls in a row.
const RUN: usize = 4;
/// The two versions of the line that edit changes.
const MARKS: [&str; 2] = ["the line that is edited: tick\n", "the line that is edited: tock\n"];

pub(super) async fn read(session: &Session) -> Result<Vec<Row>> {
    measure(session, "read", |_| json!({ "file_path": FILE })).await
}

pub(super) async fn write(session: &Session) -> Result<Vec<Row>> {
    measure(session, "write", |round| json!({ "file_path": FILE, "content": content(MARKS[round % 2]) }))
        .await
}

pub(super) async fn edit(session: &Session) -> Result<Vec<Row>> {
    let request = |round: usize| {
        let (old, new) = (MARKS[round % 2], MARKS[(round + 1) % 2]);
        json!({ "file_path": FILE, "old_string": old, "new_string": new })
    };
    measure(session, "edit", request).await
}

/// Measures a tool. `request` makes the request of each round.
async fn measure(session: &Session, tool: &str, request: impl Fn(usize) -> Value) -> Result<Vec<Row>> {
    let (_, workspace) = session.create("gvisor").await?;
    let container = workspace.container();
    let first = json!({ "file_path": FILE, "content": content(MARKS[0]) });
    session.tool(&workspace, "write", &first).await?;
    let mut round = 0;
    let mut ours = async || {
        let (took, _) = session.tool(&workspace, tool, &request(round)).await?;
        round += 1;
        Ok(took)
    };
    let mut baseline = async || Ok(docker::timed(&["exec", &container, "cat", FILE])?.0);
    let rounds = Rounds { warm_up: 5, counted: session.either(20, 60) };
    let runs = runs_in_turns(rounds, RUN, &mut ours, &mut baseline).await?;
    let single = in_turns(rounds, &mut ours, baseline).await?;
    let without_pause = Pair { ours: back_to_back(rounds, &mut ours).await?, ..runs };
    session.destroy(workspace).await?;

    let name = format!("{tool} 10 KiB / docker exec cat");
    let promises = [Promise::AtLeastTimes(30.0), Promise::Below(3.0)];
    Ok(vec![
        Row::compared(&name, runs, Ratio::TimesFaster, &promises),
        Row::compared(&format!("  … {tool}, one right after docker exec"), single, Ratio::TimesFaster, &[]),
        Row::compared(&format!("  … {tool}, back to back"), without_pause, Ratio::TimesFaster, &[]),
    ])
}

/// 10 KiB of lines with the mark in the middle.
fn content(mark: &str) -> String {
    let line = "    let value = compute(index, &table)?; // as any line of a program\n";
    let lines = (SIZE - mark.len()) / line.len();
    let half = line.repeat(lines / 2);
    let mut text = format!("{half}{mark}{half}");
    text.extend(std::iter::repeat_n('.', SIZE - 1 - text.len()));
    text.push('\n');
    text
}
