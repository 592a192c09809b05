//! The one error vocabulary. A code is stable and means one HTTP status; the message is for a person and says
//! what to do next.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $status:literal;)*) => {
        /// A stable code for a failure, which programs can compare.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        #[serde(rename_all = "snake_case")]
        pub enum ErrorCode {
            $($(#[$doc])* $name,)*
        }

        impl ErrorCode {
            /// Every code there is.
            pub const ALL: &[ErrorCode] = &[$(ErrorCode::$name),*];

            /// The code as it is written in JSON.
            pub const fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$name => $text,)* }
            }

            /// The HTTP status an answer with this code has.
            pub const fn http_status(self) -> u16 {
                match self { $(ErrorCode::$name => $status,)* }
            }
        }
    };
}

error_codes! {
    /// The request can't be understood: syntax, unknown field, wrong type, value out of range.
    BadRequest = "bad_request", 400;
    /// A path that no file can have.
    InvalidPath = "invalid_path", 400;
    /// A glob or regular expression that does not parse.
    InvalidPattern = "invalid_pattern", 400;
    /// No token, or one that is not (any more) valid.
    Unauthorized = "unauthorized", 401;
    /// The token is valid but may not do this.
    Forbidden = "forbidden", 403;
    /// The resource does not exist, or this token may not see it.
    NotFound = "not_found", 404;
    /// No such file in the workspace.
    FileNotFound = "file_not_found", 404;
    /// The HTTP method is not one this address has.
    MethodNotAllowed = "method_not_allowed", 405;
    /// The client accepts no type that this address answers with.
    NotAcceptable = "not_acceptable", 406;
    /// The workspace is not in a state that allows this.
    WrongState = "wrong_state", 409;
    /// Another holder has the resource, or somebody changed it.
    Conflict = "conflict", 409;
    /// The file is not the version the caller expected.
    StaleFile = "stale_file", 409;
    /// Body or content over the limit.
    TooLarge = "too_large", 413;
    /// The body has a type that this address does not take.
    UnsupportedMediaType = "unsupported_media_type", 415;
    /// Understood, but can't be done as asked.
    Unacceptable = "unacceptable", 422;
    /// The path names a directory where a file is needed, a file where a directory is needed, or a special file.
    WrongFileType = "wrong_file_type", 422;
    /// The operating system of the sandbox refused the access.
    PermissionDenied = "permission_denied", 422;
    /// The workspace's disk is full.
    DiskFull = "disk_full", 422;
    /// `old_string` does not occur in the file.
    OldStringNotFound = "old_string_not_found", 422;
    /// `old_string` occurs more than once.
    MultipleMatches = "multiple_matches", 422;
    /// git failed. The message quotes it.
    GitFailed = "git_failed", 422;
    /// A limit on how many may exist or run at once is reached.
    LimitReached = "limit_reached", 429;
    /// The headers, or the address, are over the limit.
    HeadersTooLarge = "headers_too_large", 431;
    /// A fault of the server itself.
    Internal = "internal", 500;
    /// The sandbox provider failed; don't retry blindly.
    ProviderFailed = "provider_failed", 502;
    /// The sandbox or its connection was lost while the call ran; it may have had effects.
    SandboxLost = "sandbox_lost", 502;
    /// The server can't do this now. Retry later.
    Unavailable = "unavailable", 503;
    /// The host's disk has no room for this; free some, then retry.
    HostDiskFull = "host_disk_full", 507;
    /// A deadline passed before the provider or the tool answered.
    DeadlineExceeded = "deadline_exceeded", 504;
    /// The caller cancelled the call.
    Cancelled = "cancelled", 499;
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure as it travels: from the guest agent to the server, and from the server to its client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[error("{message}")]
pub struct ErrorDetail {
    /// The stable code of the failure.
    pub code: ErrorCode,
    /// The cause of the failure and the next step, for a person.
    pub message: String,
    /// Further details, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub details: Option<serde_json::Value>,
}

impl ErrorDetail {
    /// A failure with a code and a message.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: None }
    }

    /// The same failure with details.
    #[must_use]
    pub fn with_details(mut self, details: serde_json::Value) -> Self {
        self.details = Some(details);
        self
    }
}

/// The body of every answer that is a failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// The failure.
    pub error: ErrorDetail,
}

/// The text of an error with its causes. A cause that the text already has is left out.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_appended_unless_the_text_has_them() {
        #[derive(Debug, thiserror::Error)]
        #[error("{text}")]
        struct Layer {
            text: &'static str,
            source: Option<Box<Layer>>,
        }
        let layer = |text, source: Option<Layer>| Layer { text, source: source.map(Box::new) };
        let error = layer("a: b", Some(layer("b", Some(layer("c", None)))));
        assert_eq!(with_causes(&error), "a: b: c");
    }

    #[test]
    fn a_code_is_written_the_same_in_json_and_in_text() {
        for code in ErrorCode::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
        }
    }
}
