//! Messages: read with their parts as raw JSON, written as lines.

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

/// The parameters of `initialize` that are used.
#[derive(Deserialize)]
pub(crate) struct Initialize<'a> {
    #[serde(borrow, rename = "protocolVersion")]
    pub(crate) protocol_version: &'a RawValue,
}

/// The parameters of `tools/call`.
#[derive(Deserialize)]
pub(crate) struct Call<'a> {
    #[serde(borrow)]
    pub(crate) name: Cow<'a, str>,
    #[serde(borrow)]
    pub(crate) arguments: Option<&'a RawValue>,
    #[serde(borrow, rename = "_meta")]
    pub(crate) meta: Option<&'a RawValue>,
}

/// The members of `_meta` that are used.
#[derive(Deserialize)]
pub(crate) struct Meta<'a> {
    #[serde(borrow, rename = "progressToken")]
    pub(crate) progress_token: Option<&'a RawValue>,
}

/// A text as JSON.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A result with one text. `text` is JSON.
pub(crate) fn text_result(text: &str) -> String {
    format!(r#"{{"content":[{{"type":"text","text":{text}}}]}}"#)
}

/// A result with data, also as text. `data` is JSON.
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

/// The answer to a request that failed.
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
