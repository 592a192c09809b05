//! The table's entries of the container providers.

use std::sync::Arc;

use emergent_wire::workspace::{IsolationLevel, ProviderName};

use super::provider::{ContainerProvider, Runtime};
use crate::table::{Absence, ProviderEntry, ProviderFacts, Ranks};

/// Both container providers are on one engine and see each other's containers.
const DOCKER_ENGINE: &str = "docker engine";

pub(super) const GVISOR: ProviderFacts = ProviderFacts {
    name: ProviderName::Gvisor,
    isolation: IsolationLevel::ApplicationKernel,
    ranks: Ranks { mcp_server: Some(10), self_hosted: Some(20), managed: Some(30) },
    requires: &["docker", "runsc"],
    sandbox_scope: DOCKER_ENGINE,
    absence: Absence::NotConfigured("turned off by the configuration: providers.gvisor is false"),
};

/// The last resort, because its containers share the host's kernel.
pub(super) const DOCKER: ProviderFacts = ProviderFacts {
    name: ProviderName::Docker,
    isolation: IsolationLevel::Container,
    ranks: Ranks { mcp_server: Some(90), self_hosted: Some(90), managed: Some(90) },
    requires: &["docker"],
    sandbox_scope: DOCKER_ENGINE,
    absence: Absence::NotAllowed(
        "plain Docker is not allowed by the configuration: set providers.allow_docker to use plain containers",
    ),
};

/// Containers on gVisor.
pub(crate) fn gvisor_entry() -> ProviderEntry {
    ProviderEntry {
        facts: GVISOR,
        open: Arc::new(|context| {
            if !context.gvisor {
                return Ok(None);
            }
            Ok(Some(Arc::new(ContainerProvider::new(Runtime::Gvisor, &context.container_host()?))))
        }),
    }
}

/// Plain containers.
pub(crate) fn docker_entry() -> ProviderEntry {
    ProviderEntry {
        facts: DOCKER,
        open: Arc::new(|context| {
            if !context.plain_docker {
                return Ok(None);
            }
            tracing::warn!("plain Docker is allowed: workspaces on it share the host's kernel");
            Ok(Some(Arc::new(ContainerProvider::new(Runtime::Plain, &context.container_host()?))))
        }),
    }
}
