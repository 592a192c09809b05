//! `emergent events`.

use anyhow::Result;
use clap::Args;
use emergent_wire::event::Event;

use crate::client::calls;
use crate::connection::ConnectionArgs;
use crate::context::Context;
use crate::output::{self, one_line};
use crate::sse::EventStream;
use crate::values::timestamp;

/// Print the server's events as they happen
///
/// Workspaces that are created and destroyed, alerts about their CPU, memory and disk use, providers that become unhealthy or
/// healthy again. With --json each line is one event.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  emergent events\n  emergent events --json | grep usage.high")]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
}

/// Prints events until the server ends the stream.
pub(crate) async fn run(args: EventsArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    let mut events = EventStream::new(context.client.send(calls::follow_events()).await?);
    while let Some(event) = events.next().await? {
        if context.json {
            output::line(&event.data)?;
        } else if let Ok(event) = serde_json::from_str::<Event>(&event.data) {
            let subject = event.workspace_id.map(|id| id.to_string());
            let subject = subject.or_else(|| event.provider.map(|provider| provider.to_string()));
            output::line(format_args!(
                "{}  {:<22} {}  {}",
                timestamp(event.at),
                event.kind,
                subject.unwrap_or_default(),
                one_line(&event.message)
            ))?;
        }
    }
    output::note("the server ended the stream");
    Ok(1)
}
