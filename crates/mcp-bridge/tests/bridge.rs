//! The bridge, with the test as its process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_mcp_bridge::{Bridge, BridgeError, ClientId, Exchange, Item, Outgoing, Phase, Role};
use emergent_mcp_protocol::envelope::Message;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(5);

/// Both ends of a bridge.
struct World {
    bridge: Bridge,
    outgoing: Outgoing,
}

impl World {
    fn new(role: Role) -> Self {
        let bridge = Bridge::new("test", role);
        let outgoing = bridge.open();
        bridge.let_in();
        Self { bridge, outgoing }
    }

    /// The lines that wait for the process.
    async fn read(&mut self) -> Vec<Value> {
        let bytes = tokio::time::timeout(SOON, self.outgoing.next(1)).await.unwrap().unwrap();
        let text = String::from_utf8(bytes).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    async fn read_one(&mut self) -> Value {
        self.read().await.remove(0)
    }

    fn say(&self, message: &Value) {
        self.bridge.receive(format!("{message}\n").as_bytes());
    }

    async fn ask(&self, client: ClientId, message: &Value) -> Exchange {
        self.ask_within(client, message, SOON).await
    }

    async fn ask_within(&self, client: ClientId, message: &Value, within: Duration) -> Exchange {
        let text = message.to_string();
        self.bridge.request(client, &Message::parse(&text).unwrap(), within).await.unwrap()
    }
}

fn request(id: &Value, method: &str, params: &Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
}

fn answer_to(asked: &Value, result: &Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": asked["id"], "result": result })
}

async fn item(exchange: &mut Exchange) -> Value {
    match tokio::time::timeout(SOON, exchange.next()).await.unwrap() {
        Some(Item::Answer(line) | Item::Message(line) | Item::Progress(line) | Item::Failed { line, .. }) => {
            serde_json::from_str(&line).unwrap()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn two_clients_with_the_same_id_get_their_own_answers() {
    let mut world = World::new(Role::Shared);
    let (a, b) = (world.bridge.visitor(), world.bridge.visitor());
    let mut first = world.ask(a, &request(&json!("x"), "tools/call", &json!({ "for": "a" }))).await;
    let asked_a = world.read_one().await;
    let mut second = world.ask(b, &request(&json!("x"), "tools/call", &json!({ "for": "b" }))).await;
    let asked_b = world.read_one().await;
    assert_ne!(asked_a["id"], asked_b["id"]);
    world.say(&answer_to(&asked_b, &json!("for b")));
    world.say(&answer_to(&asked_a, &json!("for a")));
    assert_eq!(item(&mut first).await, json!({ "jsonrpc": "2.0", "id": "x", "result": "for a" }));
    assert_eq!(item(&mut second).await, json!({ "jsonrpc": "2.0", "id": "x", "result": "for b" }));
    assert_eq!(world.bridge.load(), (0, 0));
}

#[tokio::test]
async fn progress_goes_to_the_client_of_the_request_with_its_own_token() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    let with_token = json!({ "name": "t", "_meta": { "progressToken": "abc", "other": 1.50 } });
    let mut exchange = world.ask(client, &request(&json!(1), "tools/call", &with_token)).await;
    let asked = world.read_one().await;
    assert_eq!(asked["params"]["_meta"]["progressToken"], asked["id"]);
    assert_eq!(asked["params"]["_meta"]["other"], 1.5);
    let token = &asked["id"];
    let progress = |token: &Value| {
        json!({ "jsonrpc": "2.0", "method": "notifications/progress",
        "params": { "progressToken": token, "progress": 0.5 } })
    };
    world.say(&progress(token));
    world.say(&progress(&json!(4711)));
    assert_eq!(item(&mut exchange).await["params"]["progressToken"], "abc");
    world.say(&answer_to(&asked, &json!({})));
    assert_eq!(item(&mut exchange).await["id"], 1);
}

#[tokio::test]
async fn ids_and_progress_tokens_over_the_limit_are_not_kept() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    let long = "x".repeat(1 << 20);
    // A process that does not read would fill the queue with the answers to its own requests.
    world.say(&request(&json!(long), "ping", &json!({})));
    let params = json!({ "_meta": { "progressToken": long } });
    let _exchange = world.ask(client, &request(&json!(1), "tools/call", &params)).await;
    let asked = world.read_one().await;
    // The token stays as it is, and progress has no receiver.
    assert_eq!((&asked["method"], &asked["params"]), (&json!("tools/call"), &params));
}

#[tokio::test]
async fn unexpected_answers_are_ignored() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    let mut exchange = world.ask(client, &request(&json!(7), "a", &json!({}))).await;
    let asked = world.read_one().await;
    world.bridge.receive(b"junk\n\n\xff\xfe\n[]\n{\"jsonrpc\":\"2.0\",\"id\":\"1\",\"result\":1}\n");
    world.say(&json!({ "jsonrpc": "2.0", "id": 99, "result": "a stranger's" }));
    world.say(&answer_to(&asked, &json!("first")));
    world.say(&answer_to(&asked, &json!("second")));
    assert_eq!(item(&mut exchange).await["result"], "first");
    assert!(exchange.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_time_out_cancels_the_request_and_the_late_answer_is_dropped() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    let within = Duration::from_millis(50);
    let mut exchange = world.ask_within(client, &request(&json!(7), "slow", &json!({})), within).await;
    let asked = world.read_one().await;
    let answer = item(&mut exchange).await;
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(7), &json!(-32001)), "{answer}");
    let told = world.read_one().await;
    assert_eq!(told["method"], "notifications/cancelled");
    assert_eq!(told["params"]["requestId"], asked["id"]);
    world.say(&answer_to(&asked, &json!("late")));
    assert!(exchange.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn progress_restarts_the_time_of_a_request() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    let params = json!({ "_meta": { "progressToken": 1 } });
    let within = Duration::from_millis(100);
    let mut exchange = world.ask_within(client, &request(&json!(1), "slow", &params), within).await;
    let asked = world.read_one().await;
    for _ in 0..5 {
        tokio::time::advance(Duration::from_millis(60)).await;
        world.say(&json!({ "jsonrpc": "2.0", "method": "notifications/progress",
            "params": { "progressToken": asked["id"], "progress": 1 } }));
        assert_eq!(item(&mut exchange).await["method"], "notifications/progress");
    }
    world.say(&answer_to(&asked, &json!("done")));
    assert_eq!(item(&mut exchange).await["result"], "done");
}

#[tokio::test]
async fn a_client_cancels_its_own_request_and_no_other() {
    let mut world = World::new(Role::Shared);
    let (a, b) = (world.bridge.visitor(), world.bridge.visitor());
    let mut first = world.ask(a, &request(&json!(1), "x", &json!({}))).await;
    let asked = world.read_one().await;
    let cancel = json!({ "jsonrpc": "2.0", "method": "notifications/cancelled",
        "params": { "requestId": 1, "reason": "enough" } });
    let text = cancel.to_string();
    let message = Message::parse(&text).unwrap();
    world.bridge.notify(b, &message).await.unwrap();
    world.bridge.notify(a, &message).await.unwrap();
    let told = world.read().await;
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0]["params"], json!({ "requestId": asked["id"], "reason": "enough" }));
    assert_eq!(first.next().await, Some(Item::Cancelled));
    // The id can be used again.
    world.ask(a, &request(&json!(1), "x", &json!({}))).await;
}

