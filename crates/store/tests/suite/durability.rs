//! Changes are on disk before their calls return.

use std::future::{Future, poll_fn};
use std::io::{BufRead, BufReader, Read, Write};
use std::pin::pin;
use std::task::Poll;

use emergent_wire::WorkspaceId;
use emergent_wire::workspace::WorkspaceStatus;

use crate::support::{Location, TestDb, agent};

/// Run by the case below, in a process of its own.
#[tokio::test]
#[ignore = "writes until it is killed"]
async fn writes_until_killed() {
    let store = Location::from_parent().open().await.unwrap();
    let mut out = std::io::stdout();
    loop {
        let workspace = store.insert_creating(agent(), None).await.unwrap();
        writeln!(out, "\nrow {}", workspace.id).unwrap();
        out.flush().unwrap();
    }
}

pub(crate) async fn answered_writes_survive_a_kill(db: TestDb) {
    db.store.close().await;
    let mut child = db.child("durability::writes_until_killed").spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut lines = Vec::new();
    for line in output.by_ref().lines() {
        lines.push(line.unwrap());
        if lines.iter().filter(|line| line.starts_with("row ")).count() == 100 {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Whole lines only: the last one may be cut.
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    let whole = rest.rfind('\n').map_or("", |end| &rest[..end]);
    lines.extend(whole.lines().map(str::to_owned));

    let store = db.location.open().await.unwrap();
    let mut checked = 0;
    for id in lines.iter().filter_map(|line| line.strip_prefix("row ")) {
        let id: WorkspaceId = id.parse().unwrap();
        store.workspace(id).await.unwrap();
        checked += 1;
    }
    assert!(checked >= 100, "the child wrote {checked} rows: {lines:?}");
}

/// Polls a call and drops it when it has to wait for the `waits`th time.
async fn dropped_after<T>(waits: usize, call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    let mut left = waits;
    poll_fn(|context| match call.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending if left == 0 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            Poll::Pending
        }
    })
    .await
}

/// A client that goes away drops its call at any point; no transaction may stay open, least of all on the one
/// connection that writes.
pub(crate) async fn a_call_that_is_dropped_blocks_nobody(db: TestDb) {
    let mut answered = 0;
    for waits in 0..60 {
        let calls = (0..3).map(|_| {
            let store = db.store.clone();
            tokio::spawn(dropped_after(
                waits,
                async move { store.insert_creating(agent(), Some(1_000)).await },
            ))
        });
        for call in calls.collect::<Vec<_>>() {
            if let Some(result) = call.await.unwrap() {
                result.unwrap();
                answered += 1;
            }
        }
        db.add().await;
        answered += 1;
    }
    let rows = db.store.workspaces_in(&[WorkspaceStatus::Creating]).await.unwrap().readable.len();
    // A call that was dropped while it committed may have left its row.
    assert!((answered..=240).contains(&rows), "{answered} were answered, there are {rows} rows");
    assert!(answered > 60, "some calls were never dropped");
}
