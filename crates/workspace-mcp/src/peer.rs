//! The workspace as one client sees it: answers requests, and runs calls of tools in tasks of their own.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use async_trait::async_trait;
use emergent_mcp_http::{Caller, Exchange, Item, Peer, PeerError};
use emergent_mcp_protocol::envelope::{Message, RequestId, error_line, result_line};
use emergent_mcp_protocol::{codes, methods};
use emergent_wire::{ErrorCode, ErrorDetail};
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::Instrument as _;

use crate::OutputSink;
use crate::result::CallResult;
use crate::server::{Shared, discover_result, initialize_result};
use crate::tools::{Call, ToolDescription, ToolResult};

/// Messages that wait for a slow client. Further progress is left out; the answer always has a place.
const QUEUE: usize = 16;

/// The era of a peer's client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Era {
    Legacy,
    Modern,
}

/// The workspace as one client sees it. Clients of the modern era share a peer.
pub(crate) struct WorkspacePeer<C> {
    shared: Arc<Shared<C>>,
    era: Era,
    /// The calls of a session, to be cancelled by their ids. Empty in the modern era.
    calls: Arc<Mutex<HashMap<RequestId, CancellationToken>>>,
    ended: CancellationToken,
}

/// The parameters of `tools/call`.
#[derive(Deserialize)]
struct CallParams {
    name: String,
    arguments: Option<Map<String, Value>>,
}

/// The answer to a request that needs no tool: a result, or the code and text of an error.
type Answer = Result<Value, (i64, String)>;

impl<C: Caller> WorkspacePeer<C> {
    pub(crate) fn new(shared: Arc<Shared<C>>, era: Era) -> Self {
        let ended = shared.ended.child_token();
        Self { shared, era, calls: Arc::default(), ended }
    }

    fn answer_of(&self, message: &Message<'_>, caller: &C) -> Answer {
        let method = message.method.as_deref().unwrap_or_default();
        let not_found = || (codes::METHOD_NOT_FOUND, method.to_owned());
        match (method, self.era) {
            (methods::TOOLS_LIST, _) => Ok(self.list(caller)),
            (methods::DISCOVER, Era::Modern) => Ok(self.cacheable(discover_result())),
            (methods::PING, Era::Legacy) => Ok(json!({})),
            (methods::INITIALIZE, Era::Legacy) => initialize_result(message).ok_or_else(not_found),
            _ => Err(not_found()),
        }
    }

    fn list(&self, caller: &C) -> Value {
        let tools = &self.shared.tools;
        let allowed = tools.all().iter().filter(|tool| tools.is_allowed(tool.name(), caller));
        self.cacheable(json!({ "tools": allowed.collect::<Vec<&ToolDescription>>() }))
    }

    /// A result that clients of the modern era must not cache, because it depends on the token.
    fn cacheable(&self, mut result: Value) -> Value {
        if self.era == Era::Modern {
            result["resultType"] = "complete".into();
            result["ttlMs"] = 0.into();
            result["cacheScope"] = "private".into();
        }
        result
    }

    /// Reads a call of a tool that the caller may use.
    fn read_call(&self, message: &Message<'_>, caller: &C) -> Result<CallParams, String> {
        let params = message.params().and_then(|params| serde_json::from_str::<CallParams>(params).ok());
        let params = params.ok_or("tools/call needs `name`, a text, and takes `arguments`, an object")?;
        let tools = &self.shared.tools;
        let is_known = tools.all().iter().any(|tool| tool.name() == params.name);
        if is_known && tools.is_allowed(&params.name, caller) {
            return Ok(params);
        }
        let name: String = params.name.chars().take(64).collect();
        Err(format!("there is no tool '{name}' here"))
    }

    /// Runs a tool in a task, which ends when the exchange is dropped, its client cancels it, or the session ends.
    fn start(
        &self,
        raw_id: &str,
        id: Option<RequestId>,
        params: CallParams,
        progress_token: Option<&str>,
        caller: &C,
    ) -> Result<Started, PeerError> {
        let cancelled = self.ended.child_token();
        let registered = self.register(id, &cancelled)?;
        let (to, items) = mpsc::channel(QUEUE);
        let Ok(place) = to.clone().try_reserve_owned() else {
            return Err(PeerError::Busy("the call has no queue".to_owned()));
        };
        let CallParams { name, arguments } = params;
        let call =
            Call { name, arguments: arguments.unwrap_or_default(), output: None, caller: caller.clone() };
        let run = run(Arc::clone(&self.shared), call, progress_token.map(str::to_owned), to);
        let (raw_id, era, ended) = (raw_id.to_owned(), self.era, cancelled.clone());
        let task = async move {
            let answer = ended.run_until_cancelled(run).await;
            drop(registered);
            place.send(match answer {
                Some(answer) => {
                    let result = CallResult::of(answer, era == Era::Modern);
                    Item::Answer(result_line(&raw_id, &result.to_json()))
                }
                None => Item::Cancelled,
            });
        };
        tokio::spawn(task.in_current_span());
        Ok(Started { items, _cancelled: cancelled.drop_guard() })
    }

