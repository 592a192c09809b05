//! Access checks of all routes, and the protection of secrets. The routes are those that the server declares
//! ([`emergent_control_plane::declared_routes`]), so each new route is tested.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use emergent_control_plane::{Access, declared_routes};
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
/// Routes that need no token.
const OPEN: [&str; 4] = ["/", "/api/docs", "/health/live", "/health/ready"];
/// Routes that are not in the OpenAPI document.
const UNDESCRIBED: [&str; 3] = ["/", "/api/docs", "/metrics"];

#[tokio::test]
async fn every_route_refuses_a_missing_a_wrong_and_a_foreign_token() {
    let server = TestServer::start(BINARY).await;
    let description = server.request("GET", "/api/v1/openapi.json", None).await.ok();
    let own = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    let other = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    let token = |name: &str, workspace: &str| json!({ "name": name, "workspace_id": workspace });
    let foreign = server.request("POST", "/api/v1/tokens", Some(token("foreign", &other))).await.ok();
    let foreign = foreign["secret"].as_str().unwrap().to_owned();
    let revoked = server.request("POST", "/api/v1/tokens", Some(json!({ "name": "revoked" }))).await.ok();
    let path = format!("/api/v1/tokens/{}", revoked["id"].as_str().unwrap());
    assert_eq!(server.request("DELETE", &path, None).await.status, 204);
    let revoked = revoked["secret"].as_str().unwrap();

    let routes = declared_routes();
    let of_description = description["paths"].as_object().unwrap().iter().flat_map(|(path, methods)| {
        methods.as_object().unwrap().keys().map(move |method| (method.to_uppercase(), path.clone()))
    });
    let of_description: BTreeSet<_> = of_description.collect();
    let declared = routes.iter().filter(|route| !UNDESCRIBED.contains(&route.path.as_str()));
    let declared: BTreeSet<_> = declared.map(|route| (route.method.clone(), route.path.clone())).collect();
    assert_eq!(declared, of_description, "a route is not declared, or not in the OpenAPI document");
    let open = routes.iter().filter(|route| route.access == Access::Open);
    assert_eq!(open.map(|route| route.path.as_str()).collect::<BTreeSet<_>>(), BTreeSet::from(OPEN));

    for route in &routes {
        let (method, address) =
            (&route.method, route.path.replace("{id}", &own).replace("{operation}", &own));
        if route.access == Access::Open {
            let answer = server.request_as(None, method, &address, None).await;
            assert!(answer.status < 400, "{method} {address}: {}", answer.status);
            continue;
        }
        for bad in [None, Some("emt_wrong"), Some(""), Some(revoked), Some(&server.token[..20])] {
            let answer = server.request_as(bad, method, &address, Some(json!({}))).await;
            assert_eq!(answer.status, 401, "{method} {address} with {bad:?}: {}", answer.body);
            assert_eq!(answer.body["error"]["code"], "unauthorized");
        }
        let answer = server.request_as(Some(&foreign), method, &address, Some(json!({}))).await;
        assert_eq!(answer.status, 403, "{method} {address} with a foreign token: {}", answer.body);
    }
    // The refused requests had no effect.
    assert_eq!(server.bash(&own, "echo alive").await, "alive\n");
    let audited = server.request("GET", "/api/v1/audit?outcome=denied&limit=500", None).await.ok();
    assert!(audited["records"].as_array().unwrap().len() >= routes.len(), "refusals are audited");
    for id in [own, other] {
        server.destroy(&id).await;
    }
    server.stop();
}

#[tokio::test]
async fn workspace_token_can_use_but_not_destroy_its_workspace() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    let request = json!({ "name": "own", "workspace_id": id });
    let token = server.request("POST", "/api/v1/tokens", Some(request)).await.ok();
    let token = token["secret"].as_str().unwrap();
    let bash = format!("{WORKSPACES}/{id}/bash");
    let answer =
        server.request_as(Some(token), "POST", &bash, Some(json!({ "command": "echo hi" }))).await.ok();
    assert_eq!(answer["stdout"], "hi\n");
    let destroy = server.request_as(Some(token), "DELETE", &format!("{WORKSPACES}/{id}"), None).await;
    assert_eq!(destroy.status, 403);
    server.destroy(&id).await;
    // The token is removed with its workspace.
    let answer = server.request_as(Some(token), "POST", &bash, Some(json!({ "command": "echo hi" }))).await;
    assert_eq!(answer.status, 401);
    server.stop();
}

#[tokio::test]
async fn secrets_are_in_no_file_log_or_container_setting() {
    let server =
        TestServer::start_with(BINARY, &[("EMERGENT_ALLOW_DOCKER", "true"), ("EMERGENT_LOG", "trace")]).await;
    let environment = json!({ "API_KEY": "hunter2-very-secret" });
    let request = json!({ "provider": "docker", "network": "isolated", "environment": environment });
    let id = server.create(request).await;
    assert_eq!(server.bash(&id, "echo ${#API_KEY}").await, "19\n");
    let inspected =
        emergent_test_support::command::run("docker", &["inspect", &format!("agent-workspace-{id}")]);
    assert!(!inspected.contains("hunter2"), "a setting of the container has a secret");
    let seen: Value = server.workspace(&id).await;
    assert!(!seen.to_string().contains("hunter2"));
    for file in ["emergent.db", "emergent.db-wal", "test.log"] {
        let bytes = std::fs::read(server.data_dir().join(file)).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains("hunter2"), "{file} has a secret");
        assert!(!text.contains(server.token.trim()), "{file} has the admin token");
    }
    for file in ["admin-token", "server-url", "encryption-key", "emergent.db"] {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(server.data_dir().join(file)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{file}");
    }
    server.destroy(&id).await;
    server.stop();
}
