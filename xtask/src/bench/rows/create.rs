//! A cold create on gVisor, against `docker run` of the same image with the same limits on the same network.
//!
//! Our time ends with the answer 201, which the server sends after the guest agent has answered. `docker run --detach` returns when
//! the container is started. The second row is the time until a first command has ended.

use std::time::Duration;

use anyhow::Result;

use crate::bench::docker::{self, Limits};
use crate::bench::report::{Promise, Ratio, Row};
use crate::bench::session::Session;
use crate::bench::stats::Summary;
use crate::bench::turns::{Pair, Rounds, in_turns};

const IMAGE: &str = "emergent/workspace:latest";

pub(super) async fn measure(session: &Session) -> Result<Vec<Row>> {
    // The first create makes the network.
    let (_, first) = session.create("gvisor").await?;
    let limits = Limits::of(&first.container())?;
    let label = session.label();

    let rounds = Rounds { warm_up: 1, counted: session.either(7, 15) };
    let mut until_command: (Vec<Duration>, Vec<Duration>) = Default::default();
    let ours = async || {
        let (took, workspace) = session.create("gvisor").await?;
        let (command_took, _) = session.bash(&workspace, "true").await?;
        session.destroy(workspace).await?;
        until_command.0.push(took + command_took);
        Ok(took)
    };
    let baseline = async || {
        let (took, container) = limits.run(&label, IMAGE)?;
        let (command_took, _) = docker::timed(&["exec", &container.0, "bash", "-c", "true"])?;
        until_command.1.push(took + command_took);
        Ok(took)
    };
    let pair = in_turns(rounds, ours, baseline).await?;
    session.destroy(first).await?;

    let mut rows = vec![Row::compared(
        "cold create / docker run",
        pair,
        Ratio::TimesAsLong,
        &[Promise::AtMostTimes(1.15)],
    )];
    let ours = until_command.0.get(rounds.warm_up..).and_then(Summary::of_durations);
    let baseline = until_command.1.get(rounds.warm_up..).and_then(Summary::of_durations);
    if let (Some(ours), Some(baseline)) = (ours, baseline) {
        let pair = Pair { ours, baseline };
        rows.push(Row::compared("  … create and `true` / docker run, exec", pair, Ratio::TimesAsLong, &[]));
    }
    Ok(rows)
}
