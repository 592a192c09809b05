//! A create that claims a spare of the warm pool, against a cold create of the same server.
//!
//! The pool refills after each claim, so the first command competes with the start of a sandbox, as it does in normal use.

use std::time::Duration;

use anyhow::Result;

use crate::bench::report::{Promise, Ratio, Row, Unit};
use crate::bench::session::Session;
use crate::bench::stats::Summary;
use crate::bench::turns::{Rounds, runs_in_turns};

const SPARES: usize = 4;
/// The number of claims for each cold create.
const RUN: usize = 5;

pub(super) async fn measure(session: &Session) -> Result<Vec<Row>> {
    session.set_pool(SPARES).await?;
    let rounds = Rounds { warm_up: 1, counted: session.either(4, 20) };
    let mut claims: Vec<Duration> = Vec::new();
    let ours = async || {
        let (took, workspace) = session.claim().await?;
        let (command_took, _) = session.bash(&workspace, "true").await?;
        session.destroy(workspace).await?;
        session.wait_for_pool(SPARES).await;
        claims.push(took);
        Ok(took + command_took)
    };
    let cold = async || {
        let (took, workspace) = session.create("gvisor").await?;
        let (command_took, _) = session.bash(&workspace, "true").await?;
        session.destroy(workspace).await?;
        Ok(took + command_took)
    };
    let until_command = runs_in_turns(rounds, RUN, ours, cold).await?;
    session.set_pool(0).await?;
    let claim = claims.get(rounds.warm_up * RUN..).and_then(Summary::of_durations);
    let claim = claim.map(|claim| {
        Row::alone("warm create, answered", Unit::Milliseconds, claim, &[Promise::P99Below(50.0)])
    });
    let until_command = Row::compared(
        "warm create and `true` / cold",
        until_command,
        Ratio::TimesFaster,
        &[Promise::AtLeastTimes(10.0)],
    );
    Ok(claim.into_iter().chain([until_command]).collect())
}
