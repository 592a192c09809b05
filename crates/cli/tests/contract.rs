//! The contract of every provider: the same calls give byte-identical answers.
//!
//! A new provider is added to `PROVIDERS`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use emergent_test_support::microvm::Microvms;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const PROVIDERS: [&str; 3] = ["gvisor", "docker", "firecracker"];

/// The calls, in their order. A call depends on the effects of those before it.
fn script() -> Vec<(&'static str, Value)> {
    let bash = |command: &str| ("bash", json!({ "command": command }));
    let long_line = "é".repeat(3000);
    vec![
        bash("echo out; echo err >&2; exit 3"),
        bash("pwd; id -u; echo $0; echo \"$HOME\"; umask"),
        bash("printf 'a\\0b\\xff\\xfe'"),
        bash("cat; echo stdin was empty"),
        bash("false | true; echo ${PIPESTATUS[@]}"),
        bash("set -e; false; echo never"),
        bash("cat <<'END'\nhere $document `x`\nEND"),
        bash("nosuchcommand"),
        bash("if then"),
        bash("kill -TERM $$"),
        bash("seq 1 20000"),
        bash("ulimit -s; ulimit -n; ulimit -c; env | cut -d= -f1 | sort"),
        bash("sleep 300 & echo background"),
        bash("pkill sleep; true"),
        (
            "bash",
            json!({ "command": "echo $A-$B; pwd", "environment": { "A": "it's", "B": "$x `y`" }, "workdir": "/tmp" }),
        ),
        ("bash", json!({ "command": "true", "workdir": "/nowhere" })),
        ("bash", json!({ "command": "true", "workdir": "/etc/passwd" })),
        ("bash", json!({ "command": "echo started; exec sleep 60", "timeout_ms": 300 })),
        ("bash", json!({ "command": format!("echo {}", "x".repeat(100_000)) })),
        ("bash", json!({ "command": format!(": {}", "x".repeat(200_000)) })),
        ("write", json!({ "file_path": "a/b/c.txt", "content": "one\ntwo\nthree\n" })),
        ("write", json!({ "file_path": "a/b/c.txt", "content": "one\ntwo\nthree\nfour" })),
        ("write", json!({ "path": "crlf.txt", "content": "one\r\ntwo\r\n" })),
        ("write", json!({ "path": "binary", "content": "AAEC/w==", "encoding": "base64" })),
        ("write", json!({ "path": "long", "content": long_line })),
        ("write", json!({ "path": "a", "content": "a directory" })),
        ("write", json!({ "path": "big", "content": "0123456789abcde\n".repeat(400_000) })),
        ("read", json!({ "path": "a/b/c.txt" })),
        ("read", json!({ "path": "a/b/c.txt", "offset": 2, "limit": 1 })),
        ("read", json!({ "path": "a/b/c.txt", "offset": 9 })),
        ("read", json!({ "path": "binary" })),
        ("read", json!({ "path": "binary", "raw": true })),
        ("read", json!({ "path": "long" })),
        ("read", json!({ "path": "big", "offset": 200_000 })),
        ("read", json!({ "path": "." })),
        ("read", json!({ "path": "a/b/d.txt" })),
        ("read", json!({ "path": "/dev/null" })),
        ("read", json!({ "path": "a\u{0}b" })),
        ("read", json!({ "path": "../etc/debian_version" })),
        ("edit", json!({ "path": "a/b/c.txt", "old_string": "two", "new_string": "2" })),
        ("edit", json!({ "path": "crlf.txt", "old_string": "one\ntwo", "new_string": "1\n2" })),
        ("edit", json!({ "path": "a/b/c.txt", "old_string": "absent", "new_string": "x" })),
        ("edit", json!({ "path": "a/b/c.txt", "old_string": "e", "new_string": "E" })),
        ("edit", json!({ "path": "a/b/c.txt", "old_string": "e", "new_string": "E", "replace_all": true })),
        ("edit", json!({ "path": "a/b/c.txt", "old_string": "x", "new_string": "x" })),
        ("edit", json!({ "path": "new.txt", "old_string": "", "new_string": "made by edit\n" })),
        (
            "edit",
            json!({ "path": "new.txt", "old_string": "made", "new_string": "M", "expected_sha256": "0".repeat(64) }),
        ),
        bash("od -c crlf.txt; cat a/b/c.txt; stat -c '%a %U' new.txt"),
        bash(
            "mkdir -p t/node_modules && touch -d @1 t/old.ts && touch -d @2 t/new.ts t/node_modules/x.ts && echo node_modules > t/.gitignore",
        ),
        ("glob", json!({ "pattern": "**/*.ts" })),
        ("glob", json!({ "pattern": "*.ts", "path": "t", "limit": 1 })),
        ("glob", json!({ "pattern": "[" })),
        ("glob", json!({ "pattern": "*", "path": "nowhere" })),
        ("grep", json!({ "pattern": "(?i)ONE|four" })),
        ("grep", json!({ "pattern": "2", "include": "*.txt", "context": 1 })),
        ("grep", json!({ "pattern": "(" })),
        ("grep", json!({ "pattern": "x", "path": "nowhere" })),
        ("git", json!({ "action": "status" })),
        bash(
            "git init -q -b main r && cd r && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first --date=2001-02-03T04:05:06Z",
        ),
        ("write", json!({ "path": "r/file", "content": "1\n" })),
        ("git", json!({ "action": "diff", "path": "r" })),
        bash("cd r && git add file"),
        ("git", json!({ "action": "diff", "path": "r", "staged": true })),
        ("git", json!({ "action": "checkout", "path": "r", "branch": "nowhere" })),
        ("git", json!({ "action": "push", "path": "r" })),
        ("git", json!({ "action": "clone", "repository_url": "ssh://x/y" })),
        (
            "git",
            json!({ "action": "clone", "repository_url": "/workspace/r", "path": "copy", "branch": "nowhere" }),
        ),
        ("bash", json!({ "command": "" })),
        ("bash", json!({ "command": "x", "unknown": 1 })),
        ("read", json!({ "path": 5 })),
        ("read", json!({ "path": "a", "limit": 0 })),
    ]
}