#[tokio::test]
async fn dropping_a_request_cancels_it() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    let exchange = world.ask(client, &request(&json!(1), "x", &json!({}))).await;
    let asked = world.read_one().await;
    drop(exchange);
    let told = world.read_one().await;
    assert_eq!(
        (&told["method"], &told["params"]["requestId"]),
        (&json!("notifications/cancelled"), &asked["id"])
    );
    assert_eq!(world.bridge.load(), (0, 0));
}

#[tokio::test]
async fn the_end_of_the_process_fails_all_requests_and_the_next_process_is_initialized() {
    let bridge = Bridge::new("test", Role::Shared);
    let mut world = World { outgoing: bridge.open(), bridge };
    let starting = tokio::spawn({
        let bridge = world.bridge.clone();
        async move { bridge.initialize("1.0", SOON).await }
    });
    let asked = world.read_one().await;
    assert_eq!((&asked["method"], &asked["params"]["capabilities"]), (&json!("initialize"), &json!({})));
    let result = json!({ "protocolVersion": "2025-06-18", "capabilities": { "tools": { "listChanged": true } },
        "serverInfo": { "name": "s", "version": "1" }, "x-odd": 1.0 });
    world.say(&answer_to(&asked, &result));
    assert_eq!(starting.await.unwrap().unwrap().protocol_version, "2025-06-18");
    assert_eq!(world.bridge.phase(), Phase::Ready);
    assert_eq!(world.read_one().await["method"], "notifications/initialized");

    let (client, mut told) = world.bridge.join();
    let mut exchange = world.ask(client, &request(&json!("r"), "x", &json!({}))).await;
    world.read_one().await;
    world.bridge.close("it ended with code 1", false);
    let answer = item(&mut exchange).await;
    assert_eq!(answer["error"], json!({ "code": -32000, "message": "it ended with code 1" }), "{answer}");
    let text = request(&json!(2), "x", &json!({})).to_string();
    let refused = world.bridge.request(client, &Message::parse(&text).unwrap(), SOON).await;
    assert_eq!(refused.err(), Some(BridgeError::Down("it ended with code 1".into())));
    assert_eq!(world.bridge.ready(SOON).await, Err(BridgeError::Down("it ended with code 1".into())));

    world.outgoing = world.bridge.open();
    let starting = tokio::spawn({
        let bridge = world.bridge.clone();
        async move { bridge.initialize("1.0", SOON).await }
    });
    let asked = world.read_one().await;
    world.say(&answer_to(&asked, &result));
    starting.await.unwrap().unwrap();
    let told: Value = serde_json::from_str(&told.recv().await.unwrap()).unwrap();
    assert_eq!(told["method"], "notifications/tools/list_changed");
}

