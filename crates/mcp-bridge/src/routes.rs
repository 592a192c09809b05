//! Who is asked what by whom: ids, progress tokens, subscriptions. No I/O and no waiting: lines in, lines out.
//!
//! Every request gets an id of the bridge's own on its way to the process, never used twice, also as its progress token.
//! What comes back under it goes to the client that asked, with the id and token it had. So clients can't see or
//! disturb each other, whatever ids they choose, and an answer that comes too late, twice, or for a stranger has nowhere
//! to go.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use tokio::sync::mpsc;

use crate::envelope::{Id, Kind, Members, Message, codes, error_line, result_line};

/// Where the modern era says which subscription a notification belongs to.
const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";
/// Where a request of the modern era says what it wants to hear of the server's log.
const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";
/// Requests of the process that wait for the client's answer at most.
const MAX_ASKED: usize = 256;

/// How a process is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// By many clients: the bridge is its one client, and asks it for nothing on behalf of others that needs one of them.
    Shared,
    /// By one client, which does everything itself.
    Exclusive,
}

/// A client of the bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub(crate) u64);

/// What a request brings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A notification, or a request of the process, that belongs to it.
    Message(String),
    /// Progress.
    Progress(String),
    /// The answer; nothing comes after it.
    Answer(String),
    /// It was cancelled by its client, who wants no answer.
    Cancelled,
}

/// A request that has no answer yet.
pub(crate) struct Pending {
    pub(crate) client: ClientId,
    /// Its id, as the client wrote it.
    raw_id: String,
    id: Id,
    progress_token: Option<String>,
    /// A resource that it subscribes to.
    subscribes: Option<String>,
    /// Whether it wants to hear what the server logs, as requests of the modern era say each for itself.
    wants_logs: bool,
    sender: mpsc::Sender<Item>,
}

/// Everything that is routed.
#[derive(Default)]
pub(crate) struct Routes {
    newest: u64,
    newest_client: u64,
    pending: BTreeMap<u64, Pending>,
    by_client: HashMap<(ClientId, Id), u64>,
    clients: BTreeMap<ClientId, mpsc::Sender<String>>,
    subscriptions: BTreeMap<String, BTreeSet<ClientId>>,
    /// Requests of the process that its client has not answered.
    asked: HashSet<Id>,
}

/// What became of a line of the process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It went where it belongs.
    Routed,
    /// It came too late, twice, or was never asked for.
    Late,
    /// It belongs nowhere; why.
    Dropped(&'static str),
    /// This is to be sent back.
    Reply(String),
}

/// What becomes of a client's request.
pub(crate) enum Sent {
    /// This line goes to the process; its answer comes back under this id.
    Line(u64, String),
    /// The bridge knows the answer.
    Answered(String),
    /// The client has asked something under this id already.
    DoubleId,
}

impl Routes {
    /// A client that can be told things it has not asked for.
    pub(crate) fn join(&mut self, sender: mpsc::Sender<String>) -> ClientId {
        let client = self.new_client();
        self.clients.insert(client, sender);
        client
    }

    /// A client that only asks.
    pub(crate) fn new_client(&mut self) -> ClientId {
        self.newest_client += 1;
        ClientId(self.newest_client)
    }

    /// A client is gone. Gives what the process must be told.
    pub(crate) fn leave(&mut self, client: ClientId) -> Vec<String> {
        self.clients.remove(&client);
        let asked: Vec<u64> =
            self.pending.iter().filter(|(_, pending)| pending.client == client).map(|(id, _)| *id).collect();
        let mut lines: Vec<String> = asked.into_iter().filter_map(|id| self.cancel(id)).collect();
        let uris: Vec<String> = self.subscriptions.keys().cloned().collect();
        for uri in uris {
            if self.unsubscribe(&uri, client) {
                self.newest += 1;
                lines.push(subscription_line(self.newest, "resources/unsubscribe", &uri));
            }
        }
        lines
    }

