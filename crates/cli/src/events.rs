//! `emergent events`.

use anyhow::Result;
use clap::Args;
use emergent_wire::event::Event;

use crate::client::Call;
use crate::connection::ConnectionArgs;
use crate::context::Context;
use crate::output::{self, one_line};
use crate::sse::EventStream;
use crate::values::timestamp;

/// Follow what happens on the server, as it happens
///
/// Workspaces that come and go, alerts about their use of CPU, memory and disk, providers that fail or come back.
/// With --json one event on each line.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  emergent events\n  emergent events --json | grep usage.high")]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
}

/// Prints events until the server ends, or somebody ends this.
pub(crate) async fn run(args: EventsArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    let mut events = EventStream::new(context.client.send(Call::get(&["events"]).events()).await?);
    while let Some(event) = events.next().await? {
        if context.json {
            output::line(&event.data)?;
        } else if let Ok(event) = serde_json::from_str::<Event>(&event.data) {
            let about = event.workspace_id.map(|id| id.to_string());
            let about = about.or_else(|| event.provider.map(|provider| provider.to_string()));
            output::line(format_args!(
                "{}  {:<22} {}  {}",
                timestamp(event.at),
                event.kind,
                about.unwrap_or_default(),
                one_line(&event.message)
            ))?;
        }
    }
    output::note("the server has ended the stream");
    Ok(1)
}