#[tokio::test]
async fn a_process_that_ended_by_itself_is_told_apart_from_one_that_was_lost() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    for has_exited in [true, false] {
        let mut lost = world.ask(client, &request(&json!(1), "server/discover", &json!({}))).await;
        world.read_one().await;
        if has_exited {
            world.bridge.exited("it ended with exit code 1", false);
        } else {
            world.bridge.close("its sandbox was lost", false);
        }
        let Some(Item::Failed { error: BridgeError::Down(down), .. }) = lost.next().await else {
            panic!("no failure")
        };
        assert_eq!(down.has_exited, has_exited, "{down}");
        // A request that comes later gets the same error.
        assert_eq!(world.bridge.ready(SOON).await, Err(BridgeError::Down(down.clone())));
        let text = request(&json!(2), "x", &json!({})).to_string();
        let refused = world.bridge.request(client, &Message::parse(&text).unwrap(), SOON).await;
        assert_eq!(refused.err(), Some(BridgeError::Down(down)));
        world.outgoing = world.bridge.open();
        world.bridge.let_in();
    }
}

#[tokio::test]
async fn a_subscription_lasts_until_its_last_client_and_only_subscribers_get_its_updates() {
    let mut world = World::new(Role::Shared);
    let (a, mut told_a) = world.bridge.join();
    let (b, mut told_b) = world.bridge.join();
    let subscribe = |id: u64| request(&json!(id), "resources/subscribe", &json!({ "uri": "file:///x" }));
    let unsubscribe = |id: u64| request(&json!(id), "resources/unsubscribe", &json!({ "uri": "file:///x" }));
    let mut first = world.ask(a, &subscribe(1)).await;
    let asked = world.read_one().await;
    world.say(&answer_to(&asked, &json!({})));
    assert_eq!(item(&mut first).await["id"], 1);
    let update = json!({ "jsonrpc": "2.0", "method": "notifications/resources/updated", "params": { "uri": "file:///x" } });
    world.say(&update);
    assert_eq!(serde_json::from_str::<Value>(&told_a.recv().await.unwrap()).unwrap(), update);
    assert!(told_b.try_recv().is_err());
    // The second need not bother the process, nor the first one that leaves.
    let mut second = world.ask(b, &subscribe(1)).await;
    assert_eq!(item(&mut second).await, json!({ "jsonrpc": "2.0", "id": 1, "result": {} }));
    let mut left = world.ask(a, &unsubscribe(2)).await;
    assert_eq!(item(&mut left).await["result"], json!({}));
    world.say(&update);
    assert!(told_a.try_recv().is_err());
    told_b.recv().await.unwrap();
    // A client that goes away takes the last subscription with it.
    world.bridge.leave(b);
    assert_eq!(world.read_one().await["method"], "resources/unsubscribe");
}

