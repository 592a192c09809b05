//! The table of providers.
//!
//! One entry per provider: the facts that placement decides by, and the function that opens the provider. Adding a provider
//! means one entry here and its module; a provider with a new name also needs the name in `wire` (`ProviderName`,
//! `ProviderChoice`), which is part of the public API. No other code decides by a provider's name.

use std::sync::Arc;

use emergent_wire::workspace::{ContainerType, DeploymentMode, IsolationLevel, ProviderName};

use crate::error::ProviderError;
use crate::provider::SharedProvider;
use crate::settings::{OpenContext, ProviderConfig};
use crate::traced::Traced;
use crate::{container, firecracker};

/// The facts about a provider that do not change while a server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderFacts {
    /// Its name.
    pub name: ProviderName,
    /// The isolation of its sandboxes.
    pub isolation: IsolationLevel,
    /// Its place in the order in which providers are tried.
    pub ranks: Ranks,
    /// Programs, devices and credentials that it needs.
    pub requires: &'static [&'static str],
    /// Providers with the same scope list, stop and remove each other's sandboxes: they are on one engine.
    pub sandbox_scope: &'static str,
    /// The reason why a server may run without it.
    pub absence: Absence,
}

impl ProviderFacts {
    /// The requirements as `GET /providers` shows them.
    pub fn requires(&self) -> Vec<String> {
        self.requires.iter().map(|name| (*name).to_owned()).collect()
    }
}

/// The ranks of a provider, for each kind of workspace. The lowest rank is tried first. A provider without a rank is used only
/// for requests that name it. Ranks are multiples of ten, so that a new provider fits between two others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// For hosted MCP servers.
    pub mcp_server: Option<u8>,
    /// For workspaces of an installation on its own hosts.
    pub self_hosted: Option<u8>,
    /// For workspaces of an installation in a cloud.
    pub managed: Option<u8>,
}

impl Ranks {
    /// The rank for one kind of workspace.
    pub const fn get(&self, container_type: ContainerType, deployment: DeploymentMode) -> Option<u8> {
        match (container_type, deployment) {
            (ContainerType::McpServer, _) => self.mcp_server,
            (ContainerType::AgentWorkspace, DeploymentMode::SelfHosted) => self.self_hosted,
            (ContainerType::AgentWorkspace, DeploymentMode::Managed) => self.managed,
        }
    }
}

/// The reason why a server runs without a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// Something that it needs is not set up. A request for it may succeed later.
    NotConfigured(&'static str),
    /// The operator has not allowed it. A request for it can't be accepted.
    NotAllowed(&'static str),
}

impl Absence {
    /// The reason in words.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::NotConfigured(reason) | Self::NotAllowed(reason) => reason,
        }
    }
}

/// Opens a provider with the server's settings. None: the settings do not turn it on.
pub type OpenProvider =
    Arc<dyn Fn(&OpenContext) -> Result<Option<SharedProvider>, ProviderError> + Send + Sync>;

/// One provider of the table.
#[derive(Clone)]
pub struct ProviderEntry {
    /// The facts that placement decides by.
    pub facts: ProviderFacts,
    /// Opens the provider. Connects to nothing yet.
    pub open: OpenProvider,
}

/// The table of providers, in the order in which they are reported.
#[derive(Clone)]
pub struct ProviderTable(Vec<ProviderEntry>);

impl ProviderTable {
    /// The providers of this version.
    pub fn standard() -> Self {
        Self(vec![firecracker::entry(), container::gvisor_entry(), e2b_entry(), container::docker_entry()])
    }

    /// The table with one more entry, or with another entry for the same name.
    #[must_use]
    pub fn with(mut self, entry: ProviderEntry) -> Self {
        match self.0.iter_mut().find(|known| known.facts.name == entry.facts.name) {
            Some(known) => *known = entry,
            None => self.0.push(entry),
        }
        self
    }

    /// The facts of all providers.
    pub fn facts(&self) -> impl Iterator<Item = &ProviderFacts> {
        self.0.iter().map(|entry| &entry.facts)
    }

    /// Whether two providers list and remove each other's sandboxes.
    pub fn share_sandboxes(&self, one: ProviderName, other: ProviderName) -> bool {
        let scope = |name| self.facts().find(|facts| facts.name == name).map(|facts| facts.sandbox_scope);
        one == other || scope(one).is_some_and(|own| scope(other) == Some(own))
    }

    /// Opens the providers that the settings turn on.
    pub fn open(self, settings: ProviderConfig) -> Result<Providers, ProviderError> {
        let context = OpenContext::new(settings);
        let mut enabled = Vec::new();
        for entry in &self.0 {
            let provider = (entry.open)(&context)?;
            enabled.extend(provider.map(|provider| Arc::new(Traced(provider)) as SharedProvider));
        }
        Ok(Providers { table: self, enabled })
    }
}

/// The table, and those of its providers that this server has.
#[derive(Clone)]
pub struct Providers {
    table: ProviderTable,
    enabled: Vec<SharedProvider>,
}

impl Providers {
    /// The standard table, and no provider.
    pub fn none() -> Self {
        Self { table: ProviderTable::standard(), enabled: Vec::new() }
    }

    /// The table.
    pub fn table(&self) -> &ProviderTable {
        &self.table
    }

    /// The providers that this server has, in the order of the table.
    pub fn iter(&self) -> std::slice::Iter<'_, SharedProvider> {
        self.enabled.iter()
    }

    /// A provider that this server has.
    pub fn get(&self, name: ProviderName) -> Option<&SharedProvider> {
        self.enabled.iter().find(|provider| provider.name() == name)
    }
}

impl<'a> IntoIterator for &'a Providers {
    type Item = &'a SharedProvider;
    type IntoIter = std::slice::Iter<'a, SharedProvider>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// E2B has a name and a place in the order, and no implementation yet.
fn e2b_entry() -> ProviderEntry {
    let facts = ProviderFacts {
        name: ProviderName::E2b,
        isolation: IsolationLevel::Microvm,
        ranks: Ranks { mcp_server: None, self_hosted: Some(30), managed: Some(10) },
        requires: &["E2B_API_KEY"],
        sandbox_scope: "e2b",
        absence: Absence::NotConfigured("E2B API key not configured"),
    };
    ProviderEntry { facts, open: Arc::new(|_| Ok(None)) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_provider_name_has_one_entry() {
        let names: Vec<ProviderName> = ProviderTable::standard().facts().map(|facts| facts.name).collect();
        assert_eq!(names, ProviderName::ALL);
    }

    #[test]
    fn ranks_are_distinct_for_each_kind_of_workspace() {
        let table = ProviderTable::standard();
        for container_type in ContainerType::ALL {
            for deployment in DeploymentMode::ALL {
                let ranks: Vec<u8> =
                    table.facts().filter_map(|facts| facts.ranks.get(*container_type, *deployment)).collect();
                assert_eq!(
                    ranks.iter().collect::<HashSet<_>>().len(),
                    ranks.len(),
                    "{container_type} {deployment}"
                );
            }
        }
    }

    #[test]
    fn only_providers_of_one_engine_share_sandboxes() {
        use ProviderName::{Docker, E2b, Firecracker, Gvisor};
        let table = ProviderTable::standard();
        assert!(table.share_sandboxes(Gvisor, Docker) && table.share_sandboxes(E2b, E2b));
        for (one, other) in [(Gvisor, Firecracker), (Firecracker, E2b), (E2b, Docker)] {
            assert!(
                !table.share_sandboxes(one, other) && !table.share_sandboxes(other, one),
                "{one} {other}"
            );
        }
    }
}
