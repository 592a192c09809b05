//! The arguments of all tools in one type. Each tool uses its own.

use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Default, Deserialize)]
pub(crate) struct Arguments<'a> {
    /// As JSON with its quotes, because it is sent back unchanged.
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    name: Option<String>,
    line: Option<String>,
    method: Option<String>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    pub(crate) code: Option<i32>,
    pub(crate) ms: Option<u64>,
    pub(crate) steps: Option<u64>,
    pub(crate) seconds: Option<u64>,
    /// Whether the process that is started keeps the output of this one open.
    #[serde(default)]
    pub(crate) inherit: bool,
}

impl<'a> Arguments<'a> {
    pub(crate) fn parse(json: Option<&'a RawValue>) -> Result<Self, String> {
        let Some(json) = json else { return Ok(Self::default()) };
        serde_json::from_str(json.get()).map_err(|error| error.to_string())
    }

    /// The text as JSON.
    pub(crate) fn text(&self) -> Result<&'a str, String> {
        self.text.map(RawValue::get).ok_or_else(|| missing("text"))
    }

    pub(crate) fn name(&self) -> Result<&str, String> {
        self.name.as_deref().ok_or_else(|| missing("name"))
    }

    pub(crate) fn line(&self) -> Result<&str, String> {
        self.line.as_deref().ok_or_else(|| missing("line"))
    }

    pub(crate) fn method(&self) -> Result<&str, String> {
        self.method.as_deref().ok_or_else(|| missing("method"))
    }

    pub(crate) fn params(&self) -> Option<&'a str> {
        self.params.map(RawValue::get)
    }
}

/// The error for a missing argument.
pub(crate) fn missing(name: &str) -> String {
    format!("argument `{name}` is missing")
}