    /// A client asks something.
    pub(crate) fn request(
        &mut self,
        client: ClientId,
        message: &Message<'_>,
        role: Role,
        sender: mpsc::Sender<Item>,
    ) -> Sent {
        let (Some(raw_id), Some(id)) = (message.raw_id(), message.id()) else {
            return Sent::DoubleId;
        };
        if self.by_client.contains_key(&(client, id.clone())) {
            return Sent::DoubleId;
        }
        let mut subscribes = None;
        if role == Role::Shared
            && let Some(uri) = subscription_uri(message)
        {
            let is_known = match message.method.as_deref() {
                Some("resources/subscribe") => {
                    let subscribers = self.subscriptions.entry(uri.clone()).or_default();
                    let is_known = !subscribers.is_empty();
                    subscribers.insert(client);
                    subscribes = Some(uri);
                    is_known
                }
                // Nothing to do for the process while others still want to hear of it.
                _ => !self.unsubscribe(&uri, client),
            };
            if is_known {
                return Sent::Answered(result_line(raw_id, "{}"));
            }
        }
        self.newest += 1;
        let own = self.newest;
        let own_text = own.to_string();
        let token = message.progress_token().map(str::to_owned);
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

    /// Nobody waits for an answer any more. Gives what the process must be told.
    pub(crate) fn cancel(&mut self, own: u64) -> Option<String> {
        self.remove(own)?;
        Some(format!(
            "{{\"jsonrpc\":\"2.0\",\"method\":\"notifications/cancelled\",\"params\":{{\"requestId\":{own}}}}}"
        ))
    }

    fn remove(&mut self, own: u64) -> Option<Pending> {
        let pending = self.pending.remove(&own)?;
        self.by_client.remove(&(pending.client, pending.id.clone()));
        Some(pending)
    }

    /// A client notifies. Gives the line for the process, if there is one.
    pub(crate) fn notification(
        &mut self,
        client: ClientId,
        message: &Message<'_>,
        role: Role,
    ) -> Option<String> {
        match message.method.as_deref()? {
            "notifications/cancelled" => {
                let id = Id::of(message.param("requestId")?)?;
                let own = *self.by_client.get(&(client, id))?;
                let params = message.params_with("requestId", &own.to_string())?;
                let pending = self.remove(own)?;
                let _ = pending.sender.try_send(Item::Cancelled);
                Some(message.to_line(&[("params", &params)]))
            }
            // The bridge has said so itself.
            "notifications/initialized" if role == Role::Shared => None,
            // The process has asked nobody for anything.
            "notifications/progress" | "notifications/roots/list_changed" if role == Role::Shared => None,
            _ => Some(message.to_line(&[])),
        }
    }

    /// A client answers what the process asked. Gives the line for the process.
    pub(crate) fn answer(&mut self, message: &Message<'_>) -> Option<String> {
        self.asked.remove(&message.id()?).then(|| message.to_line(&[]))
    }

    /// Takes a message of the process.
    pub(crate) fn take(&mut self, message: &Message<'_>, role: Role) -> Taken {
        match message.kind {
            Kind::Response => self.take_answer(message),
            Kind::Request => self.take_request(message, role),
            Kind::Notification => self.take_notification(message, role),
        }
    }

    fn take_answer(&mut self, message: &Message<'_>) -> Taken {
        let own = message.id().and_then(|id| id.as_own());
        let Some((own, pending)) = own.and_then(|own| Some((own, self.remove(own)?))) else {
            return Taken::Late;
        };
        if let Some(uri) = &pending.subscribes
            && message.members.get("error").is_some()
        {
            self.unsubscribe(uri, pending.client);
        }
        let line = message.to_line(&[("id", &pending.raw_id)]);
        let line = with_subscription_id(&line, own, &pending.raw_id, "result").unwrap_or(line);
        // Its place was kept.
        let _ = pending.sender.try_send(Item::Answer(line));
        Taken::Routed
    }

    fn take_request(&mut self, message: &Message<'_>, role: Role) -> Taken {
        let raw_id = message.raw_id().unwrap_or("null");
        let method = message.method.as_deref().unwrap_or_default();
        if role == Role::Shared {
            return Taken::Reply(match method {
                "ping" => result_line(raw_id, "{}"),
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
        if self.tell_one(message.to_line(&[]), true) {
            self.asked.insert(id);
            return Taken::Routed;
        }
        Taken::Reply(error_line(raw_id, codes::INTERNAL_ERROR, "the client does not listen"))
    }

    fn take_notification(&mut self, message: &Message<'_>, role: Role) -> Taken {
        let method = message.method.as_deref().unwrap_or_default();
        if method == "notifications/progress" {
            let own = message.param("progressToken").and_then(Id::of).and_then(|token| token.as_own());
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
        // In the modern era each notification says which request it belongs to.
        let tagged = message
            .param("_meta")
            .and_then(Members::of)
            .and_then(|meta| Id::of(meta.get(SUBSCRIPTION_ID)?)?.as_own());
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
            let told = self.tell_one(line, !is_about_the_server(method));
            return if told { Taken::Routed } else { Taken::Dropped("the client does not listen") };
        }
        let listeners: Vec<ClientId> = match subscription_uri(message) {
            Some(uri) if method == "notifications/resources/updated" => {
                self.subscriptions.get(&uri).into_iter().flatten().copied().collect()
            }
            _ => self.clients.keys().copied().collect(),
        };
        if method == "notifications/message" {
            // It does not say whose it is: the latest that wants to hear any.
            let latest = self.pending.values().rev().find(|pending| pending.wants_logs);
            if let Some(pending) = latest {
                offer(&pending.sender, Item::Message(line.clone()));
            }
        }
        for client in listeners {
            self.tell(client, line.clone(), !is_about_the_server(method));
        }
        Taken::Routed
    }

    /// Tells the only client there is.
    fn tell_one(&self, line: String, in_a_request: bool) -> bool {
        let client = self.clients.keys().next().copied();
        client
            .or_else(|| self.pending.values().next_back().map(|pending| pending.client))
            .is_some_and(|client| self.tell(client, line, in_a_request))
    }

    /// Tells a client something, by preference along with what it has asked last. False when it does not listen.
    fn tell(&self, client: ClientId, line: String, in_a_request: bool) -> bool {
        let latest = self.pending.values().rev().find(|pending| in_a_request && pending.client == client);
        match (latest, self.clients.get(&client)) {
            (Some(pending), _) => offer(&pending.sender, Item::Message(line)),
            (None, Some(sender)) => sender.try_send(line).is_ok(),
            (None, None) => false,
        }
    }

    /// Takes a client from a subscription. True when it was the last one.
    fn unsubscribe(&mut self, uri: &str, client: ClientId) -> bool {
        let Some(subscribers) = self.subscriptions.get_mut(uri) else {
            return true;
        };
        let was_there = subscribers.remove(&client);
        let is_empty = subscribers.is_empty();
        if is_empty {
            self.subscriptions.remove(uri);
        }
        is_empty && was_there
    }

    /// The process has ended: every request gets an error, with this text.
    pub(crate) fn fail_all(&mut self, why: &str) {
        self.asked.clear();
        self.by_client.clear();
        for pending in std::mem::take(&mut self.pending).into_values() {
            let line = error_line(&pending.raw_id, codes::SERVER_GONE, why);
            let _ = pending.sender.try_send(Item::Answer(line));
        }
    }

    /// Fails one request.
    pub(crate) fn fail(&mut self, own: u64, code: i64, why: &str) -> bool {
        let Some(pending) = self.remove(own) else {
            return false;
        };
        pending.sender.try_send(Item::Answer(error_line(&pending.raw_id, code, why))).is_ok()
    }

    /// What a new process must be told of what clients have subscribed to.
    pub(crate) fn subscription_lines(&mut self) -> Vec<String> {
        let uris: Vec<String> = self.subscriptions.keys().cloned().collect();
        let mut line = |uri: &String| {
            self.newest += 1;
            subscription_line(self.newest, "resources/subscribe", uri)
        };
        uris.iter().map(&mut line).collect()
    }

    /// Tells every client.
    pub(crate) fn tell_all(&self, line: &str) {
        for sender in self.clients.values() {
            let _ = sender.try_send(line.to_owned());
        }
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn waits(&self, client: ClientId) -> bool {
        self.pending.values().any(|pending| pending.client == client)
    }

    pub(crate) fn clients(&self) -> usize {
        self.clients.len()
    }
}

/// Hands something on if there is room besides that for the answer: who does not read misses notifications.
fn offer(sender: &mpsc::Sender<Item>, item: Item) -> bool {
    sender.capacity() > 1 && sender.try_send(item).is_ok()
}

/// Notifications about the server as a whole, not about what a client does.
fn is_about_the_server(method: &str) -> bool {
    method.ends_with("/list_changed") || method == "notifications/resources/updated"
}

fn wants_logs(message: &Message<'_>) -> bool {
    message.param("_meta").and_then(Members::of).is_some_and(|meta| meta.get(LOG_LEVEL).is_some())
}

fn subscription_uri(message: &Message<'_>) -> Option<String> {
    let named = matches!(
        message.method.as_deref()?,
        "resources/subscribe" | "resources/unsubscribe" | "notifications/resources/updated"
    );
    serde_json::from_str(message.param("uri").filter(|_| named)?).ok()
}

fn subscription_line(id: u64, method: &str, uri: &str) -> String {
    let uri = serde_json::Value::from(uri);
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"{method}\",\"params\":{{\"uri\":{uri}}}}}")
}

/// The same line with the subscription's id as its client knows it, in `member`'s `_meta`.
fn with_subscription_id(line: &str, own: u64, raw_id: &str, member: &str) -> Option<String> {
    let message = Message::parse(line).ok()?;
    let body = Members::of(message.members.get(member)?)?;
    let meta = Members::of(body.get("_meta")?)?;
    if Id::of(meta.get(SUBSCRIPTION_ID)?)?.as_own() != Some(own) {
        return None;
    }
    let new_meta = meta.with(&[(SUBSCRIPTION_ID, raw_id)]);
    let new_body = body.with(&[("_meta", &new_meta)]);
    Some(message.to_line(&[(member, &new_body)]))
}
