//! `workspace attach` and `detach`: exclusive holders.

use anyhow::Result;
use clap::Args;
use emergent_wire::workspace::{AttachRequest, DetachRequest, Workspace};

use super::lifecycle::IdArgs;
use crate::client::calls;
use crate::context::Context;
use crate::output::{self, one_line};

/// Attach a workspace to one holder; a second holder is refused
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  emergent workspace attach 3fa2c9d1 --holder agent-7")]
pub(super) struct AttachArgs {
    #[command(flatten)]
    which: IdArgs,
    /// The holder's name [default: the token's name]
    #[arg(long, value_name = "NAME")]
    holder: Option<String>,
}

/// Detach a workspace from its holder
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent workspace detach 3fa2c9d1 --holder agent-7
  emergent workspace detach 3fa2c9d1 --force            from any holder")]
pub(super) struct DetachArgs {
    #[command(flatten)]
    which: IdArgs,
    /// The holder's name [default: the token's name]
    #[arg(long, value_name = "NAME")]
    holder: Option<String>,
    /// Detach it from any holder
    #[arg(long)]
    force: bool,
}

pub(super) async fn attach(context: &Context, args: AttachArgs) -> Result<u8> {
    let id = context.workspace_id(&args.which.id).await?;
    let call = calls::attach_workspace(id).body(&AttachRequest { holder: args.holder })?;
    let answer = context.client.call(call).await?;
    context.show(&answer, |workspace: Workspace| {
        let holder = workspace.attached_to.unwrap_or_default();
        output::line(format_args!("{id} attached to {}", one_line(&holder)))
    })?;
    Ok(0)
}

pub(super) async fn detach(context: &Context, args: DetachArgs) -> Result<u8> {
    let id = context.workspace_id(&args.which.id).await?;
    let request = DetachRequest { holder: args.holder, force: args.force };
    let answer = context.client.call(calls::detach_workspace(id).body(&request)?).await?;
    context.show(&answer, |_: Workspace| output::line(format_args!("{id} detached")))?;
    Ok(0)
}
