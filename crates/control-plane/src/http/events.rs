//! The stream of the server's events.

use std::convert::Infallible;

use axum::extract::State;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use emergent_wire::error::ErrorBody;
use emergent_wire::event::{Event, EventKind};
use tokio::sync::broadcast::error::RecvError;

use super::App;
use super::route::RouteRule;
use super::stream::KEEP_ALIVE;

pub(super) const LISTEN: RouteRule = RouteRule::admin("events");

/// Follow the server's events as server-sent events.
///
/// The name of each event is its kind, and its data an `Event`. A client that reads too slowly gets a `missed` event with the number
/// of events that were left out. Earlier events are not replayed.
#[utoipa::path(get, path = "/api/v1/events", tag = "operations",
    responses((status = 200, body = Event, content_type = "text/event-stream"), (status = "4XX", body = ErrorBody)))]
pub(super) async fn listen(State(app): State<App>) -> Response {
    let receiver = app.workspaces.context.events.listen();
    let events = futures_util::stream::unfold(receiver, |receiver| async move {
        let mut receiver = receiver?;
        let event = match receiver.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(count)) => missed(count),
            Err(RecvError::Closed) => return None,
        };
        let data = serde_json::to_string(&event).unwrap_or_default();
        let event = SseEvent::default().event(event.kind.as_str()).data(data);
        Some((Ok::<_, Infallible>(event), Some(receiver)))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

fn missed(count: u64) -> Event {
    Event {
        at: Utc::now(),
        kind: EventKind::Missed,
        workspace_id: None,
        provider: None,
        message: format!("{count} events were left out: the client reads too slowly"),
    }
}