    /// Notes a call of a session, so that its client can cancel it.
    fn register(&self, id: Option<RequestId>, call: &CancellationToken) -> Result<Registered, PeerError> {
        let id = id.filter(|_| self.era == Era::Legacy);
        if let Some(id) = &id {
            let mut calls = self.calls.lock();
            if calls.contains_key(id) {
                return Err(PeerError::DuplicateId);
            }
            calls.insert(id.clone(), call.clone());
        }
        Ok(Registered { id, calls: Arc::clone(&self.calls) })
    }
}

/// A call that its client can cancel as long as this lives.
struct Registered {
    id: Option<RequestId>,
    calls: Arc<Mutex<HashMap<RequestId, CancellationToken>>>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            self.calls.lock().remove(id);
        }
    }
}

#[async_trait]
impl<C: Caller> Peer<C> for WorkspacePeer<C> {
    async fn request(&self, message: &Message<'_>, caller: &C) -> Result<Box<dyn Exchange>, PeerError> {
        let raw_id = message.raw_id().unwrap_or("null");
        let answered = |answer: Answer| {
            let line = match answer {
                Ok(result) => result_line(raw_id, &result.to_string()),
                Err((code, text)) => error_line(raw_id, code, &text),
            };
            Box::new(Answered(Some(line)))
        };
        if message.method.as_deref() != Some(methods::TOOLS_CALL) {
            return Ok(answered(self.answer_of(message, caller)));
        }
        match self.read_call(message, caller) {
            Ok(params) => {
                // A token is a text or a number, as an id is.
                let token = message.progress_token().filter(|token| RequestId::of(token).is_some());
                let started = self.start(raw_id, message.id(), params, token, caller)?;
                Ok(Box::new(started))
            }
            Err(text) => Ok(answered(Err((codes::INVALID_PARAMS, text)))),
        }
    }

    async fn notify(&self, message: &Message<'_>) {
        if message.method.as_deref() != Some(methods::CANCELLED) {
            return;
        }
        let call = message
            .param("requestId")
            .and_then(RequestId::of)
            .and_then(|id| self.calls.lock().get(&id).cloned());
        if let Some(call) = call {
            call.cancel();
        }
    }

    async fn answer(&self, _: &Message<'_>) {}

    fn is_closed(&self) -> bool {
        self.ended.is_cancelled()
    }

    fn close(&self) {
        self.ended.cancel();
    }
}

/// Runs a tool, with its output as progress if the client wants that.
async fn run<C: Caller>(
    shared: Arc<Shared<C>>,
    call: Call<C>,
    progress_token: Option<String>,
    to: mpsc::Sender<Item>,
) -> Result<ToolResult, ErrorDetail> {
    let Ok(_permit) = shared.calls.try_acquire() else {
        let message = "too many calls run in this workspace: retry when one has ended";
        return Err(ErrorDetail::new(ErrorCode::LimitReached, message));
    };
    let Some(token) = progress_token else {
        return call_tool(&shared, call).await;
    };
    let output = OutputSink::default();
    let call = async {
        let answer = call_tool(&shared, Call { output: Some(output.clone()), ..call }).await;
        output.close();
        answer
    };
    tokio::join!(call, output.send_to(&token, &to)).0
}

/// Calls the tool. A panic becomes an error, so that the client gets an answer.
async fn call_tool<C: Caller>(shared: &Shared<C>, call: Call<C>) -> Result<ToolResult, ErrorDetail> {
    let name = call.name.clone();
    AssertUnwindSafe(shared.tools.call(call)).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!(tool = name, "a tool panicked");
        let message = "the server failed: it is a fault of the server itself";
        Err(ErrorDetail::new(ErrorCode::Internal, message))
    })
}

/// A request that is answered at once.
struct Answered(Option<String>);

#[async_trait]
impl Exchange for Answered {
    async fn next(&mut self) -> Option<Item> {
        self.0.take().map(Item::Answer)
    }
}

/// A call that runs.
struct Started {
    items: mpsc::Receiver<Item>,
    _cancelled: DropGuard,
}

#[async_trait]
impl Exchange for Started {
    async fn next(&mut self) -> Option<Item> {
        self.items.recv().await
    }
}
