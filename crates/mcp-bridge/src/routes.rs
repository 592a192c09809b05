//! Routing by ids, progress tokens and subscriptions. No I/O and no waiting.
//!
//! The bridge gives each request its own id, which is never used twice and also replaces the progress token. An answer or
//! progress with that id goes to the client of the request, with the client's id and token. So clients can't see or disturb
//! each other by their choice of ids, and an answer that comes late or twice is ignored.

mod subscriptions;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;

use tokio::sync::mpsc;

use emergent_mcp_protocol::envelope::{
    Members, Message, MessageKind, RequestId, error_line, notification_line, result_line,
};
use emergent_mcp_protocol::{codes, meta, methods};

use self::subscriptions::{Subscriptions, subscription_uri};
use crate::error::{BridgeError, Down};
use crate::limits::MAX_ASKED;

/// The use of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// By many clients: the bridge is the one client that the process knows. Requests of the process are refused.
    Shared,
    /// By one client, which also initializes it and answers its requests.
    Exclusive,
}

/// A client of the bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub(crate) u64);

/// An item that comes back for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A notification, or a request of the process, that belongs to it.
    Message(String),
    /// Progress.
    Progress(String),
    /// The answer of the process: the last item.
    Answer(String),
    /// The bridge's own answer, because there is none of the process: the last item.
    Failed {
        /// The reason.
        error: BridgeError,
        /// The reason as a JSON-RPC answer.
        line: String,
    },
    /// The client cancelled the request, so there is no answer: the last item.
    Cancelled,
}

impl Item {
    pub(crate) fn failed(raw_id: &str, error: BridgeError) -> Self {
        let line = error_line(raw_id, error.code(), &error.to_string());
        Self::Failed { error, line }
    }
}

/// A request that has no answer yet.
pub(crate) struct Pending {
    pub(crate) client: ClientId,
    /// The id as the client wrote it.
    raw_id: String,
    id: RequestId,
    progress_token: Option<String>,
    /// The resource to which the client is subscribed by the process's answer.
    subscribes: Option<String>,
    /// Whether the request wants the server's log messages (modern era).
    wants_logs: bool,
    sender: mpsc::Sender<Item>,
}

/// The routing tables.
#[derive(Default)]
pub(crate) struct Routes {
    newest: u64,
    newest_client: u64,
    pending: BTreeMap<u64, Pending>,
    by_client: HashMap<(ClientId, RequestId), u64>,
    clients: BTreeMap<ClientId, mpsc::Sender<String>>,
    subscriptions: Subscriptions,
    /// Requests of the process without an answer.
    asked: HashSet<RequestId>,
}

/// The outcome of a line of the process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The line was delivered, or its receiver's queue was full.
    Routed,
    /// No request waits for it: it came late, twice, or unasked.
    Late,
    /// It has no receiver; the reason.
    Dropped(&'static str),
    /// This line is sent back to the process.
    Reply(String),
}

/// The outcome of a client's request.
pub(crate) enum Sent {
    /// This line goes to the process. The answer comes back with this id.
    Line(u64, String),
    /// The bridge answers.
    Answered(String),
    /// The client has another request with this id in progress.
    DuplicateId,
}

impl Routes {
    /// Adds a client that also receives messages outside its requests.
    pub(crate) fn join(&mut self, sender: mpsc::Sender<String>) -> ClientId {
        let client = self.new_client();
        self.clients.insert(client, sender);
        client
    }

    /// Adds a client that receives only answers to its requests.
    pub(crate) fn new_client(&mut self) -> ClientId {
        self.newest_client += 1;
        ClientId(self.newest_client)
    }

    /// Removes a client. Gives the lines for the process.
    pub(crate) fn leave(&mut self, client: ClientId) -> Vec<String> {
        self.clients.remove(&client);
        let asked: Vec<u64> =
            self.pending.iter().filter(|(_, pending)| pending.client == client).map(|(id, _)| *id).collect();
        let mut lines: Vec<String> = asked.into_iter().flat_map(|id| self.cancel(id)).collect();
        let uris = self.subscriptions.remove_client(client);
        lines.extend(uris.iter().filter_map(|uri| self.unsubscribe_if_unwanted(uri)));
        lines
    }

    /// Adds a client's request.
    pub(crate) fn request(
        &mut self,
        client: ClientId,
        message: &Message<'_>,
        role: Role,
        sender: mpsc::Sender<Item>,
    ) -> Sent {
        let (Some(raw_id), Some(id)) = (message.raw_id(), message.id()) else {
            return Sent::DuplicateId;
        };
        if self.by_client.contains_key(&(client, id.clone())) {
            return Sent::DuplicateId;
        }
        let subscribes = match role {
            Role::Shared => match self.subscription(client, message, raw_id) {
                ControlFlow::Continue(subscribes) => subscribes,
                ControlFlow::Break(answer) => return Sent::Answered(answer),
            },
            Role::Exclusive => None,
        };
        self.newest += 1;
        let own = self.newest;
        let own_text = own.to_string();
        // A token is a number or a text, as an id is.
        let token =
            message.progress_token().filter(|token| RequestId::of(token).is_some()).map(str::to_owned);
        let params = token.as_ref().and_then(|_| message.params_with_progress_token(&own_text));
        let line = match &params {
            Some(params) => message.to_line(&[("id", &own_text), ("params", params)]),
            None => message.to_line(&[("id", &own_text)]),
        };
        self.by_client.insert((client, id.clone()), own);
        let (raw_id, wants_logs) = (raw_id.to_owned(), wants_logs(message));
        let pending = Pending { client, raw_id, id, progress_token: token, subscribes, wants_logs, sender };
        self.pending.insert(own, pending);
        Sent::Line(own, line)
    }

