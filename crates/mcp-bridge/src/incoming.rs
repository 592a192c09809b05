//! Lines of a process on their way to the routes.

use emergent_mcp_protocol::envelope::{InvalidMessage, Message};

use crate::error::BridgeError;
use crate::lines::Line;
use crate::routes::{Role, Routes, Taken};

/// Routes a line.
pub(crate) fn route(routes: &mut Routes, role: Role, line: &Line) -> Taken {
    match line {
        Line::Whole(line) => route_whole(routes, role, line),
        Line::TooLong { head, tail, bytes } => fail_long(routes, head, tail, *bytes),
    }
}

fn route_whole(routes: &mut Routes, role: Role, line: &[u8]) -> Taken {
    let Ok(text) = std::str::from_utf8(line) else {
        return Taken::Dropped("a line that is not UTF-8");
    };
    match Message::parse(text) {
        Ok(message) => routes.take(&message, role),
        Err(InvalidMessage::NotJson) => Taken::Dropped("a line that is not JSON"),
        Err(InvalidMessage::NotJsonRpc) => Taken::Dropped("JSON that is not a JSON-RPC message"),
        Err(InvalidMessage::IdTooLong) => Taken::Dropped("a message with an id that is too long"),
    }
}

/// Fails the request whose answer is too long, if the ends of the line show its id.
fn fail_long(routes: &mut Routes, head: &[u8], tail: &[u8], bytes: u64) -> Taken {
    let number_after = |text: &str| -> Option<u64> {
        let rest = text.rsplit_once("\"id\":").map(|(_, rest)| rest.trim_start())?;
        rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())].parse().ok()
    };
    // The id comes before the result or after it. The text between is the server's to choose.
    let (head, tail) = (String::from_utf8_lossy(head), String::from_utf8_lossy(tail));
    let before = head.split_once("\"result\"").map(|(before, _)| before).unwrap_or_default();
    let after = tail.rsplit_once('}').map(|_| tail.rsplit_once("},").map_or("", |(_, after)| after));
    let own = number_after(before).or_else(|| number_after(after.unwrap_or_default()));
    match own {
        Some(own) if routes.fail(own, BridgeError::AnswerTooLong(bytes)) => Taken::Routed,
        _ => Taken::Dropped("a line that is too long"),
    }
}
