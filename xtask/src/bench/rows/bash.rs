//! `true` by the bash tool, against `docker exec CONTAINER bash -c true` in the same sandbox.
//!
//! The agent starts a shell ahead of each call. In turns with `docker exec` it has enough time for that. Back to back it does not
//! always have it, as the second row shows. The third row is the part of HTTP.

use anyhow::Result;
use reqwest::Method;

use crate::bench::docker;
use crate::bench::report::{Promise, Ratio, Row, Unit};
use crate::bench::session::Session;
use crate::bench::turns::{Pair, Rounds, back_to_back, in_turns};

pub(super) async fn measure(session: &Session) -> Result<Vec<Row>> {
    let (_, workspace) = session.create("gvisor").await?;
    let container = workspace.container();
    let rounds = Rounds { warm_up: 5, counted: session.either(20, 100) };
    let ours = async || Ok(session.bash(&workspace, "true").await?.0);
    let baseline = async || Ok(docker::timed(&["exec", &container, "bash", "-c", "true"])?.0);

    let in_turns = in_turns(rounds, ours, baseline).await?;
    let back_to_back_ours = back_to_back(rounds, ours).await?;
    let http = back_to_back(rounds, async || Ok(session.request(Method::GET, "/health/live", None).await?.0))
        .await?;
    session.destroy(workspace).await?;

    let promises = [Promise::AtLeastTimes(4.0), Promise::Goal(10.0)];
    let without_pause = Pair { ours: back_to_back_ours, ..in_turns };
    Ok(vec![
        Row::compared("bash `true` / docker exec", in_turns, Ratio::TimesFaster, &promises),
        Row::compared("  … bash, back to back", without_pause, Ratio::TimesFaster, &[]),
        Row::alone("  … GET /health/live", Unit::Milliseconds, http, &[]),
    ])
}
