//! The installation's network: a bridge on which workspaces can't reach each other, behind the installation's firewall.

use std::collections::HashMap;
use std::net::IpAddr;

use bollard::models::NetworkCreateRequest;
use emergent_host::network::default_route_mtu;
use emergent_wire::id::InstallationId;
use parking_lot::Mutex;

use super::LABEL_INSTALLATION;
use super::engine::{ACT, Engine, within};
use super::engine_error::{EngineError, ignore_not_found};
use super::firewall::Firewall;
use crate::error::ProviderError;

/// The network of one installation.
pub(crate) struct Network {
    pub(crate) name: String,
    installation: InstallationId,
    firewall: Firewall,
    /// Whether this process has put it in place.
    ready: tokio::sync::Mutex<bool>,
    problem: Mutex<Option<String>>,
}

impl Network {
    pub(crate) fn new(installation: InstallationId, nameservers: Vec<IpAddr>) -> Self {
        // The end of a version 7 id is its random part. An interface's name has at most 15 characters.
        let text = installation.0.simple().to_string();
        let short = &text[text.len() - 10..];
        let bridge = format!("em-{short}");
        Self {
            name: format!("emergent-{short}"),
            installation,
            firewall: Firewall { bridge, nameservers },
            ready: tokio::sync::Mutex::new(false),
            problem: Mutex::new(None),
        }
    }

    /// The name servers of sandboxes.
    pub(crate) fn nameservers(&self) -> Vec<String> {
        self.firewall.nameservers.iter().map(ToString::to_string).collect()
    }

    /// Puts network and rules in place, once per process.
    pub(crate) async fn ensure(&self, engine: &Engine) -> Result<(), ProviderError> {
        let mut ready = self.ready.lock().await;
        if !*ready {
            self.make(engine).await?;
            *ready = true;
        }
        Ok(())
    }

    async fn make(&self, engine: &Engine) -> Result<(), ProviderError> {
        let made =
            self.create(engine).await.map_err(|error| ProviderError::failed("creating the network", error));
        let made = match made {
            Ok(()) => {
                let firewall = self.firewall.clone();
                let ensured = tokio::task::spawn_blocking(move || firewall.ensure()).await;
                ensured.map_err(|error| error.to_string()).flatten().map_err(|reason| {
                    ProviderError::Unavailable(format!(
                        "workspaces with network access need firewall rules, which can't be set: {reason}. Run the \
                         server as root with iptables installed, or create workspaces with network \"isolated\""
                    ))
                })
            }
            Err(error) => Err(error),
        };
        *self.problem.lock() = made.as_ref().err().map(ToString::to_string);
        made
    }

    async fn create(&self, engine: &Engine) -> Result<(), EngineError> {
        let options = HashMap::from([
            ("com.docker.network.bridge.name".to_owned(), self.firewall.bridge.clone()),
            ("com.docker.network.bridge.enable_icc".to_owned(), "false".to_owned()),
            ("com.docker.network.driver.mtu".to_owned(), default_route_mtu().to_string()),
        ]);
        let request = NetworkCreateRequest {
            name: self.name.clone(),
            driver: Some("bridge".to_owned()),
            options: Some(options),
            labels: Some(HashMap::from([(LABEL_INSTALLATION.to_owned(), self.installation.to_string())])),
            ..NetworkCreateRequest::default()
        };
        let docker = engine.docker().await?;
        match within(ACT, docker.inspect_network(&self.name, None)).await {
            Ok(_) => Ok(()),
            Err(EngineError::NotFound(_)) => match within(ACT, docker.create_network(request)).await {
                Ok(_) => Ok(()),
                // Another server of the installation may have created it meanwhile. Engines report that in different ways
                // (the name is taken, the bridge is taken), so the network itself decides.
                Err(error) => {
                    within(ACT, docker.inspect_network(&self.name, None)).await.map(drop).map_err(|_| error)
                }
            },
            Err(error) => Err(error),
        }
    }

    /// Removes network and rules.
    pub(crate) async fn remove(&self, engine: &Engine) -> Result<(), ProviderError> {
        let mut ready = self.ready.lock().await;
        *ready = false;
        let docker =
            engine.docker().await.map_err(|error| ProviderError::failed("removing the network", error))?;
        ignore_not_found(within(ACT, docker.remove_network(&self.name)).await)
            .map_err(|error| ProviderError::failed("removing the network", error))?;
        let firewall = self.firewall.clone();
        tokio::task::spawn_blocking(move || firewall.remove())
            .await
            .map_err(|error| error.to_string())
            .flatten()
            .map_err(|reason| ProviderError::failed("removing the firewall rules", reason))
    }

    /// The reason why workspaces can't have a network. None: they can.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bridge_name_fits_an_interface_name() {
        let network = Network::new(InstallationId::generate(), Vec::new());
        assert!(network.firewall.bridge.len() <= 15, "{}", network.firewall.bridge);
    }
}
