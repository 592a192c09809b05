//! The subscriptions of clients to resources of a shared process.
//!
//! Only subscriptions that the process has confirmed are here. A request that ends without a result (an error, a time-out, a
//! cancellation, the end of the process) never becomes one, so nothing has to be undone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;

use emergent_mcp_protocol::codes;
use emergent_mcp_protocol::envelope::{Message, error_line, request_line, result_line};
use emergent_mcp_protocol::methods::{
    RESOURCE_UPDATED, RESOURCES_SUBSCRIBE as SUBSCRIBE, RESOURCES_UNSUBSCRIBE as UNSUBSCRIBE,
};

use super::{ClientId, Routes};
use crate::limits::{MAX_SUBSCRIPTION_BYTES, MAX_SUBSCRIPTIONS};

/// The confirmed subscriptions, by resource for its updates, and by client for its limits and its end.
#[derive(Default)]
pub(super) struct Subscriptions {
    clients: BTreeMap<Arc<str>, BTreeSet<ClientId>>,
    uris: HashMap<ClientId, BTreeSet<Arc<str>>>,
}

impl Subscriptions {
    pub(super) fn insert(&mut self, uri: &str, client: ClientId) {
        let uri = self.clients.get_key_value(uri).map_or_else(|| uri.into(), |(known, _)| Arc::clone(known));
        self.clients.entry(Arc::clone(&uri)).or_default().insert(client);
        self.uris.entry(client).or_default().insert(uri);
    }

    /// Ends a subscription.
    pub(super) fn remove(&mut self, uri: &str, client: ClientId) {
        if let Some(uris) = self.uris.get_mut(&client) {
            uris.remove(uri);
            if uris.is_empty() {
                self.uris.remove(&client);
            }
        }
        if let Some(clients) = self.clients.get_mut(uri) {
            clients.remove(&client);
            if clients.is_empty() {
                self.clients.remove(uri);
            }
        }
    }

    /// Ends all subscriptions of a client, and gives their resources.
    pub(super) fn remove_client(&mut self, client: ClientId) -> BTreeSet<Arc<str>> {
        let uris = self.uris.get(&client).cloned().unwrap_or_default();
        uris.iter().for_each(|uri| self.remove(uri, client));
        uris
    }

    /// Whether any client has subscribed to this resource.
    pub(super) fn has(&self, uri: &str) -> bool {
        self.clients.contains_key(uri)
    }

    /// The clients that have subscribed to this resource.
    pub(super) fn clients_of(&self, uri: &str) -> impl Iterator<Item = ClientId> {
        self.clients.get(uri).into_iter().flatten().copied()
    }

    /// The resources that a client has subscribed to.
    pub(super) fn uris_of(&self, client: ClientId) -> impl Iterator<Item = &str> {
        self.uris.get(&client).into_iter().flatten().map(|uri| &**uri)
    }

    /// All resources with a subscription.
    pub(super) fn uris(&self) -> impl Iterator<Item = &str> {
        self.clients.keys().map(|uri| &**uri)
    }
}

impl Routes {
    /// Decides about a client's subscription. Breaks with the bridge's answer, or continues where the process answers: with the
    /// resource to which its answer subscribes the client.
    pub(super) fn subscription(
        &mut self,
        client: ClientId,
        message: &Message<'_>,
        raw_id: &str,
    ) -> ControlFlow<String, Option<String>> {
        let method = message.method.as_deref().unwrap_or_default();
        if !matches!(method, SUBSCRIBE | UNSUBSCRIBE) {
            return ControlFlow::Continue(None);
        }
        let refused = |why: &str| ControlFlow::Break(error_line(raw_id, codes::INVALID_REQUEST, why));
        if !self.clients.contains_key(&client) {
            return refused(
                "a subscription belongs to a session, which receives its notifications, and this call has none: connect \
                 an MCP client to the server's endpoint and subscribe there",
            );
        }
        let Some(uri) = subscription_uri(message) else {
            return ControlFlow::Continue(None);
        };
        if method == SUBSCRIBE {
            if !self.has_room(client, &uri) {
                return refused(&format!(
                    "a session has at most {MAX_SUBSCRIPTIONS} subscriptions, and {MAX_SUBSCRIPTION_BYTES} bytes in their \
                     URIs: end others first"
                ));
            }
            if !self.subscriptions.has(&uri) {
                return ControlFlow::Continue(Some(uri));
            }
            self.subscriptions.insert(&uri, client);
        } else {
            self.subscriptions.remove(&uri, client);
            for pending in self.pending.values_mut().filter(|pending| pending.client == client) {
                pending.subscribes.take_if(|own| *own == uri);
            }
            // The process keeps the subscription while other clients want it.
            if !self.is_wanted(&uri) {
                return ControlFlow::Continue(None);
            }
        }
        ControlFlow::Break(result_line(raw_id, "{}"))
    }

    /// Whether one more subscription is within the client's limits. Those without an answer yet count, too.
    fn has_room(&self, client: ClientId, uri: &str) -> bool {
        let pending = self.pending.values().filter(|pending| pending.client == client);
        let pending = pending.filter_map(|pending| pending.subscribes.as_deref());
        let (mut count, mut bytes) = (1, uri.len());
        for own in self.subscriptions.uris_of(client).chain(pending) {
            if own == uri {
                return true;
            }
            count += 1;
            bytes += own.len();
        }
        count <= MAX_SUBSCRIPTIONS && bytes <= MAX_SUBSCRIPTION_BYTES
    }

    /// Whether a client has subscribed to this resource, or waits for the answer.
    fn is_wanted(&self, uri: &str) -> bool {
        self.subscriptions.has(uri)
            || self.pending.values().any(|pending| pending.subscribes.as_deref() == Some(uri))
    }

    /// The line that ends the process's subscription to a resource that no client wants.
    pub(super) fn unsubscribe_if_unwanted(&mut self, uri: &str) -> Option<String> {
        if self.is_wanted(uri) {
            return None;
        }
        self.newest += 1;
        Some(subscription_line(self.newest, UNSUBSCRIBE, uri))
    }

    /// The lines that renew all subscriptions with a new process.
    pub(crate) fn subscription_lines(&mut self) -> Vec<String> {
        let newest = &mut self.newest;
        let line = |uri: &str| {
            *newest += 1;
            subscription_line(*newest, SUBSCRIBE, uri)
        };
        self.subscriptions.uris().map(line).collect()
    }
}

/// The resource that a message about subscriptions names.
pub(super) fn subscription_uri(message: &Message<'_>) -> Option<String> {
    let named = matches!(message.method.as_deref()?, SUBSCRIBE | UNSUBSCRIBE | RESOURCE_UPDATED);
    serde_json::from_str(message.param("uri").filter(|_| named)?).ok()
}

fn subscription_line(id: u64, method: &str, uri: &str) -> String {
    request_line(id, method, Some(&serde_json::json!({ "uri": uri }).to_string()))
}
