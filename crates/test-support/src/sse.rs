//! A reader of server-sent events.

use serde_json::Value;

/// One event.
#[derive(Clone, Debug)]
pub struct ServerEvent {
    /// What kind it is.
    pub name: String,
    /// What to send as `Last-Event-ID` to go on after it.
    pub id: Option<String>,
    /// Its data.
    pub data: Value,
}

/// Events as they come. Dropping it hangs up.
#[derive(Debug)]
pub struct EventReader {
    response: reqwest::Response,
    rest: Vec<u8>,
}

impl EventReader {
    pub(crate) fn new(response: reqwest::Response) -> Self {
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
    Some(ServerEvent {
        name: field("event:")?.to_owned(),
        id: field("id:").map(str::to_owned),
        data: serde_json::from_str(field("data:")?).expect("data is JSON"),
    })
}