#[tokio::test]
async fn a_process_whose_answer_to_initialize_is_too_long_counts_as_one_that_refuses() {
    let bridge = Bridge::new("test", Role::Shared);
    let mut world = World { outgoing: bridge.open(), bridge };
    let starting = tokio::spawn({
        let bridge = world.bridge.clone();
        async move { bridge.initialize("1.0", SOON).await }
    });
    let asked = world.read_one().await;
    world.say(&answer_to(&asked, &json!({ "instructions": "x".repeat(9 << 20) })));
    // The process is still there: only `Down` says that it has ended.
    let error = starting.await.unwrap().unwrap_err();
    assert!(matches!(&error, BridgeError::Refused(why) if why.contains("bytes")), "{error:?}");
    assert_eq!(world.bridge.phase(), Phase::Starting);
}

fn subscribe(id: u64, uri: &str) -> Value {
    request(&json!(id), "resources/subscribe", &json!({ "uri": uri }))
}

#[tokio::test]
async fn a_client_without_a_session_cannot_subscribe() {
    let mut world = World::new(Role::Shared);
    let visitor = world.bridge.visitor();
    for method in ["resources/subscribe", "resources/unsubscribe"] {
        let message = request(&json!(7), method, &json!({ "uri": "file:///x" }));
        let answer = item(&mut world.ask(visitor, &message).await).await;
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(7), &json!(-32600)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("session"), "{answer}");
    }
    // The process has seen neither.
    let _other = world.ask(visitor, &request(&json!(8), "tools/list", &json!({}))).await;
    assert_eq!(world.read_one().await["method"], "tools/list");
}

