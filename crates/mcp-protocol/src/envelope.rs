//! JSON-RPC messages: the members of the outermost object, in their order, each as raw text.
//!
//! A message is forwarded by writing its members again with one or two of them replaced. So fields of later versions, the form
//! of numbers and the order of members arrive as they were sent.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::codes;

/// The longest id of a request, as it is written. Ids and progress tokens are kept until the answer comes.
pub const MAX_ID_BYTES: usize = 1024;

/// The members of an object, in order.
#[derive(Clone, Debug)]
pub struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> serde::Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::with_capacity(4);
                while let Some(Key(name)) = map.next_key()? {
                    members.push((name, map.next_value()?));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// A member's name, borrowed where it has no escapes.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> Members<'a> {
    /// The members of this object. None if the text is not an object.
    pub fn of(raw: &'a str) -> Option<Self> {
        serde_json::from_str(raw).ok()
    }

    /// A member's text. The last one wins where there are several, as with most parsers.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value.get())
    }

    /// A member that is a string, without its escapes.
    pub fn string(&self, name: &str) -> Option<String> {
        serde_json::from_str(self.get(name)?).ok()
    }

    /// The object with some members replaced.
    pub fn with(&self, replaced: &[(&str, &str)]) -> String {
        let mut out = String::with_capacity(256);
        self.write(&mut out, replaced);
        out
    }

    fn write(&self, out: &mut String, replaced: &[(&str, &str)]) {
        out.push('{');
        for (index, (name, value)) in self.0.iter().enumerate() {
            if index > 0 {
                out.push(',');
            }
            out.push_str(&serde_json::Value::from(name.as_ref()).to_string());
            out.push(':');
            let new = replaced.iter().find(|(own, _)| own == name).map(|(_, value)| *value);
            push_on_one_line(out, new.unwrap_or(value.get()));
        }
        out.push('}');
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// Expects an answer.
    Request,
    /// Expects no answer.
    Notification,
    /// Is an answer.
    Response,
}

/// A message that is JSON-RPC.
#[derive(Clone, Debug)]
pub struct Message<'a> {
    /// The members of the outermost object.
    pub members: Members<'a>,
    /// Request, notification or response.
    pub kind: MessageKind,
    /// The method of a request or notification.
    pub method: Option<String>,
}

/// A text that is not a message of JSON-RPC 2.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMessage {
    /// Not JSON.
    #[error("the message is not JSON")]
    NotJson,
    /// JSON, but no message.
    #[error("the message is not a JSON-RPC 2.0 request, notification or response")]
    NotJsonRpc,
    /// A message whose id is over the limit.
    #[error("the id of the message is longer than {MAX_ID_BYTES} bytes")]
    IdTooLong,
}

impl InvalidMessage {
    /// The code of the JSON-RPC error.
    pub const fn code(self) -> i64 {
        match self {
            InvalidMessage::NotJson => codes::PARSE_ERROR,
            InvalidMessage::NotJsonRpc | InvalidMessage::IdTooLong => codes::INVALID_REQUEST,
        }
    }
}

