//! `initialize`, which the bridge does once for each process.

use std::sync::Arc;
use std::time::Duration;

use emergent_mcp_protocol::envelope::{Members, notification_line, request_line};
use emergent_mcp_protocol::{methods, version};
use serde_json::json;
use serde_json::value::RawValue;

use crate::bridge::{Bridge, Phase};
use crate::error::BridgeError;
use crate::routes::{Item, Routes};

/// The result of `initialize`, as the process wrote it.
#[derive(Clone, Debug)]
pub struct Initialized {
    /// The whole result.
    pub result: Arc<RawValue>,
    /// The version that was agreed on.
    pub protocol_version: String,
}

impl Bridge {
    /// Initializes the process, renews the clients' subscriptions, and lets clients in. `version` is that of the product.
    ///
    /// After [`BridgeError::Down`] the process has ended. After every other error it is still there, and can't be used.
    pub async fn initialize(&self, version: &str, within: Duration) -> Result<Initialized, BridgeError> {
        let client = self.visitor();
        let params = json!({
            "protocolVersion": version::NEWEST_LEGACY,
            "capabilities": {},
            "clientInfo": { "name": "emergent", "version": version },
        });
        let text = request_line(0, methods::INITIALIZE, Some(&params.to_string()));
        let mut exchange = self.send(client, &text, within).await?;
        let answer = loop {
            match exchange.next().await {
                Some(Item::Answer(answer)) => break answer,
                // The process is there and can't be used, as if it had refused.
                Some(Item::Failed { error: error @ BridgeError::AnswerTooLong(_), .. }) => {
                    return Err(BridgeError::Refused(error.to_string()));
                }
                Some(Item::Failed { error, .. }) => return Err(error),
                Some(_) => {}
                None => return Err(BridgeError::Down("the server has just ended".into())),
            }
        };
        let initialized = read(&answer)?;
        let lines = {
            let mut state = self.state();
            let is_first = state.initialized.is_none();
            state.initialized = Some(initialized.clone());
            let mut lines = vec![notification_line(methods::INITIALIZED, None)];
            lines.extend(state.routes.subscription_lines());
            if !is_first {
                announce_changes(&state.routes, initialized.result.get());
            }
            lines
        };
        for line in lines {
            self.queue(line).await?;
        }
        self.set_phase(Phase::Ready);
        Ok(initialized)
    }
}

fn read(answer: &str) -> Result<Initialized, BridgeError> {
    let refused = |why: &str| BridgeError::Refused(why.to_owned());
    let members = Members::of(answer).ok_or_else(|| refused("its answer can't be read"))?;
    if let Some(error) = members.get("error") {
        let message = Members::of(error).and_then(|error| error.string("message"));
        return Err(BridgeError::Refused(message.unwrap_or_else(|| error.to_owned())));
    }
    let result = members.get("result").unwrap_or("null");
    let version = Members::of(result).and_then(|result| result.string("protocolVersion"));
    let protocol_version = version.ok_or_else(|| refused("its answer names no protocol version"))?;
    let result =
        RawValue::from_string(result.to_owned()).map_err(|error| BridgeError::Refused(error.to_string()))?;
    Ok(Initialized { result: result.into(), protocol_version })
}

/// Notifies all clients that the lists of the server may have changed, because a new process may offer other things.
fn announce_changes(routes: &Routes, result: &str) {
    let capabilities = Members::of(result).and_then(|result| Members::of(result.get("capabilities")?));
    for kind in ["tools", "resources", "prompts"] {
        let declared = capabilities.as_ref().and_then(|all| Members::of(all.get(kind)?));
        if declared.is_some_and(|declared| declared.get("listChanged") == Some("true")) {
            let method = format!("notifications/{kind}/list_changed");
            routes.send_to_all(&notification_line(&method, None));
        }
    }
}
