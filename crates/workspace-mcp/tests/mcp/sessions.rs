//! Sessions of legacy clients: their limit, their end, their owner, and their streams.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::support::client::{Client, LEGACY, Messages, initialize};
use crate::support::{Caller, Fake, Mcp, events_at_once, with_sessions};
use emergent_workspace_mcp::Config;
use http::StatusCode;
use http_body_util::BodyExt as _;
use serde_json::json;

/// Whether a session can be used.
async fn lives(client: &Client) -> bool {
    let messages = client.send(9, "ping", json!({})).await;
    assert!(matches!(messages.status, StatusCode::OK | StatusCode::NOT_FOUND), "{}", messages.status);
    messages.status == StatusCode::OK
}

async fn clients(mcp: &Arc<Mcp>, count: usize) -> Vec<Client> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(Client::connect(mcp, LEGACY).await);
    }
    clients
}

#[tokio::test]
async fn delete_ends_a_session_with_its_calls_and_streams() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    let client = Client::connect(&mcp, LEGACY).await;
    assert!(lives(&client).await);
    let mut stream = client.listen().await;
    let mut call =
        client.send(5, "tools/call", json!({"name": "bash", "arguments": {"command": "listen"}})).await;
    fake.until_running(1).await;
    assert_eq!(client.delete().await, StatusCode::NO_CONTENT);
    fake.until_dropped(1).await;
    assert_eq!(call.next().await, None);
    while stream.frame().await.is_some() {}
    assert!(!lives(&client).await);
    assert_eq!(client.delete().await, StatusCode::NOT_FOUND);
    assert_eq!(client.listen().await.status(), StatusCode::NOT_FOUND);
    assert!(mcp.is_idle());
}

#[tokio::test]
async fn a_session_is_unknown_to_another_workspace() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let (_, other) = Fake::default().serve(Config::default());
    let mut client = Client::connect(&mcp, LEGACY).await;
    client.mcp = other;
    assert!(!lives(&client).await);
    client.session = None;
    assert_eq!(client.send(9, "ping", json!({})).await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_new_session_takes_the_place_of_the_one_not_used_for_longest() {
    let (fake, mcp) = Fake::default().serve(with_sessions(3));
    let old = clients(&mcp, 3).await;
    // The first runs a command, the second has just been used.
    let _call =
        old[0].send(5, "tools/call", json!({"name": "bash", "arguments": {"command": "listen"}})).await;
    fake.until_running(1).await;
    assert!(lives(&old[1]).await);
    let new = Client::connect(&mcp, LEGACY).await;
    for (client, expected) in [(&old[0], true), (&old[1], true), (&old[2], false), (&new, true)] {
        assert_eq!(lives(client).await, expected);
    }
    assert_eq!(*fake.dropped.borrow(), 0);
}

#[tokio::test]
async fn sessions_with_running_calls_are_not_ended_for_others() {
    let (fake, mcp) = Fake::default().serve(with_sessions(2));
    let old = clients(&mcp, 2).await;
    let mut calls = Vec::new();
    for client in &old {
        let params = json!({"name": "bash", "arguments": {"command": "listen"}});
        calls.push(client.send(5, "tools/call", params).await);
    }
    fake.until_running(2).await;
    let (response, session) = initialize(&mcp, LEGACY).await;
    assert_eq!((response.status(), session), (StatusCode::TOO_MANY_REQUESTS, None));
    assert!(lives(&old[0]).await && lives(&old[1]).await);
    assert_eq!(old[1].delete().await, StatusCode::NO_CONTENT);
    Client::connect(&mcp, LEGACY).await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_session_ends() {
    let idle = Duration::from_secs(60);
    let mut config = events_at_once();
    config.http.session_idle = idle;
    let (fake, mcp) = Fake::default().serve(config);
    let [quiet, calling, listening] = clients(&mcp, 3).await.try_into().ok().unwrap();
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    let mut call = calling.send(5, "tools/call", params).await;
    let stream = listening.listen().await;
    tokio::time::sleep(idle / 2).await;
    assert!(lives(&quiet).await);
    tokio::time::sleep(idle * 3 / 4).await;
    assert!(lives(&quiet).await);
    tokio::time::sleep(idle * 5).await;
    assert!(!lives(&quiet).await);
    // A command that says nothing for long is no idleness, nor is a client that listens.
    assert!(lives(&calling).await && lives(&listening).await);
    fake.end();
    assert_eq!(call.next().await.unwrap()["id"], 5);
    drop(stream);
    tokio::time::sleep(idle * 2).await;
    assert!(!lives(&calling).await && !lives(&listening).await);
    assert!(mcp.is_idle());
    assert_eq!(*fake.dropped.borrow(), 0);
}

#[tokio::test]
async fn a_client_that_lost_its_connection_gets_the_answer_when_it_comes_back() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    let client = Client::connect(&mcp, LEGACY).await;
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    let mut lost = client.send(5, "tools/call", params).await;
    let event = lost.first_event_id().await;
    fake.until_running(1).await;
    drop(lost);
    let mut resumed = Messages::of(client.listen_after(Some(&event)).await);
    fake.say("late\n");
    fake.end();
    let answer = resumed.next().await.unwrap();
    assert_eq!(answer["id"], 5);
    assert_eq!(answer["result"]["structuredContent"]["stdout"], "late\n");
    assert_eq!(resumed.next().await, None);
    // The stream is kept for a while: an answer that was sent need not have arrived.
    let mut again = Messages::of(client.listen_after(Some(&event)).await);
    assert_eq!(again.next().await.unwrap()["id"], 5);
}

#[tokio::test(start_paused = true)]
async fn the_stream_of_an_answered_request_is_forgotten_after_a_while() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    let client = Client::connect(&mcp, LEGACY).await;
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    let mut call = client.send(5, "tools/call", params).await;
    let event = call.first_event_id().await;
    fake.end();
    while call.next().await.is_some() {}
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(client.listen_after(Some(&event)).await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_call_that_takes_long_is_answered_by_events_only_after_a_while() {
    let mut config = Config::default();
    config.http.events_after = Duration::from_secs(3600);
    let (fake, mcp) = Fake::default().serve(config);
    let client = Client::connect(&mcp, LEGACY).await;
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    let (call, ()) = tokio::join!(client.send(5, "tools/call", params), async {
        fake.until_running(1).await;
        fake.end();
    });
    assert!(!call.is_stream);
}

#[tokio::test]
async fn only_clients_that_accept_them_get_events_without_a_message() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    for (version, expected) in [("2025-03-26", 0), ("2025-06-18", 0), (LEGACY, 1)] {
        let client = Client::connect(&mcp, version).await;
        let params = json!({"name": "bash", "arguments": {"command": "listen"}});
        let mut messages = client.send(5, "tools/call", params).await;
        assert!(messages.is_stream);
        fake.end();
        while messages.next().await.is_some() {}
        assert_eq!(messages.priming, expected, "{version}");
    }
}

#[tokio::test]
async fn a_session_is_unknown_to_every_caller_but_its_owner() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    let mut alice = Client::connect_as(&mcp, LEGACY, Caller("alice", 0)).await;
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    let mut call = alice.send(5, "tools/call", params).await;
    let event = call.first_event_id().await;
    fake.until_running(1).await;
    alice.caller = Caller("mallory", 0);
    assert!(!lives(&alice).await);
    assert_eq!(alice.listen().await.status(), StatusCode::NOT_FOUND);
    assert_eq!(alice.listen_after(Some(&event)).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(alice.delete().await, StatusCode::NOT_FOUND);
    let cancel = alice.tell("notifications/cancelled", json!({"requestId": 5})).await;
    assert_eq!((cancel, *fake.running.borrow()), (StatusCode::NOT_FOUND, 1));
    // The owner's session is not affected.
    alice.caller = Caller("alice", 1);
    assert!(lives(&alice).await);
    fake.end();
    assert_eq!(call.next().await.unwrap()["id"], 5);
}

#[tokio::test]
async fn a_call_ends_with_the_sessions_of_its_owner() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    let alice = Client::connect_as(&mcp, LEGACY, Caller("alice", 0)).await;
    let bob = Client::connect_as(&mcp, LEGACY, Caller("bob", 0)).await;
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    drop(alice.send(5, "tools/call", params).await);
    fake.until_running(1).await;
    mcp.end_of_owner(&"alice");
    fake.until_dropped(1).await;
    assert!(lives(&bob).await);
    assert_eq!(mcp.owners(), HashSet::from(["bob"]));
}

