//! Versions: the HELLO messages, and the calls that each version knows.
//!
//! | version | new in it |
//! |---|---|
//! | 1 | – |
//! | 2 | `Configuration::max_tasks` |
//! | 3 | LISTEN, ACCEPT, STARTED, OUTPUT_END |

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::message::{Configuration, GuestCall};

/// The version that this build of the agent speaks.
pub const PROTOCOL_VERSION: u16 = 3;
/// The oldest agent that this build of the server speaks with.
const OLDEST_AGENT: u16 = 1;
/// The first version with `Configuration::max_tasks`.
const MAX_TASKS_SINCE: u16 = 2;
/// The first version with LISTEN, ACCEPT, STARTED and OUTPUT_END.
const LISTEN_SINCE: u16 = 3;

/// The host's HELLO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostHello {
    /// The oldest protocol version the host speaks.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl Default for HostHello {
    fn default() -> Self {
        Self { oldest: OLDEST_AGENT, newest: PROTOCOL_VERSION }
    }
}

/// The guest's HELLO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentHello {
    /// The protocol version the agent speaks.
    pub protocol: u16,
    /// The agent's own version.
    pub version: String,
    /// New each time the agent starts: distinguishes a restarted sandbox from a reconnected one.
    pub boot_id: String,
}

/// Host and agent have no version in common.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the agent speaks protocol {agent}, this server {oldest} to {newest}: restart the workspace to renew its agent"
)]
pub struct VersionMismatch {
    agent: u16,
    oldest: u16,
    newest: u16,
}

/// The agent is too old for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the agent in this sandbox speaks protocol {agent}, this call needs protocol {needed}: restart the workspace to renew its agent"
)]
pub struct AgentTooOld {
    /// The version that the agent speaks.
    pub agent: u16,
    /// The first version with the call.
    pub needed: u16,
}

impl HostHello {
    /// The version to speak with this agent: the agent's own, if the host speaks it.
    pub fn agree(&self, agent: &AgentHello) -> Result<u16, VersionMismatch> {
        if (self.oldest..=self.newest).contains(&agent.protocol) {
            Ok(agent.protocol)
        } else {
            Err(VersionMismatch { agent: agent.protocol, oldest: self.oldest, newest: self.newest })
        }
    }
}

impl GuestCall {
    /// The first version with this call.
    pub fn since(&self) -> u16 {
        match self {
            GuestCall::Listen(_) => LISTEN_SINCE,
            _ => OLDEST_AGENT,
        }
    }

    /// The call as an agent of version `agent` knows it. Fields that are newer than the agent are left out; a call that
    /// is newer is an error.
    pub fn adapt(&self, agent: u16) -> Result<Cow<'_, Self>, AgentTooOld> {
        let needed = self.since();
        if agent < needed {
            return Err(AgentTooOld { agent, needed });
        }
        Ok(match self {
            GuestCall::Configure(configuration) if agent < MAX_TASKS_SINCE => {
                let older = Configuration { max_tasks: None, ..configuration.clone() };
                Cow::Owned(GuestCall::Configure(older))
            }
            call => Cow::Borrowed(call),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::ListenCall;

    fn agent(protocol: u16) -> AgentHello {
        AgentHello { protocol, version: "v".into(), boot_id: "b".into() }
    }

    #[test]
    fn the_host_speaks_the_version_of_every_agent_since_the_oldest() {
        let host = HostHello::default();
        for version in OLDEST_AGENT..=PROTOCOL_VERSION {
            assert_eq!(host.agree(&agent(version)), Ok(version));
        }
        for version in [0, PROTOCOL_VERSION + 1] {
            let error = host.agree(&agent(version)).unwrap_err();
            assert!(error.to_string().contains("restart the workspace"), "{error}");
        }
    }

    #[test]
    fn an_older_agent_gets_no_newer_call_and_no_newer_field() {
        let listen = GuestCall::Listen(ListenCall { port: 0 });
        for version in 1..LISTEN_SINCE {
            let error = listen.adapt(version).unwrap_err();
            assert_eq!(error, AgentTooOld { agent: version, needed: LISTEN_SINCE });
        }
        assert!(listen.adapt(LISTEN_SINCE).is_ok());
        let configure =
            GuestCall::Configure(Configuration { max_tasks: Some(5), ..Configuration::default() });
        let text = |version| serde_json::to_string(&configure.adapt(version).unwrap()).unwrap();
        assert!(!text(1).contains("max_tasks"), "{}", text(1));
        assert!(text(2).contains("\"max_tasks\":5"), "{}", text(2));
    }
}