#[tokio::test(start_paused = true)]
async fn a_subscription_without_an_answer_of_the_process_does_not_exist() {
    let mut world = World::new(Role::Shared);
    let (client, mut told) = world.bridge.join();
    let uris = ["file:///late", "file:///cancelled", "file:///dropped", "file:///refused", "file:///lost"];
    let within = Duration::from_millis(50);
    let mut late = world.ask_within(client, &subscribe(1, uris[0]), within).await;
    world.read_one().await;
    assert_eq!(item(&mut late).await["error"]["code"], -32001);
    let _cancelled = world.ask(client, &subscribe(2, uris[1])).await;
    let cancel =
        json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": 2 } });
    world.bridge.notify(client, &Message::parse(&cancel.to_string()).unwrap()).await.unwrap();
    drop(world.ask(client, &subscribe(3, uris[2])).await);
    let mut refused = world.ask(client, &subscribe(4, uris[3])).await;
    // The process may have taken the requests that were cancelled, so it is told to end their subscriptions.
    let mut told_process = Vec::new();
    let asked = loop {
        let line = world.read_one().await;
        if line["params"]["uri"] == uris[3] {
            break line;
        }
        told_process.push((line["method"].clone(), line["params"]["uri"].clone()));
    };
    for uri in &uris[..3] {
        assert!(told_process.contains(&(json!("resources/unsubscribe"), json!(uri))), "{told_process:?}");
    }
    world.say(&json!({ "jsonrpc": "2.0", "id": asked["id"], "error": { "code": -32002, "message": "no" } }));
    assert_eq!(item(&mut refused).await["error"]["code"], -32002);
    let mut lost = world.ask(client, &subscribe(5, uris[4])).await;
    world.read_one().await;
    world.bridge.close("it ended", true);
    assert_eq!(item(&mut lost).await["error"]["code"], -32000);

    // The next process hears of none of them, and updates have no receiver.
    world.outgoing = world.bridge.open();
    let starting = tokio::spawn({
        let bridge = world.bridge.clone();
        async move { bridge.initialize("1.0", SOON).await }
    });
    let asked = world.read_one().await;
    world.say(&answer_to(&asked, &json!({ "protocolVersion": "2025-06-18", "capabilities": {} })));
    starting.await.unwrap().unwrap();
    let mut other = world.ask(client, &request(&json!(6), "tools/list", &json!({}))).await;
    assert_eq!(world.read_one().await["method"], "notifications/initialized");
    let asked = world.read_one().await;
    assert_eq!(asked["method"], "tools/list");
    for uri in uris {
        world.say(&json!({ "jsonrpc": "2.0", "method": "notifications/resources/updated", "params": { "uri": uri } }));
    }
    world.say(&answer_to(&asked, &json!({})));
    item(&mut other).await;
    assert!(told.try_recv().is_err());
}

#[tokio::test]
async fn a_cancelled_subscription_of_one_client_leaves_that_of_another() {
    let mut world = World::new(Role::Shared);
    let (a, mut told_a) = world.bridge.join();
    let (b, mut told_b) = world.bridge.join();
    let first = world.ask(a, &subscribe(1, "file:///x")).await;
    world.read_one().await;
    // The process has not confirmed the first one, so it answers the second one, too.
    let mut second = world.ask(b, &subscribe(1, "file:///x")).await;
    let asked = world.read_one().await;
    drop(first);
    assert_eq!(world.read_one().await["method"], "notifications/cancelled");
    world.say(&answer_to(&asked, &json!({})));
    assert_eq!(item(&mut second).await["result"], json!({}));
    let update = json!({ "jsonrpc": "2.0", "method": "notifications/resources/updated", "params": { "uri": "file:///x" } });
    world.say(&update);
    assert_eq!(serde_json::from_str::<Value>(&told_b.recv().await.unwrap()).unwrap(), update);
    assert!(told_a.try_recv().is_err());
}

#[tokio::test]
async fn an_unsubscribe_also_ends_a_subscription_that_is_not_confirmed_yet() {
    let mut world = World::new(Role::Shared);
    let (client, mut told) = world.bridge.join();
    let mut first = world.ask(client, &subscribe(1, "file:///x")).await;
    let asked_first = world.read_one().await;
    let unsubscribe = request(&json!(2), "resources/unsubscribe", &json!({ "uri": "file:///x" }));
    let mut second = world.ask(client, &unsubscribe).await;
    let asked_second = world.read_one().await;
    assert_eq!(asked_second["method"], "resources/unsubscribe");
    world.say(&answer_to(&asked_first, &json!({})));
    world.say(&answer_to(&asked_second, &json!({})));
    assert_eq!((&item(&mut first).await["id"], &item(&mut second).await["id"]), (&json!(1), &json!(2)));
    world.say(&json!({ "jsonrpc": "2.0", "method": "notifications/resources/updated", "params": { "uri": "file:///x" } }));
    assert!(told.try_recv().is_err());
    world.bridge.leave(client);
    let other = world.bridge.visitor();
    let _request = world.ask(other, &request(&json!(1), "tools/list", &json!({}))).await;
    assert_eq!(world.read_one().await["method"], "tools/list");
}