    /// Removes a request. Gives the lines for the process.
    pub(crate) fn cancel(&mut self, own: u64) -> Vec<String> {
        let Some(pending) = self.remove(own) else {
            return Vec::new();
        };
        let cancelled = notification_line(methods::CANCELLED, Some(&format!("{{\"requestId\":{own}}}")));
        self.after_cancellation(cancelled, &pending)
    }

    /// The lines of a cancellation. The process may have subscribed before it reads them.
    fn after_cancellation(&mut self, cancelled: String, pending: &Pending) -> Vec<String> {
        let mut lines = vec![cancelled];
        lines.extend(pending.subscribes.as_deref().and_then(|uri| self.unsubscribe_if_unwanted(uri)));
        lines
    }

    fn remove(&mut self, own: u64) -> Option<Pending> {
        let pending = self.pending.remove(&own)?;
        self.by_client.remove(&(pending.client, pending.id.clone()));
        Some(pending)
    }

    /// Gives the lines for the process of a client's notification.
    pub(crate) fn notification(
        &mut self,
        client: ClientId,
        message: &Message<'_>,
        role: Role,
    ) -> Vec<String> {
        let is_shared = role == Role::Shared;
        match message.method.as_deref().unwrap_or_default() {
            methods::CANCELLED => self.cancelled_by_client(client, message).unwrap_or_default(),
            // The bridge sends this itself.
            methods::INITIALIZED if is_shared => Vec::new(),
            // They answer requests of the process, which are refused.
            methods::PROGRESS | methods::ROOTS_CHANGED if is_shared => Vec::new(),
            _ => vec![message.to_line(&[])],
        }
    }

    fn cancelled_by_client(&mut self, client: ClientId, message: &Message<'_>) -> Option<Vec<String>> {
        let id = RequestId::of(message.param("requestId")?)?;
        let own = *self.by_client.get(&(client, id))?;
        let params = message.params_with("requestId", &own.to_string())?;
        let pending = self.remove(own)?;
        let _ = pending.sender.try_send(Item::Cancelled);
        Some(self.after_cancellation(message.to_line(&[("params", &params)]), &pending))
    }

    /// Gives the line for the process of a client's answer, if the process has sent that request.
    pub(crate) fn answer(&mut self, message: &Message<'_>) -> Option<String> {
        self.asked.remove(&message.id()?).then(|| message.to_line(&[]))
    }

    /// Routes a message of the process.
    pub(crate) fn take(&mut self, message: &Message<'_>, role: Role) -> Taken {
        match message.kind {
            MessageKind::Response => self.take_answer(message),
            MessageKind::Request => self.take_request(message, role),
            MessageKind::Notification => self.take_notification(message, role),
        }
    }

    fn take_answer(&mut self, message: &Message<'_>) -> Taken {
        let own = message.id().and_then(|id| id.as_number());
        let Some((own, pending)) = own.and_then(|own| Some((own, self.remove(own)?))) else {
            return Taken::Late;
        };
        if let Some(uri) = &pending.subscribes
            && message.members.get("error").is_none()
        {
            self.subscriptions.insert(uri, pending.client);
        }
        let line = message.to_line(&[("id", &pending.raw_id)]);
        let line = with_subscription_id(&line, own, &pending.raw_id, "result").unwrap_or(line);
        // The queue keeps a place for it.
        let _ = pending.sender.try_send(Item::Answer(line));
        Taken::Routed
    }

    fn take_request(&mut self, message: &Message<'_>, role: Role) -> Taken {
        let raw_id = message.raw_id().unwrap_or("null");
        let method = message.method.as_deref().unwrap_or_default();
        if role == Role::Shared {
            return Taken::Reply(match method {
                methods::PING => result_line(raw_id, "{}"),
                _ => error_line(
                    raw_id,
                    codes::METHOD_NOT_FOUND,
                    "many clients share this server, so none can be asked: register it with mode per_session",
                ),
            });
        }
        let Some(id) = message.id().filter(|_| self.asked.len() < MAX_ASKED) else {
            return Taken::Reply(error_line(
                raw_id,
                codes::INTERNAL_ERROR,
                "too many requests to the client",
            ));
        };
        if self.send_to_any(message.to_line(&[]), true) {
            self.asked.insert(id);
            return Taken::Routed;
        }
        Taken::Reply(error_line(raw_id, codes::INTERNAL_ERROR, "the client does not listen"))
    }

