//! `workspace attach` and `detach`.

use anyhow::Result;
use clap::Args;
use emergent_wire::workspace::{AttachRequest, DetachRequest, Workspace};

use super::lifecycle::IdArgs;
use crate::client::Call;
use crate::context::Context;
use crate::output::{self, one_line};

/// Hold a workspace for oneself; only one can
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  emergent workspace attach 3fa2c9d1 --holder agent-7")]
pub(super) struct AttachArgs {
    #[command(flatten)]
    which: IdArgs,
    /// Who holds it [default: the token's name]
    #[arg(long, value_name = "NAME")]
    holder: Option<String>,
}

/// Let a workspace go that was attached
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace detach 3fa2c9d1 --holder agent-7
  emergent workspace detach 3fa2c9d1 --force            whoever holds it")]
pub(super) struct DetachArgs {
    #[command(flatten)]
    which: IdArgs,
    /// Who held it [default: the token's name]
    #[arg(long, value_name = "NAME")]
    holder: Option<String>,
    /// Take it from whoever holds it
    #[arg(long)]
    force: bool,
}

pub(super) async fn attach(context: &Context, args: AttachArgs) -> Result<u8> {
    let id = context.workspace_id(&args.which.id).await?;
    let call = Call::post(&["agent", "workspaces", &id.to_string(), "attach"]);
    let answer = context.client.call(call.body(&AttachRequest { holder: args.holder })?).await?;
    context.show(&answer, |workspace: Workspace| {
        let holder = workspace.attached_to.unwrap_or_default();
        output::line(format_args!("{id} attached to {}", one_line(&holder)))
    })?;
    Ok(0)
}

pub(super) async fn detach(context: &Context, args: DetachArgs) -> Result<u8> {
    let id = context.workspace_id(&args.which.id).await?;
    let call = Call::post(&["agent", "workspaces", &id.to_string(), "detach"]);
    let request = DetachRequest { holder: args.holder, force: args.force };
    let answer = context.client.call(call.body(&request)?).await?;
    context.show(&answer, |_: Workspace| output::line(format_args!("{id} detached")))?;
    Ok(0)
}
