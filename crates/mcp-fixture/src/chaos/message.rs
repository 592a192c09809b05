//! What goes over the wire: messages in, with their parts left as they came, and lines out.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

/// A request, a notification or a response.
#[derive(Deserialize)]
pub(crate) struct Message<'a> {
    #[serde(borrow)]
    pub(crate) id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub(crate) params: Option<&'a RawValue>,
}

/// The params of `initialize` that matter.
#[derive(Deserialize)]
pub(crate) struct Initialize<'a> {
    #[serde(borrow, rename = "protocolVersion")]
    pub(crate) protocol_version: &'a RawValue,
}

/// The params of `tools/call`.
#[derive(Deserialize)]
pub(crate) struct Call<'a> {
    #[serde(borrow)]
    pub(crate) name: Cow<'a, str>,
    #[serde(borrow)]
    pub(crate) arguments: Option<&'a RawValue>,
    #[serde(borrow, rename = "_meta")]
    pub(crate) meta: Option<&'a RawValue>,
}

/// What of `_meta` matters.
#[derive(Deserialize)]
pub(crate) struct Meta<'a> {
    #[serde(borrow, rename = "progressToken")]
    pub(crate) progress_token: Option<&'a RawValue>,
}

/// A text as JSON.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The result of a tool that has one text to say, which is JSON already.
pub(crate) fn text_result(text: &str) -> String {
    format!(r#"{{"content":[{{"type":"text","text":{text}}}]}}"#)
}

/// The result of a tool with data, which is JSON already; the text says the same.
pub(crate) fn data_result(data: &str) -> String {
    let text = quoted(data);
    format!(r#"{{"content":[{{"type":"text","text":{text}}}],"structuredContent":{data}}}"#)
}

/// The result of a tool that failed.
pub(crate) fn failure_result(text: &str) -> String {
    format!(r#"{{"content":[{{"type":"text","text":{}}}],"isError":true}}"#, quoted(text))
}

/// The answer to a request.
pub(crate) fn answer(id: &str, result: &str) -> String {
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{result}}}\n")
}

/// The answer that a request was wrong.
pub(crate) fn error(id: &str, code: i32, message: &str) -> String {
    let message = quoted(message);
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{{\"code\":{code},\"message\":{message}}}}}\n")
}

/// A request, or without an id a notification.
pub(crate) fn outgoing(id: Option<&str>, method: &str, params: Option<&str>) -> String {
    let id = id.map(|id| format!(",\"id\":{id}")).unwrap_or_default();
    let params = params.map(|params| format!(",\"params\":{params}")).unwrap_or_default();
    format!("{{\"jsonrpc\":\"2.0\"{id},\"method\":{}{params}}}\n", quoted(method))
}
