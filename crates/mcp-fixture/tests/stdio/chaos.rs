//! `mcp-chaos` in each mode.

use std::process::Command;

use serde_json::{Value, json};

use crate::client::Client;

#[test]
fn echo_returns_text_and_meta_unchanged() {
    let mut client = Client::chaos(&[]);
    client.send(1, "tools/list", json!({}));
    assert_eq!(client.response(1)["result"]["tools"][0]["name"], "echo");
    let meta = r#"{"progressToken":1e2, "x":[ 1.0,"\u0041"]}"#;
    let params = format!(r#"{{"name":"echo","arguments":{{"text":"a\u00e4\n"}},"_meta":{meta}}}"#);
    client.send_line(&format!(r#"{{"jsonrpc":"2.0","id":"e","method":"tools/call","params":{params}}}"#));
    let line = client.line();
    assert!(line.contains(meta), "{line}");
    assert!(line.contains(r#""text":"a\u00e4\n""#), "{line}");
    client.call(2, "echo", json!({}));
    assert_eq!(client.response(2)["error"]["code"], -32602);
    client.send(3, "resources/list", json!({}));
    assert_eq!(client.response(3)["error"]["code"], -32601);
    client.close_input();
    assert_eq!(client.exit().code(), Some(0));
}

#[test]
fn calls_run_at_the_same_time() {
    let mut client = Client::chaos(&[]);
    client.call(1, "sleep", json!({"ms": 600_000, "text": "late"}));
    client.call(2, "sleep", json!({"ms": 1, "text": "soon"}));
    client.call(3, "echo", json!({"text": "now"}));
    assert_eq!((client.text(3), client.text(2)), ("now".to_owned(), "soon".to_owned()));
}

#[test]
fn tools_report_the_process_and_its_environment() {
    let mut client = Client::chaos(&["normal"]);
    client.call(1, "pid", json!({}));
    assert_eq!(client.text(1), client.pid().to_string());
    client.call(2, "env", json!({"name": "CHAOS_GREETING"}));
    assert_eq!(client.text(2), "hello");
    client.call(3, "env", json!({"name": "CHAOS_NOTHING"}));
    assert_eq!(client.response(3)["result"]["isError"], true);
    client.call(4, "whoami", json!({}));
    let who = client.response(4)["result"]["structuredContent"].clone();
    assert_eq!(who["argv"][1], "normal");
    assert_eq!(who["cwd"].as_str(), std::env::current_dir().unwrap().to_str());
    client.call(5, "stderr", json!({"text": "ouch"}));
    client.response(5);
    assert_eq!(client.error_line(), "ouch");
}

#[test]
fn tools_send_raw_lines_notifications_and_progress() {
    let mut client = Client::chaos(&[]);
    client.call(1, "raw", json!({"line": "{\"half\":"}));
    assert_eq!(client.line(), "{\"half\":");
    client.response(1);
    client.call(2, "notify", json!({"method": "notifications/tools/list_changed"}));
    assert_eq!(client.line(), r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#);
    client.response(2);
    let progress = json!({"name": "progress", "arguments": {"steps": 2, "text": "done"}, "_meta": {"progressToken": "t"}});
    client.send(3, "tools/call", progress);
    assert_eq!(client.message()["params"], json!({"progressToken": "t", "progress": 1, "total": 2}));
    assert_eq!(client.message()["params"]["progress"], 2);
    assert_eq!(client.text(3), "done");
}

#[test]
fn it_sends_requests_and_records_notifications() {
    let mut client = Client::chaos(&[]);
    client.call(1, "ask", json!({"method": "roots/list"}));
    let request = client.message();
    assert_eq!(request["method"], "roots/list");
    let id = &request["id"];
    client.send_line(&format!(r#"{{"jsonrpc":"2.0", "id":{id},"error":{{"code":-1,"message":"no"}}}}"#));
    let answered = client.response(1)["result"]["structuredContent"]["response"].clone();
    assert_eq!(answered["error"], json!({"code": -1, "message": "no"}));
    client.notify("notifications/cancelled", json!({"requestId": 7}));
    client.call(2, "received", json!({}));
    let received = client.response(2)["result"]["structuredContent"]["notifications"].clone();
    let methods: Vec<&str> =
        received.as_array().unwrap().iter().filter_map(|one| one["method"].as_str()).collect();
    assert_eq!(methods, ["notifications/initialized", "notifications/cancelled"]);
}

#[test]
fn a_spawned_process_has_its_own_session_and_outlives_the_server() {
    let mut client = Client::chaos(&[]);
    client.call(1, "spawn", json!({"seconds": 60}));
    let pid = client.text(1);
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session = stat.rsplit(") ").next().unwrap().split(' ').nth(3).unwrap();
    assert_eq!(session, pid);
    client.close_input();
    client.exit();
    assert!(std::fs::exists(format!("/proc/{pid}")).unwrap());
    assert!(Command::new("kill").arg(&pid).status().unwrap().success());
}

#[test]
fn modes_that_ignore_the_end_of_the_input_keep_running() {
    for (mode, answers) in [("ignore-eof", true), ("ignore-term", true), ("normal", false)] {
        let mut client = Client::chaos(&[mode]);
        client.call(1, "sleep", json!({"ms": 50, "text": "still here"}));
        client.close_input();
        if answers {
            assert_eq!(client.text(1), "still here", "{mode}");
        } else {
            assert_eq!(client.exit().code(), Some(0));
            assert_eq!(client.rest(), [""; 0]);
        }
    }
}

#[test]
fn only_ignore_term_survives_sigterm() {
    let mut client = Client::chaos(&["ignore-term"]);
    client.signal(libc::SIGTERM);
    client.call(1, "echo", json!({"text": "still here"}));
    assert_eq!(client.text(1), "still here");
    let mut client = Client::chaos(&["ignore-eof"]);
    client.close_input();
    client.signal(libc::SIGTERM);
    assert_eq!(client.exit().code(), Some(0));
}

#[test]
fn crashes_have_their_exit_status() {
    let mut client = Client::chaos(&[]);
    client.call(1, "crash", json!({"code": 7}));
    assert_eq!(client.exit().code(), Some(7));
    let mut client = Client::start(env!("CARGO_BIN_EXE_mcp-chaos"), &["die-in-initialize"]);
    client.send(1, "initialize", json!({}));
    assert_eq!(client.error_line(), "boom");
    assert_eq!(client.exit().code(), Some(3));
    let mut client = Client::start(env!("CARGO_BIN_EXE_mcp-chaos"), &["refuse-initialize"]);
    client.send(1, "initialize", json!({}));
    assert_eq!(client.response(1)["error"]["message"], "not today");
    let mut client = Client::start(env!("CARGO_BIN_EXE_mcp-chaos"), &["exit-after", "20"]);
    assert_eq!(client.exit().code(), Some(1));
}

#[test]
fn silent_modes_do_not_answer() {
    let mut client = Client::start(env!("CARGO_BIN_EXE_mcp-chaos"), &["silent"]);
    client.send(1, "initialize", json!({}));
    client.close_input();
    client.exit();
    assert_eq!(client.rest(), [""; 0]);
    let mut client = Client::chaos(&["silent-after-init"]);
    client.send(1, "ping", json!({}));
    client.close_input();
    client.exit();
    assert_eq!(client.rest(), [""; 0]);
}

#[test]
fn floods_do_not_delay_answers() {
    for (mode, expected) in [("flood-stdout", "{\"jsonrpc\""), ("flood-junk", "this is not JSON")] {
        let mut client = Client::chaos(&[mode]);
        for _ in 0..2000 {
            assert!(client.line().starts_with(expected), "{mode}");
        }
        client.call(1, "echo", json!({"text": "through"}));
        assert_eq!(client.text(1), "through", "{mode}");
    }
    let mut client = Client::chaos(&["flood-stderr"]);
    for _ in 0..2000 {
        assert_eq!(client.error_line(), "a lot to complain about");
    }
    client.call(1, "echo", json!({"text": "through"}));
    assert_eq!(client.text(1), "through");
}

#[test]
fn half_long_and_junk_lines_are_written() {
    let mut client = Client::chaos(&["half-line"]);
    client.call(1, "echo", json!({"text": "whole"}));
    assert_eq!(client.line(), r#"{"jsonrpc":"2.0","method":"notifications/mess"#);
    assert_eq!(client.text(1), "whole");
    let mut client = Client::chaos(&["long-line", "100000"]);
    client.call(1, "long", json!({}));
    assert_eq!(client.line().len(), 100_000);
    let mut client = Client::chaos(&["junk"]);
    client.send(1, "ping", json!({}));
    let lines: Vec<String> = (0..4).map(|_| client.line()).collect();
    assert_eq!(lines[..3], ["this is not JSON", "", "\r"]);
    assert_eq!(lines[3], r#"{"jsonrpc":"2.0","id":1,"result":{}}"#);
}

#[test]
fn answers_are_repeated_foreign_or_late() {
    let mut client = Client::chaos(&["twice"]);
    client.call(1, "echo", json!({"text": "again"}));
    assert_eq!((client.text(1), client.text(1)), ("again".to_owned(), "again".to_owned()));
    let mut client = Client::chaos(&["stranger"]);
    client.send(1, "ping", json!({}));
    let ids: Vec<Value> = (0..3).map(|_| client.message()["id"].clone()).collect();
    assert_eq!(ids, [json!(987_654_321), json!("stranger"), json!(1)]);
    let mut client = Client::chaos(&["slow-start", "20"]);
    client.call(1, "echo", json!({"text": "late"}));
    assert_eq!(client.text(1), "late");
}
