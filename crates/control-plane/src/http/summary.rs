//! What the audit log keeps of a request: enough to know what was done to what, never contents.
//!
//! Commands, file contents and variables can hold secrets: of a command its length and hash are kept, of the others
//! their size or their names.

use std::sync::{Arc, OnceLock};

use emergent_wire::access::CreateToken;
use emergent_wire::git::GitRequest;
use emergent_wire::git_url::GitUrl;
use emergent_wire::mcp::RegisterMcpServer;
use emergent_wire::pool::PoolTarget;
use emergent_wire::snapshot::{CreateSnapshot, FromSnapshot};
use emergent_wire::tools::{BashRequest, EditRequest, GlobRequest, GrepRequest, ReadRequest, WriteRequest};
use emergent_wire::workspace::{AttachRequest, CreateWorkspace, DetachRequest};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The longest text that is kept of a path or pattern.
const MAX_CHARS: usize = 200;

/// Where a request's body leaves its summary for whoever records the call.
#[derive(Clone, Default)]
pub(super) struct SummarySlot(Arc<OnceLock<Value>>);

impl SummarySlot {
    pub(super) fn set(&self, summary: Value) {
        let _ = self.0.set(summary);
    }

    pub(super) fn get(&self) -> Value {
        self.0.get().cloned().unwrap_or(Value::Null)
    }
}

/// A body that can be summarised.
pub(super) trait Summarize {
    fn summary(&self) -> Value;
}

fn short(text: &str) -> String {
    text.chars().take(MAX_CHARS).collect()
}

fn short_option(text: Option<&String>) -> Option<String> {
    text.map(|text| short(text))
}

/// Where a repository is, without credentials: a request that carries some is recorded before it is refused.
fn repository(url: Option<&String>) -> Option<String> {
    url.map(|url| short(&GitUrl::without_credentials(url)))
}

impl Summarize for RegisterMcpServer {
    fn summary(&self) -> Value {
        let variables: Vec<&String> = self.environment.keys().collect();
        json!({ "name": short(&self.name), "image": short_option(self.image.as_ref()), "environment": variables })
    }
}

impl Summarize for AttachRequest {
    fn summary(&self) -> Value {
        json!({ "holder": short_option(self.holder.as_ref()) })
    }
}

impl Summarize for DetachRequest {
    fn summary(&self) -> Value {
        json!({ "holder": short_option(self.holder.as_ref()), "force": self.force })
    }
}

impl Summarize for CreateSnapshot {
    fn summary(&self) -> Value {
        json!({ "description": short_option(self.description.as_ref()) })
    }
}

impl Summarize for FromSnapshot {
    fn summary(&self) -> Value {
        json!({
            "snapshot_id": self.snapshot_id,
            "resource_limits": self.resource_limits,
            "network": self.network,
            "ttl_seconds": self.ttl_seconds,
            "variables": self.environment.keys().map(|name| short(name)).collect::<Vec<_>>(),
        })
    }
}

impl Summarize for PoolTarget {
    fn summary(&self) -> Value {
        json!({ "shapes": self.shapes.len(), "spares": self.shapes.iter().map(|shape| u64::from(shape.size)).sum::<u64>() })
    }
}

impl Summarize for BashRequest {
    fn summary(&self) -> Value {
        json!({
            "command_bytes": self.command.len(),
            "command_sha256": hex::encode(Sha256::digest(self.command.as_bytes())),
            "workdir": short_option(self.workdir.as_ref()),
            "timeout_ms": self.timeout_ms,
            "background": self.background,
            "variables": self.environment.keys().map(|name| short(name)).collect::<Vec<_>>(),
        })
    }
}

impl Summarize for ReadRequest {
    fn summary(&self) -> Value {
        json!({ "file_path": short(&self.file_path), "offset": self.offset, "limit": self.limit, "raw": self.raw })
    }
}

impl Summarize for WriteRequest {
    fn summary(&self) -> Value {
        json!({ "file_path": short(&self.file_path), "content_bytes": self.content.len() })
    }
}

impl Summarize for EditRequest {
    fn summary(&self) -> Value {
        json!({
            "file_path": short(&self.file_path),
            "old_bytes": self.old_string.len(),
            "new_bytes": self.new_string.len(),
            "replace_all": self.replace_all,
        })
    }
}

impl Summarize for GlobRequest {
    fn summary(&self) -> Value {
        json!({ "pattern": short(&self.pattern), "path": short_option(self.path.as_ref()) })
    }
}

impl Summarize for GrepRequest {
    fn summary(&self) -> Value {
        json!({
            "pattern": short(&self.pattern),
            "path": short_option(self.path.as_ref()),
            "include": short_option(self.include.as_ref()),
        })
    }
}

impl Summarize for GitRequest {
    fn summary(&self) -> Value {
        json!({
            "action": self.action,
            "path": short_option(self.path.as_ref()),
            "repository_url": repository(self.repository_url.as_ref()),
            "branch": short_option(self.branch.as_ref()),
            "remote": repository(self.remote.as_ref()),
        })
    }
}

impl Summarize for CreateWorkspace {
    fn summary(&self) -> Value {
        json!({
            "provider": self.provider,
            "security_level": self.security_level,
            "image": short_option(self.image.as_ref()),
            "resource_limits": self.resource_limits,
            "network": self.network,
            "repository_url": repository(self.repository_url.as_ref()),
            "branch": short_option(self.branch.as_ref()),
            "ttl_seconds": self.ttl_seconds,
            "variables": self.environment.keys().map(|name| short(name)).collect::<Vec<_>>(),
        })
    }
}

impl Summarize for CreateToken {
    fn summary(&self) -> Value {
        json!({ "name": short(&self.name), "workspace_id": self.workspace_id, "ttl_seconds": self.ttl_seconds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_and_secrets_are_not_kept() {
        let bash = BashRequest {
            command: "deploy --key hunter2".into(),
            environment: [("KEY".to_owned(), "hunter2".to_owned())].into(),
            ..BashRequest::default()
        };
        let write =
            WriteRequest { file_path: "a".into(), content: "hunter2".into(), ..WriteRequest::default() };
        let create = CreateWorkspace {
            repository_url: Some("https://user:hunter2@host.example/a/b".into()),
            environment: [("KEY".to_owned(), "hunter2".to_owned())].into(),
            ..CreateWorkspace::default()
        };
        for summary in [bash.summary(), write.summary(), create.summary()] {
            assert!(!summary.to_string().contains("hunter2"), "{summary}");
        }
        assert_eq!(create.summary()["repository_url"], "https://host.example/a/b");
        assert_eq!(bash.summary()["variables"], json!(["KEY"]));
    }
}
