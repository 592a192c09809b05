//! A reader of server-sent events.

use serde_json::Value;

/// One event.
#[derive(Clone, Debug)]
pub struct ServerEvent {
    /// Its kind. `message` if the server gives none.
    pub name: String,
    /// Its id. A client resumes after it with the header `Last-Event-ID`.
    pub id: Option<String>,
    /// Its data. Null if it has none.
    pub data: Value,
}

/// The events of a response. Dropping it closes the connection.
#[derive(Debug)]
pub struct EventReader {
    response: reqwest::Response,
    unread: Vec<u8>,
}

impl EventReader {
    /// The events of a response.
    pub fn new(response: reqwest::Response) -> Self {
        Self { response, unread: Vec::new() }
    }

    /// The next event. `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<ServerEvent> {
        loop {
            while let Some(end) = self.unread.windows(2).position(|pair| pair == b"\n\n") {
                let block: Vec<u8> = self.unread.drain(..end + 2).collect();
                if let Some(event) = parse(std::str::from_utf8(&block).expect("events are text")) {
                    return Some(event);
                }
            }
            let chunk = self.response.chunk().await.expect("the stream is not cut off")?;
            self.unread.extend_from_slice(&chunk);
        }
    }

    /// The next event that meets a condition. Other events are skipped.
    pub async fn until(&mut self, is_wanted: impl Fn(&ServerEvent) -> bool) -> ServerEvent {
        loop {
            let event = self.next().await.expect("the event comes before the stream ends");
            if is_wanted(&event) {
                return event;
            }
        }
    }

    /// All events until the end of the stream.
    pub async fn collect(mut self) -> Vec<ServerEvent> {
        let mut all = Vec::new();
        while let Some(event) = self.next().await {
            all.push(event);
        }
        all
    }
}

/// Parses one block. `None` for a comment, which only keeps the connection alive.
fn parse(block: &str) -> Option<ServerEvent> {
    let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim());
    let data = match field("data:")? {
        "" => Value::Null,
        text => serde_json::from_str(text).expect("data is JSON"),
    };
    let name = field("event:").unwrap_or("message").to_owned();
    Some(ServerEvent { name, id: field("id:").map(str::to_owned), data })
}