#[tokio::test]
async fn a_client_has_a_limited_number_of_subscriptions_and_of_bytes_in_them() {
    let mut world = World::new(Role::Shared);
    let (many, _told) = world.bridge.join();
    let mut pending = Vec::new();
    // Requests without an answer count as well.
    for number in 0..256 {
        let mut exchange = world.ask(many, &subscribe(number, &format!("file:///{number}"))).await;
        let asked = world.read_one().await;
        if number % 2 == 0 {
            world.say(&answer_to(&asked, &json!({})));
            item(&mut exchange).await;
        }
        pending.push(exchange);
    }
    let refused = item(&mut world.ask(many, &subscribe(900, "file:///one-more")).await).await;
    assert_eq!(refused["error"]["code"], -32600, "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("256 subscriptions"), "{refused}");
    // One that the client has already is no further one.
    assert_eq!(item(&mut world.ask(many, &subscribe(901, "file:///0")).await).await["result"], json!({}));

    let (long, _told) = world.bridge.join();
    let uri = |length: usize| format!("file:///{}", "x".repeat(length - 8));
    let too_long = item(&mut world.ask(long, &subscribe(1, &uri((64 << 10) + 1))).await).await;
    assert_eq!(too_long["error"]["code"], -32600);
    let _exchange = world.ask(long, &subscribe(2, &uri(64 << 10))).await;
    assert_eq!(world.read_one().await["params"]["uri"], uri(64 << 10));
    let one_more = item(&mut world.ask(long, &subscribe(3, "file:///x")).await).await;
    assert_eq!(one_more["error"]["code"], -32600);
}

#[tokio::test]
async fn requests_of_a_shared_process_are_refused_and_those_of_an_exclusive_one_reach_its_client() {
    let ask =
        json!({ "jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage", "params": { "n": 1 } });
    let mut shared = World::new(Role::Shared);
    let (_, mut told) = shared.bridge.join();
    shared.say(&ask);
    shared.say(&json!({ "jsonrpc": "2.0", "id": 5, "method": "ping" }));
    let refused = shared.read_one().await;
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!("q"), &json!(-32601)));
    assert_eq!(shared.read_one().await, json!({ "jsonrpc": "2.0", "id": 5, "result": {} }));
    assert!(told.try_recv().is_err());

    let mut exclusive = World::new(Role::Exclusive);
    let (client, _told) = exclusive.bridge.join();
    let mut exchange = exclusive.ask(client, &request(&json!(1), "tools/call", &json!({}))).await;
    exclusive.read_one().await;
    exclusive.say(&ask);
    assert_eq!(item(&mut exchange).await, ask);
    for (id, is_asked) in [("other", false), ("q", true), ("q", false)] {
        let text = json!({ "jsonrpc": "2.0", "id": id, "result": { "ok": true } }).to_string();
        let answered = exclusive.bridge.answer(&Message::parse(&text).unwrap()).await;
        assert_eq!(answered, Ok(is_asked), "{id}");
    }
    assert_eq!(exclusive.read_one().await["result"]["ok"], true);
}

#[tokio::test]
async fn a_client_that_does_not_read_misses_notifications_but_never_the_answer() {
    let mut world = World::new(Role::Shared);
    let (client, _told) = world.bridge.join();
    let params = json!({ "_meta": { "progressToken": 1 } });
    let mut exchange = world.ask(client, &request(&json!(1), "x", &params)).await;
    let asked = world.read_one().await;
    for step in 0..10_000 {
        world.say(&json!({ "jsonrpc": "2.0", "method": "notifications/progress",
            "params": { "progressToken": asked["id"], "progress": step } }));
        world
            .say(&json!({ "jsonrpc": "2.0", "method": "notifications/message", "params": { "data": step } }));
    }
    world.say(&answer_to(&asked, &json!("done")));
    let mut seen = 0;
    loop {
        let next = item(&mut exchange).await;
        if next.get("result").is_some() {
            break;
        }
        seen += 1;
    }
    assert!((1..100).contains(&seen), "{seen}");
}

