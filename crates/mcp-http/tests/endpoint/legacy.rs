//! Sessions of the legacy era and their streams.

use std::collections::HashSet;
use std::time::Duration;

use emergent_mcp_http::{Limits, Refusal};
use serde_json::{Value, json};

use crate::support::{ALICE, BOB, Events, World, post};

/// Limits with so many sessions, each of which can be replaced when it was idle for a minute.
fn sessions(sessions: usize) -> Limits {
    Limits { sessions, session_replaceable: Duration::from_secs(60), ..Limits::default() }
}

fn notification(number: u64) -> Value {
    json!({ "jsonrpc": "2.0", "method": "notifications/message", "params": { "data": number } })
}

#[tokio::test]
async fn a_stream_that_is_opened_again_begins_with_the_id_of_its_place() {
    let world = World::new(Limits::default());
    let session = world.begin(&ALICE).await;
    let notifications = world.notifications().await;
    let mut first = world.listen(&ALICE, &session, None).await.unwrap();
    let begin = first.next().await.unwrap();
    assert!(begin.id.unwrap().ends_with("-0-0") && begin.message.is_null());
    for number in 1..=3 {
        notifications.send(notification(number).to_string()).await.unwrap();
        assert_eq!(first.next().await.unwrap().message, notification(number));
    }
    drop(first);
    let mut again = world.listen(&ALICE, &session, None).await.unwrap();
    let begin = again.next().await.unwrap();
    let place = begin.id.unwrap();
    assert!(place.ends_with("-0-3") && begin.message.is_null(), "{place}");
    drop(again);
    // A client that continues after this event gets no message twice.
    let mut resumed = world.listen(&ALICE, &session, Some(&place)).await.unwrap();
    notifications.send(notification(4).to_string()).await.unwrap();
    assert_eq!(resumed.next().await.unwrap().message, notification(4));
}

#[tokio::test(start_paused = true)]
async fn a_session_that_listens_is_not_ended_for_another() {
    let world = World::new(sessions(2));
    let [listening, idle] = [world.begin(&ALICE).await, world.begin(&ALICE).await];
    let stream = world.listen(&ALICE, &listening, None).await.unwrap();
    tokio::time::sleep(Duration::from_secs(600)).await;
    let newer = world.begin(&BOB).await;
    assert!(world.lives(&ALICE, &listening).await && !world.lives(&ALICE, &idle).await);
    let stream_of_newer = world.listen(&BOB, &newer, None).await.unwrap();
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(world.try_begin(&BOB).await, Err(Refusal::TooManySessions(2)));
    assert!(world.lives(&ALICE, &listening).await && world.lives(&BOB, &newer).await);
    // The end of the stream is the last use of its session.
    drop(stream);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(world.try_begin(&BOB).await, Err(Refusal::TooManySessions(2)));
    tokio::time::sleep(Duration::from_secs(30)).await;
    world.begin(&BOB).await;
    assert!(!world.lives(&ALICE, &listening).await);
    drop(stream_of_newer);
}

#[tokio::test(start_paused = true)]
async fn an_owner_with_many_sessions_makes_room_for_one_with_few() {
    let world = World::new(sessions(8));
    let mut many = Vec::new();
    for _ in 0..8 {
        many.push(world.begin(&BOB).await);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let stream = world.listen(&BOB, &many[0], None).await.unwrap();
    // One owner may have all places, and ends none of its own that are in use.
    assert_eq!(world.try_begin(&BOB).await, Err(Refusal::TooManySessions(8)));
    let few = world.begin(&ALICE).await;
    assert!(!world.lives(&BOB, &many[1]).await, "the one that was not used for longest and does not listen");
    tokio::time::sleep(Duration::from_secs(61)).await;
    // All but one are idle. The new session replaces one of the owner that has the most.
    for session in &many[3..] {
        assert!(world.lives(&BOB, session).await);
    }
    world.begin(&BOB).await;
    assert!(world.lives(&ALICE, &few).await && !world.lives(&BOB, &many[2]).await);
    // Until both have as many.
    for _ in 0..3 {
        world.begin(&ALICE).await;
    }
    assert_eq!(world.try_begin(&ALICE).await, Err(Refusal::TooManySessions(8)));
    assert_eq!(world.try_begin(&BOB).await, Err(Refusal::TooManySessions(8)));
    assert!(world.lives(&ALICE, &few).await && world.lives(&BOB, &many[0]).await);
    drop(stream);
}

#[tokio::test]
async fn the_sessions_of_one_owner_end_with_their_requests() {
    let world = World::new(Limits { events_after: Duration::ZERO, ..Limits::default() });
    let [revoked, kept] = [world.begin(&ALICE).await, world.begin(&BOB).await];
    let call = async |caller, session: &str| {
        let request = post(Some(session), "tools/call", &json!({}));
        let (answer, asked) = tokio::join!(world.handle(caller, request), world.asked());
        (Events::of(answer.unwrap()), asked)
    };
    let mut standalone = world.listen(&ALICE, &revoked, None).await.unwrap();
    assert!(standalone.next().await.unwrap().message.is_null());
    let (_, without_client) = call(&ALICE, &revoked).await;
    let (mut events, _asked) = call(&ALICE, &revoked).await;
    let (mut events_of_other, asked_of_other) = call(&BOB, &kept).await;
    assert_eq!(world.endpoint.owners(), HashSet::from(["alice", "bob"]));

    world.endpoint.end_of_owner(&"alice");
    without_client.cancelled().await;
    assert!(events.next().await.unwrap().message.is_null());
    assert_eq!((events.next().await, standalone.next().await), (None, None));
    assert!(!world.lives(&ALICE, &revoked).await);
    assert_eq!(world.endpoint.owners(), HashSet::from(["bob"]));
    assert!(world.lives(&BOB, &kept).await);
    asked_of_other.answer("result", json!("for bob")).await;
    assert!(events_of_other.next().await.unwrap().message.is_null());
    assert_eq!(events_of_other.next().await.unwrap().message["result"], "for bob");
}
