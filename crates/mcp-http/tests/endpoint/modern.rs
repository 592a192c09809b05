//! Requests of the modern era.

use std::time::Duration;

use emergent_mcp_http::{Limits, PeerError, Refusal};
use http::StatusCode;
use serde_json::json;
use tokio::time::Instant;

use crate::support::{ALICE, Events, LEGACY, World, modern, only, post};

#[tokio::test(start_paused = true)]
async fn an_error_that_takes_a_while_keeps_its_status() {
    for (code, status) in [
        (-32601, StatusCode::NOT_FOUND),
        (-32020, StatusCode::BAD_REQUEST),
        (-32021, StatusCode::BAD_REQUEST),
        (-32022, StatusCode::BAD_REQUEST),
        (-32602, StatusCode::OK),
    ] {
        let world = World::new(Limits::default());
        let (answer, ()) = tokio::join!(world.handle(&ALICE, modern("tools/x")), async {
            let asked = world.asked().await;
            tokio::time::sleep(Duration::from_secs(14)).await;
            asked.answer("error", json!({ "code": code, "message": "no" })).await;
        });
        let answer = answer.unwrap();
        assert_eq!(answer.status(), status, "{code}");
        assert_eq!(only(answer).await["error"]["code"], code);
    }
}

/// An error of the server behind the stack.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the sandbox failed")]
struct SandboxFailed(u16);

#[tokio::test]
async fn the_cause_of_a_failure_reaches_the_front() {
    let world = World::new(Limits::default());
    *world.failure.lock().unwrap() = Some(PeerError::failed(SandboxFailed(502)));
    let refusal = world.handle(&ALICE, modern("tools/x")).await.unwrap_err();
    assert_eq!(refusal.to_string(), "the sandbox failed");
    let Refusal::Failed(cause) = refusal else { panic!("{refusal:?}") };
    assert_eq!(cause.downcast_ref(), Some(&SandboxFailed(502)));
    // A client of the legacy era gets it as an error of JSON-RPC.
    let params = json!({ "protocolVersion": LEGACY, "capabilities": {} });
    let answer = world.handle(&ALICE, post(None, "initialize", &params)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    let error = json!({ "code": -32000, "message": "the sandbox failed" });
    assert_eq!(only(answer).await["error"], error);
}

#[tokio::test(start_paused = true)]
async fn a_silent_request_is_answered_by_events_before_a_proxy_gives_up() {
    let world = World::new(Limits::default());
    let begun = Instant::now();
    let (answer, asked) = tokio::join!(world.handle(&ALICE, modern("tools/x")), world.asked());
    assert_eq!(begun.elapsed(), Duration::from_secs(15));
    let mut events = Events::of(answer.unwrap());
    asked.answer("result", json!({})).await;
    assert_eq!(events.next().await.unwrap().message["id"], 1);
    assert_eq!(events.next().await, None);
}

#[tokio::test(start_paused = true)]
async fn the_first_message_of_a_request_begins_its_events_at_once() {
    let world = World::new(Limits::default());
    let begun = Instant::now();
    let (answer, asked) = tokio::join!(world.handle(&ALICE, modern("tools/x")), async {
        let asked = world.asked().await;
        asked.tell(&json!({ "jsonrpc": "2.0", "method": "notifications/progress" })).await;
        asked
    });
    assert_eq!(begun.elapsed(), Duration::ZERO);
    let mut events = Events::of(answer.unwrap());
    assert_eq!(events.next().await.unwrap().message["method"], "notifications/progress");
    drop(events);
    asked.cancelled().await;
}