#[tokio::test]
async fn an_event_of_another_session_is_refused() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    let [own, other] = clients(&mcp, 2).await.try_into().ok().unwrap();
    let mut events = Vec::new();
    for client in [&own, &other] {
        let params = json!({"name": "bash", "arguments": {"command": "listen"}});
        let mut call = client.send(5, "tools/call", params).await;
        events.push(call.first_event_id().await);
        fake.end();
        while call.next().await.is_some() {}
    }
    assert_eq!(own.listen_after(Some(&events[0])).await.status(), StatusCode::OK);
    let stream = events[0].rsplit_once('-').unwrap().0;
    for foreign in [&events[1], "1-0", "0/0", "", "-", "x-y-z", &format!("{stream}-x"), &format!("{stream}-")]
    {
        assert_eq!(own.listen_after(Some(foreign)).await.status(), StatusCode::BAD_REQUEST, "{foreign}");
    }
}

#[tokio::test]
async fn an_id_can_be_used_by_one_request_of_a_session_at_a_time() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    let [own, other] = clients(&mcp, 2).await.try_into().ok().unwrap();
    let params = || json!({"name": "bash", "arguments": {"command": "listen"}});
    let mut call = own.send(5, "tools/call", params()).await;
    fake.until_running(1).await;
    let mut duplicate = own.send(5, "tools/call", params()).await;
    assert_eq!(duplicate.status, StatusCode::BAD_REQUEST);
    assert_eq!(duplicate.next().await.unwrap()["error"]["code"], -32600);
    // Other sessions choose their ids independently, and cancel only their own calls.
    let mut of_other = other.send(5, "tools/call", params()).await;
    fake.until_running(2).await;
    other.tell("notifications/cancelled", json!({"requestId": 5})).await;
    fake.until_dropped(1).await;
    assert_eq!((of_other.next().await, *fake.running.borrow()), (None, 1));
    fake.end();
    assert_eq!(call.next().await.unwrap()["id"], 5);
    let mut again = own.send(5, "tools/call", params()).await;
    fake.end();
    assert_eq!(again.next().await.unwrap()["id"], 5);
}

#[tokio::test]
async fn a_flood_of_sessions_stays_within_the_limit() {
    let (fake, mcp) = Fake::default().serve(with_sessions(3));
    let kept = Client::connect(&mcp, LEGACY).await;
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    let mut call = kept.send(5, "tools/call", params).await;
    fake.until_running(1).await;
    let mut flood = Vec::new();
    for _ in 0..200 {
        flood.push(Client::connect(&mcp, LEGACY).await);
    }
    let mut alive = 0;
    for client in &flood {
        alive += usize::from(lives(client).await);
    }
    assert_eq!(alive, 2);
    fake.end();
    assert_eq!(call.next().await.unwrap()["id"], 5);
}
