//! Sessions of the legacy era and their streams.

use emergent_mcp_http::Limits;
use serde_json::{Value, json};

use crate::support::{ALICE, World};

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