impl<'a> Message<'a> {
    /// Reads a message.
    pub fn parse(text: &'a str) -> Result<Self, InvalidMessage> {
        let members = serde_json::from_str::<Members<'a>>(text).map_err(|error| {
            if error.is_data() { InvalidMessage::NotJsonRpc } else { InvalidMessage::NotJson }
        })?;
        if members.get("jsonrpc") != Some("\"2.0\"") {
            return Err(InvalidMessage::NotJsonRpc);
        }
        let method = members.string("method");
        if members.get("id").is_some_and(|id| id.len() > MAX_ID_BYTES) {
            return Err(InvalidMessage::IdTooLong);
        }
        let has_id = members.get("id").is_some_and(|id| id != "null");
        let is_answer = members.get("result").is_some() || members.get("error").is_some();
        let kind = match (&method, has_id) {
            (Some(_), true) => MessageKind::Request,
            (Some(_), false) if members.get("id").is_none() => MessageKind::Notification,
            (None, _) if is_answer && members.get("id").is_some() && members.get("method").is_none() => {
                MessageKind::Response
            }
            _ => return Err(InvalidMessage::NotJsonRpc),
        };
        if kind == MessageKind::Request && RequestId::of(members.get("id").unwrap_or_default()).is_none() {
            return Err(InvalidMessage::NotJsonRpc);
        }
        Ok(Self { members, kind, method })
    }

    /// Its id, as it is written.
    pub fn raw_id(&self) -> Option<&'a str> {
        self.members.get("id")
    }

    /// Its id.
    pub fn id(&self) -> Option<RequestId> {
        RequestId::of(self.raw_id()?)
    }

    /// Its parameters.
    pub fn params(&self) -> Option<&'a str> {
        self.members.get("params")
    }

    /// A member of its parameters.
    pub fn param(&self, name: &str) -> Option<&'a str> {
        Members::of(self.params()?)?.get(name)
    }

    /// The metadata of a request or notification: `params._meta`.
    pub fn meta(&self) -> Option<Members<'a>> {
        Members::of(self.param("_meta")?)
    }

    /// The token for notifications of progress: `params._meta.progressToken`.
    pub fn progress_token(&self) -> Option<&'a str> {
        self.meta()?.get("progressToken")
    }

    /// The message on one line, with some members replaced. Without the end of the line.
    pub fn to_line(&self, replaced: &[(&str, &str)]) -> String {
        self.members.with(replaced)
    }

    /// Its parameters with another progress token.
    pub fn params_with_progress_token(&self, token: &str) -> Option<String> {
        let params = Members::of(self.params()?)?;
        let meta = Members::of(params.get("_meta")?)?;
        meta.get("progressToken")?;
        Some(params.with(&[("_meta", &meta.with(&[("progressToken", token)]))]))
    }

    /// Its parameters with one member replaced.
    pub fn params_with(&self, name: &str, value: &str) -> Option<String> {
        Some(Members::of(self.params()?)?.with(&[(name, value)]))
    }
}

/// The id of a request. Two strings that differ only in their escapes are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RequestId {
    /// A number, as it is written.
    Number(String),
    /// A string, without its escapes.
    Text(String),
}

impl RequestId {
    /// The id in this text; none when it is neither a number nor a string, or over the limit.
    pub fn of(raw: &str) -> Option<Self> {
        if raw.len() > MAX_ID_BYTES {
            return None;
        }
        match raw.as_bytes().first()? {
            b'"' => serde_json::from_str(raw).ok().map(RequestId::Text),
            b'-' | b'0'..=b'9' => Some(RequestId::Number(raw.to_owned())),
            _ => None,
        }
    }

    /// The id as a whole number.
    pub fn as_number(&self) -> Option<u64> {
        match self {
            RequestId::Number(text) => text.parse().ok(),
            RequestId::Text(_) => None,
        }
    }
}

/// Appends JSON without the line breaks between its tokens, because one line is one message.
fn push_on_one_line(out: &mut String, json: &str) {
    if !json.bytes().any(|byte| byte == b'\n' || byte == b'\r') {
        out.push_str(json);
        return;
    }
    // Inside a JSON string a line break is escaped, so only line breaks between tokens are removed.
    out.extend(json.chars().filter(|c| !matches!(c, '\n' | '\r')));
}

/// A request. `params` is JSON.
pub fn request_line(id: u64, method: &str, params: Option<&str>) -> String {
    line_of(&format!("\"id\":{id},"), method, params)
}

/// A notification. `params` is JSON.
pub fn notification_line(method: &str, params: Option<&str>) -> String {
    line_of("", method, params)
}

fn line_of(id: &str, method: &str, params: Option<&str>) -> String {
    let params = params.map(|params| format!(",\"params\":{params}")).unwrap_or_default();
    format!("{{\"jsonrpc\":\"2.0\",{id}\"method\":\"{method}\"{params}}}")
}

/// An answer with a result.
pub fn result_line(id: &str, result: &str) -> String {
    let mut line = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":");
    push_on_one_line(&mut line, result);
    line.push('}');
    line
}

