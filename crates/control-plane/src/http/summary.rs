//! Summaries of request bodies for the audit log, and the slot that carries a summary to the layer that records the call.

use std::sync::{Arc, OnceLock};

use emergent_wire::access::CreateToken;
use emergent_wire::mcp::RegisterMcpServer;
use emergent_wire::pool::PoolTarget;
use emergent_wire::snapshot::{CreateSnapshot, FromSnapshot};
use emergent_wire::workspace::{AttachRequest, CreateWorkspace, DetachRequest};
use serde_json::{Value, json};

use crate::summary::{Summarize, repository, short, short_option};

/// The slot of one request.
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
    use emergent_wire::tools::{BashRequest, WriteRequest};

    use super::*;

    #[test]
    fn summaries_have_no_contents_and_no_secrets() {
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