    fn take_notification(&mut self, message: &Message<'_>, role: Role) -> Taken {
        let method = message.method.as_deref().unwrap_or_default();
        if method == methods::PROGRESS {
            let own =
                message.param("progressToken").and_then(RequestId::of).and_then(|token| token.as_number());
            let pending = own.and_then(|own| self.pending.get(&own));
            let Some((pending, token)) =
                pending.and_then(|pending| Some((pending, pending.progress_token.as_deref()?)))
            else {
                return Taken::Late;
            };
            let Some(params) = message.params_with("progressToken", token) else {
                return Taken::Dropped("progress without parameters");
            };
            offer(&pending.sender, Item::Progress(message.to_line(&[("params", &params)])));
            return Taken::Routed;
        }
        // In the modern era each notification names its request.
        let tagged =
            message.meta().and_then(|own| RequestId::of(own.get(meta::SUBSCRIPTION_ID)?)?.as_number());
        if let Some(own) = tagged {
            let Some(pending) = self.pending.get(&own) else {
                return Taken::Late;
            };
            let line = message.to_line(&[]);
            let line = with_subscription_id(&line, own, &pending.raw_id, "params").unwrap_or(line);
            offer(&pending.sender, Item::Message(line));
            return Taken::Routed;
        }
        let line = message.to_line(&[]);
        if role == Role::Exclusive {
            let is_sent = self.send_to_any(line, !is_about_the_server(method));
            return if is_sent { Taken::Routed } else { Taken::Dropped("the client does not listen") };
        }
        let listeners: Vec<ClientId> = match subscription_uri(message) {
            Some(uri) if method == methods::RESOURCE_UPDATED => self.subscriptions.clients_of(&uri).collect(),
            _ => self.clients.keys().copied().collect(),
        };
        if method == methods::LOG_MESSAGE {
            // It names no request: the latest that wants log messages gets it.
            let latest = self.pending.values().rev().find(|pending| pending.wants_logs);
            if let Some(pending) = latest {
                offer(&pending.sender, Item::Message(line.clone()));
            }
        }
        for client in listeners {
            self.send_to(client, line.clone(), !is_about_the_server(method));
        }
        Taken::Routed
    }

    /// Sends a line to the only client, if it listens or has a request.
    fn send_to_any(&self, line: String, in_a_request: bool) -> bool {
        let client = self.clients.keys().next().copied();
        client
            .or_else(|| self.pending.values().next_back().map(|pending| pending.client))
            .is_some_and(|client| self.send_to(client, line, in_a_request))
    }

    /// Sends a line to a client, if possible on the stream of its latest request. False when its queue is full or missing.
    fn send_to(&self, client: ClientId, line: String, in_a_request: bool) -> bool {
        let latest = self.pending.values().rev().find(|pending| in_a_request && pending.client == client);
        match (latest, self.clients.get(&client)) {
            (Some(pending), _) => offer(&pending.sender, Item::Message(line)),
            (None, Some(sender)) => sender.try_send(line).is_ok(),
            (None, None) => false,
        }
    }

    /// Fails all requests, because the process ended.
    pub(crate) fn fail_all(&mut self, why: &Down) {
        self.asked.clear();
        self.by_client.clear();
        for pending in std::mem::take(&mut self.pending).into_values() {
            let _ = pending.sender.try_send(Item::failed(&pending.raw_id, BridgeError::Down(why.clone())));
        }
    }

    /// Fails one request.
    pub(crate) fn fail(&mut self, own: u64, error: BridgeError) -> bool {
        let Some(pending) = self.remove(own) else {
            return false;
        };
        pending.sender.try_send(Item::failed(&pending.raw_id, error)).is_ok()
    }

    /// Sends a line to all clients.
    pub(crate) fn send_to_all(&self, line: &str) {
        for sender in self.clients.values() {
            let _ = sender.try_send(line.to_owned());
        }
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn clients(&self) -> usize {
        self.clients.len()
    }
}

/// Sends an item if there is room besides the place for the answer. A client that does not read misses notifications.
fn offer(sender: &mpsc::Sender<Item>, item: Item) -> bool {
    sender.capacity() > 1 && sender.try_send(item).is_ok()
}

/// Whether a notification is about the server as a whole, not about a client's request.
fn is_about_the_server(method: &str) -> bool {
    method.ends_with("/list_changed") || method == methods::RESOURCE_UPDATED
}

fn wants_logs(message: &Message<'_>) -> bool {
    message.meta().is_some_and(|own| own.get(meta::LOG_LEVEL).is_some())
}

/// The line with the client's own id of the subscription in the `_meta` of `member`.
fn with_subscription_id(line: &str, own: u64, raw_id: &str, member: &str) -> Option<String> {
    let message = Message::parse(line).ok()?;
    let body = Members::of(message.members.get(member)?)?;
    let own_meta = Members::of(body.get("_meta")?)?;
    if RequestId::of(own_meta.get(meta::SUBSCRIPTION_ID)?)?.as_number() != Some(own) {
        return None;
    }
    let new_meta = own_meta.with(&[(meta::SUBSCRIPTION_ID, raw_id)]);
    let new_body = body.with(&[("_meta", &new_meta)]);
    Some(message.to_line(&[(member, &new_body)]))
}