/// An answer with an error.
pub fn error_line(id: &str, code: i64, message: &str) -> String {
    let message = serde_json::Value::from(message);
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{{\"code\":{code},\"message\":{message}}}}}")
}

/// An answer with an error that has data for programs.
pub fn error_with_data(id: &str, code: i64, message: &str, data: &serde_json::Value) -> String {
    let message = serde_json::Value::from(message);
    format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{{\"code\":{code},\"message\":{message},\"data\":{data}}}}}"
    )
}

/// An error for a request whose id is unknown.
pub fn error_without_id(code: i64, message: &str) -> String {
    let message = serde_json::Value::from(message);
    format!("{{\"jsonrpc\":\"2.0\",\"error\":{{\"code\":{code},\"message\":{message}}}}}")
}

/// The code of an answer's error; none when the answer is a result.
pub fn error_code(line: &str) -> Option<i64> {
    Members::of(Members::of(line)?.get("error")?)?.get("code")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[test]
    fn members_that_are_not_replaced_are_forwarded_byte_for_byte() {
        let text = r#"{ "id": 7, "x-unknown": [1.0, 1e400, 12345678901234567890],
            "jsonrpc":"2.0","method":"tools/call",
            "params": {"z":1,"_meta":{"b":1,"progressToken":"p","a":1.10},"name":"\u0061\n"}}"#;
        let message = Message::parse(text).unwrap();
        assert_eq!((message.kind, message.progress_token()), (MessageKind::Request, Some("\"p\"")));
        let params = message.params_with_progress_token("12").unwrap();
        let line = message.to_line(&[("id", "12"), ("params", &params)]);
        assert_eq!(
            line,
            concat!(
                r#"{"id":12,"x-unknown":[1.0, 1e400, 12345678901234567890],"jsonrpc":"2.0","method":"tools/call","#,
                r#""params":{"z":1,"_meta":{"b":1,"progressToken":12,"a":1.10},"name":"\u0061\n"}}"#
            )
        );
    }

    #[test]
    fn requests_notifications_and_responses_are_told_apart() {
        let kind = |text: &str| Message::parse(text).map(|message| message.kind);
        assert_eq!(kind(r#"{"jsonrpc":"2.0","id":"a","method":"ping"}"#), Ok(MessageKind::Request));
        assert_eq!(kind(r#"{"jsonrpc":"2.0","method":"x"}"#), Ok(MessageKind::Notification));
        assert_eq!(kind(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#), Ok(MessageKind::Response));
        assert_eq!(kind(r#"{"jsonrpc":"2.0","id":null,"error":{}}"#), Ok(MessageKind::Response));
        for bad in [
            r#"{"id":1,"method":"ping"}"#,
            r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#,
            r#"{"jsonrpc":"2.0","id":{},"method":"ping"}"#,
            r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":5}"#,
            r#"{"jsonrpc":"2.0","id":1}"#,
            "[]",
            "17",
        ] {
            assert_eq!(kind(bad), Err(InvalidMessage::NotJsonRpc), "{bad}");
        }
        for (length, expected) in [(1022, Ok(MessageKind::Request)), (1023, Err(InvalidMessage::IdTooLong))] {
            let id = "x".repeat(length);
            assert_eq!(kind(&format!(r#"{{"jsonrpc":"2.0","id":"{id}","method":"ping"}}"#)), expected);
        }
        for bad in ["", "hello", "{", r#"{"jsonrpc":"2.0""#, "{}}"] {
            assert_eq!(kind(bad), Err(InvalidMessage::NotJson), "{bad}");
        }
    }

    #[test]
    fn requests_and_notifications_are_messages() {
        let request = request_line(7, "tools/call", Some(r#"{"name":"x"}"#));
        assert_eq!(request, r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"x"}}"#);
        let notification = notification_line("notifications/initialized", None);
        assert_eq!(notification, r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
        let kind = |text: &str| Message::parse(text).map(|message| message.kind);
        assert_eq!(
            (kind(&request), kind(&notification)),
            (Ok(MessageKind::Request), Ok(MessageKind::Notification))
        );
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[ \\n\\r\"\\\\a-zé]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-z_]{1,6}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// A message with line breaks is written on one line and keeps its meaning.
        #[test]
        fn a_message_leaves_on_one_line(params in json(), extra in json()) {
            let message = serde_json::json!({ "jsonrpc": "2.0", "id": 5, "method": "m", "params": params, "extra": extra });
            let pretty = serde_json::to_string_pretty(&message).unwrap().replace('\n', "\r\n");
            let line = Message::parse(&pretty).unwrap().to_line(&[]);
            prop_assert!(!line.contains('\n') && !line.contains('\r'));
            prop_assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), message);
        }

        #[test]
        fn junk_never_panics(text in "\\PC{0,80}") {
            let _ = Message::parse(&text);
        }
    }
}