/// An answer without the fields and ids that differ between calls.
fn normalized(mut body: Value) -> Value {
    if let Some(object) = body.as_object_mut() {
        for field in ["duration_ms", "operation_id"] {
            object.remove(field);
        }
        for field in ["stdout_path", "stderr_path", "stdout", "commits", "status"] {
            if let Some(value) = object.get_mut(field) {
                let text = without_ids(&value.to_string());
                *value = serde_json::from_str(&text).unwrap();
            }
        }
    }
    body
}

/// Replaces ids and commit hashes, which depend on the time.
fn without_ids(text: &str) -> String {
    let mut out = String::new();
    let mut word = String::new();
    for c in text.chars().chain(['"']) {
        if c.is_ascii_hexdigit() || c == '-' {
            word.push(c);
            continue;
        }
        let is_id = word.len() >= 36;
        out.push_str(if is_id { "ID" } else { &word });
        word.clear();
        out.push(c);
    }
    out.pop();
    out
}

#[tokio::test]
async fn same_calls_give_identical_answers_on_every_provider() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[("EMERGENT_ALLOW_DOCKER", "true")]).await;
    let mut ids = Vec::new();
    for provider in PROVIDERS {
        let body = if provider == "firecracker" { microvms.small() } else { json!({ "provider": provider }) };
        ids.push(server.create(body).await);
    }
    let mut differences = Vec::new();
    for (number, (tool, request)) in script().into_iter().enumerate() {
        let mut answers = Vec::new();
        for id in &ids {
            let answer = server.tool(id, tool, request.clone()).await;
            answers.push((answer.status, normalized(answer.body)));
        }
        let shown: String = request.to_string().chars().take(200).collect();
        for (provider, answer) in PROVIDERS.iter().zip(&answers).skip(1) {
            if answer != &answers[0] {
                let (other, first) = (shortened(answer), shortened(&answers[0]));
                differences.push(format!(
                    "call {number} {tool} {shown}\n  {provider}: {other}\n  {}: {first}",
                    PROVIDERS[0]
                ));
            }
        }
        assert_ne!(answers[0].0, 500, "call {number} {tool} {shown}: {}", answers[0].1);
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    for id in &ids {
        server.destroy(id).await;
    }
    microvms.keep_images(&server.data_dir().join("firecracker"));
    server.stop();
}

fn shortened((status, body): &(u16, Value)) -> String {
    let text = body.to_string();
    format!("{status} {}", text.chars().take(1000).collect::<String>())
}

#[test]
fn only_ids_are_replaced_before_answers_are_compared() {
    assert_eq!(without_ids("\"/x/01a1e133-12a5-77ce-8171-5fbb7066215b/y\""), "\"/x/ID/y\"");
    assert_eq!(without_ids("\"abc 12\""), "\"abc 12\"");
}
