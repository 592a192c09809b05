//! Repositories on a real git server, which workspaces reach like an external server.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use emergent_test_support::git_server::GitServer;
use emergent_test_support::internet::Internet;
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const FILES: [(&str, &str); 2] =
    [("README.md", "# Project\n"), ("src/lib.rs", "pub fn one() -> u8 {\n    1\n}\n")];

async fn git(server: &TestServer, id: &str, request: Value) -> Value {
    server.tool(id, "git", request).await.ok()
}

#[tokio::test]
async fn repository_is_cloned_before_ready_and_commits_are_pushed_and_pulled() {
    let internet = Internet::start();
    let repository = GitServer::start(internet.listen(), &FILES);
    let server = TestServer::start(BINARY).await;
    let created = server
        .request("POST", WORKSPACES, Some(json!({ "repository_url": repository.url(), "branch": "main" })))
        .await
        .ok();
    assert_eq!(created["status"], "ready", "{created}");
    assert_eq!(created["metadata"]["warnings"], Value::Null, "{created}");
    let id = created["id"].as_str().unwrap();
    assert_eq!(
        server.bash(id, "cat src/lib.rs; git remote get-url origin").await,
        format!("{}{}\n", FILES[1].1, repository.url())
    );

    let edit = json!({ "file_path": "src/lib.rs", "old_string": "    1\n", "new_string": "    2\n" });
    server.tool(id, "edit", edit).await.ok();
    let status = git(&server, id, json!({ "action": "status" })).await;
    assert_eq!(
        (&status["status"]["branch"], &status["status"]["clean"]),
        (&json!("main"), &json!(false)),
        "{status}"
    );
    git(&server, id, json!({ "action": "checkout", "branch": "two", "create": true })).await;
    git(&server, id, json!({ "action": "commit", "message": "Return two" })).await;
    git(&server, id, json!({ "action": "push", "branch": "two" })).await;
    let pushed = repository.git(&["log", "-1", "--format=%an <%ae> %s", "two"]);
    assert_eq!(pushed, "Emergent Agent <agent@emergent.local> Return two\n");
    assert_eq!(repository.git(&["show", "two:src/lib.rs"]), FILES[1].1.replace("    1", "    2"));

    // A commit of another author is pulled.
    repository.git(&["update-ref", "refs/heads/main", "refs/heads/two"]);
    git(&server, id, json!({ "action": "checkout", "branch": "main" })).await;
    git(&server, id, json!({ "action": "pull" })).await;
    assert!(server.bash(id, "cat src/lib.rs").await.contains("    2\n"));

    // The identity in the repository's configuration is used.
    server.bash(id, "git config user.name Ann && git config user.email ann@example.com && touch new").await;
    let made = git(&server, id, json!({ "action": "commit", "message": "Add a file" })).await;
    assert_eq!(made["commits"][0]["author_email"], "ann@example.com", "{made}");
    let committer = server.bash(id, "git log -1 --format='%cn <%ce>'").await;
    assert_eq!(committer, "Ann <ann@example.com>\n");

    // A refused clone has a reason and leaves no directory.
    repository.git(&["config", "receive.denyDeletes", "true"]);
    repository.git(&["config", "core.hooksPath", "/nonexistent"]);
    let other =
        json!({ "action": "clone", "repository_url": format!("{}x", repository.url()), "path": "other" });
    let refused = server.tool(id, "git", other).await;
    assert!(refused.message().contains("not found"), "{refused:?}");
    assert_eq!(refused.error(422), "git_failed");
    server.bash(id, "test ! -e other").await;
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn private_repository_leaves_an_empty_workspace_with_a_warning() {
    let internet = Internet::start();
    let repository = GitServer::start_private(internet.listen(), &FILES);
    let server = TestServer::start(BINARY).await;
    let created =
        server.request("POST", WORKSPACES, Some(json!({ "repository_url": repository.url() }))).await.ok();
    assert_eq!(created["status"], "ready");
    assert_eq!(
        created["metadata"]["warnings"],
        json!(["Repository authentication failed — connect GitHub in Settings > Integrations"]),
        "{created}"
    );
    let id = created["id"].as_str().unwrap();
    assert_eq!(server.bash(id, "ls -A | grep -v '^.emergent$' || true").await, "");
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn missing_repository_or_branch_fails_the_create() {
    let internet = Internet::start();
    let repository = GitServer::start(internet.listen(), &FILES);
    let server = TestServer::start(BINARY).await;
    for request in [
        json!({ "repository_url": format!("{}x", repository.url()) }),
        json!({ "repository_url": repository.url(), "branch": "no-such-branch" }),
    ] {
        let refused = server.request("POST", WORKSPACES, Some(request)).await;
        assert!(refused.message().contains("not found"), "{refused:?}");
        assert_eq!(refused.error(422), "git_failed");
    }
    let listed = server.request("GET", WORKSPACES, None).await.ok();
    assert_eq!(listed["workspaces"], json!([]));
    server.stop();
}

#[tokio::test]
async fn workspace_reaches_the_internet_but_not_the_host() {
    let internet = Internet::start();
    let repository = GitServer::start(internet.listen(), &FILES);
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let reach = |url: &str| format!("git ls-remote {url} 2>&1 | tail -1");
    let outside = server.bash(&id, &reach(&repository.url())).await;
    assert!(outside.contains("refs/heads/main"), "{outside}");
    // The host's address on the link to the git server, and the gateway of the workspace.
    let port = server.url.rsplit(':').next().unwrap();
    let near = std::net::Ipv4Addr::from_bits(internet.address.to_bits() - 1);
    for host in [near.to_string(), "$(ip route | sed -n 's/default via \\([0-9.]*\\).*/\\1/p')".to_owned()] {
        let answer = server.bash(&id, &reach(&format!("http://{host}:{port}/x"))).await;
        assert!(
            answer.contains("Failed to connect") || answer.contains("unable to access"),
            "{host}: {answer}"
        );
    }
    server.destroy(&id).await;
    server.stop();
}