#[tokio::test]
async fn an_answer_that_is_too_long_fails_its_request_wherever_its_id_stands() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    for id_first in [true, false] {
        let mut exchange = world.ask(client, &request(&json!("big"), "x", &json!({}))).await;
        let id = world.read_one().await["id"].clone();
        let body = "x".repeat(9 << 20);
        let line = if id_first {
            format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{\"text\":\"{body}\"}}}}\n")
        } else {
            format!("{{\"result\":{{\"text\":\"{body}\"}},\"jsonrpc\":\"2.0\",\"id\":{id}}}\n")
        };
        line.as_bytes().chunks(60_000).for_each(|piece| world.bridge.receive(piece));
        let answer = item(&mut exchange).await;
        assert_eq!(answer["id"], "big");
        assert!(answer["error"]["message"].as_str().unwrap().contains("bytes"), "{answer}");
    }
}

#[tokio::test]
async fn a_notification_of_the_modern_era_goes_to_the_subscription_in_its_meta() {
    const TAG: &str = "io.modelcontextprotocol/subscriptionId";
    let mut world = World::new(Role::Shared);
    let (a, b) = (world.bridge.visitor(), world.bridge.visitor());
    let mut first =
        world.ask(a, &request(&json!(1_763_000_000_000_u64), "subscriptions/listen", &json!({}))).await;
    let asked_a = world.read_one().await;
    let mut second = world.ask(b, &request(&json!("b"), "subscriptions/listen", &json!({}))).await;
    let asked_b = world.read_one().await;
    for asked in [&asked_b, &asked_a] {
        world.say(&json!({ "jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged",
            "params": { "_meta": { TAG: asked["id"] } } }));
    }
    assert_eq!(item(&mut first).await["params"]["_meta"][TAG], 1_763_000_000_000_u64);
    assert_eq!(item(&mut second).await["params"]["_meta"][TAG], "b");
    world.say(
        &json!({ "jsonrpc": "2.0", "id": asked_b["id"], "result": { "_meta": { TAG: asked_b["id"] } } }),
    );
    assert_eq!(item(&mut second).await["result"]["_meta"][TAG], "b");
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_answer_of_the_process_fails_with_a_typed_error() {
    let mut world = World::new(Role::Shared);
    let client = world.bridge.visitor();
    let within = Duration::from_millis(50);
    let mut late = world.ask_within(client, &request(&json!(1), "slow", &json!({})), within).await;
    let Some(Item::Failed { error, line }) = late.next().await else { panic!("no failure") };
    assert_eq!(error, BridgeError::TimedOut(50));
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["error"]["code"], -32001);
    // The same code from the process itself is an answer like any other.
    let mut own = world.ask(client, &request(&json!(2), "x", &json!({}))).await;
    let mut asked = world.read_one().await;
    while asked["method"] != "x" {
        asked = world.read_one().await;
    }
    let error = json!({ "code": -32001, "message": "the MCP server has not answered within 5 ms" });
    world.say(&json!({ "jsonrpc": "2.0", "id": asked["id"], "error": error }));
    assert!(matches!(own.next().await, Some(Item::Answer(_))));
    let mut lost = world.ask(client, &request(&json!(3), "x", &json!({}))).await;
    world.bridge.close("it ended", true);
    let Some(Item::Failed { error, .. }) = lost.next().await else { panic!("no failure") };
    assert_eq!(error, BridgeError::Down("it ended".into()));
}
