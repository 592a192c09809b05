//! A reader of server-sent events.

use serde_json::Value;

/// One event.
#[derive(Clone, Debug)]
pub struct ServerEvent {
    /// What kind it is; `message` when it does not say.
    pub name: String,
    /// What to send as `Last-Event-ID` to go on after it.
    pub id: Option<String>,
    /// Its data; null when it has none.
    pub data: Value,
}

/// Events as they come. Dropping it hangs up.
#[derive(Debug)]
pub struct EventReader {
    response: reqwest::Response,
    rest: Vec<u8>,
}

impl EventReader {
    /// The events of an answer.
    pub fn new(response: reqwest::Response) -> Self {
        Self { response, rest: Vec::new() }
    }

    /// The next event; none at the stream's end.
    pub async fn next(&mut self) -> Option<ServerEvent> {
        loop {
            while let Some(end) = self.rest.windows(2).position(|pair| pair == b"\n\n") {
                let block: Vec<u8> = self.rest.drain(..end + 2).collect();
                if let Some(event) = parse(std::str::from_utf8(&block).expect("events are text")) {
                    return Some(event);
                }
            }
            let piece = self.response.chunk().await.expect("the stream ends whole")?;
            self.rest.extend_from_slice(&piece);
        }
    }

    /// The next event that is wanted; others are passed over.
    pub async fn until(&mut self, is_wanted: impl Fn(&ServerEvent) -> bool) -> ServerEvent {
        loop {
            let event = self.next().await.expect("it comes before the stream ends");
            if is_wanted(&event) {
                return event;
            }
        }
    }

    /// All events until the end.
    pub async fn collect(mut self) -> Vec<ServerEvent> {
        let mut all = Vec::new();
        while let Some(event) = self.next().await {
            all.push(event);
        }
        all
    }
}

/// None for a comment, which only keeps the connection alive.
fn parse(block: &str) -> Option<ServerEvent> {
    let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(|text| text.trim());
    let data = match field("data:")? {
        "" => Value::Null,
        text => serde_json::from_str(text).expect("data is JSON"),
    };
    let name = field("event:").unwrap_or("message").to_owned();
    Some(ServerEvent { name, id: field("id:").map(str::to_owned), data })
}
