//! Requests to the REST API.

use serde_json::Value;

use super::TestServer;
use crate::sse::EventReader;

/// A response: its status and its JSON.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The body. Null if it is not JSON.
    pub body: Value,
}

impl Answer {
    /// The body of a success. Panics for a failure.
    #[track_caller]
    pub fn ok(self) -> Value {
        assert!((200..300).contains(&self.status), "{} {}", self.status, self.body);
        self.body
    }

    /// The code of a failure with this status. Panics for another status, and for a body without a code or a message.
    #[track_caller]
    pub fn error(self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.body);
        let code = self.body["error"]["code"].as_str().unwrap_or_default().to_owned();
        assert!(!code.is_empty() && !self.message().is_empty(), "{}", self.body);
        code
    }

    /// The message of a failure. Panics for a body without one.
    #[track_caller]
    pub fn message(&self) -> &str {
        self.body["error"]["message"].as_str().unwrap_or_else(|| panic!("no error message: {self:?}"))
    }
}

impl TestServer {
    /// Sends a request with the admin token.
    pub async fn request(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        self.request_as(Some(&self.token), method, path, body).await
    }

    /// Sends a request with another token, or with none.
    pub async fn request_as(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> Answer {
        let response = match self.build(token, method, path, body).send().await {
            Ok(response) => response,
            Err(error) => panic!("{path}: {error:?}\n{}", self.log()),
        };
        let status = response.status().as_u16();
        let bytes = response.bytes().await.expect("the body is complete");
        Answer { status, body: serde_json::from_slice(&bytes).unwrap_or(Value::Null) }
    }

    fn build(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> reqwest::RequestBuilder {
        let method = method.parse().expect("the method is valid");
        let mut request = self.client.request(method, format!("{}{path}", self.url));
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        request
    }

    /// Sends a request and ignores its outcome, because the server may be killed before it answers.
    pub async fn request_ignoring_outcome(&self, method: &str, path: &str, body: Option<Value>) {
        if let Ok(response) = self.build(Some(&self.token), method, path, body).send().await {
            let _ = response.bytes().await;
        }
    }

    /// Sends a request that is answered with events. They begin after the event with the id `after`.
    pub async fn events(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
        after: Option<&str>,
    ) -> EventReader {
        let mut request = self.build(Some(&self.token), method, path, body);
        request = request.header("accept", "text/event-stream");
        if let Some(id) = after {
            request = request.header("last-event-id", id);
        }
        let response = request.send().await.expect("the server answers");
        assert_eq!(response.status(), 200, "{path}");
        EventReader::new(response)
    }

    /// The text of `/metrics`.
    pub async fn metrics(&self) -> String {
        let request = self.build(Some(&self.token), "GET", "/metrics", None);
        request.send().await.expect("the server answers").text().await.expect("the body is text")
    }

    /// The HTTP client, for requests that the other functions can't make.
    pub fn client(&self) -> &reqwest::Client {
        &self.client
    }
}
