//! `emergent pool`: shows and sets the warm pool.

use anyhow::{Result, anyhow};
use clap::{Args, Subcommand};
use emergent_wire::pool::{PoolShape, PoolStatus, PoolTarget};
use emergent_wire::workspace::RequestedLimits;

use crate::client::calls;
use crate::connection::ConnectionArgs;
use crate::context::Context;
use crate::output::{self, Table};

/// Show and set the warm pool
///
/// Spares are sandboxes that the server starts ahead. A workspace that fits a spare is ready in milliseconds. A size that is set
/// here stays after a restart of the server, until it is set again or reset.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent pool show
  emergent pool set --size 3
  emergent pool set --shape size=2 --shape size=1,image=my/image:1,cpu=1,memory=2G,disk=5G,network=isolated
  emergent pool off
  emergent pool reset")]
pub(crate) struct PoolArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Subcommand, Debug)]
enum PoolCommand {
    /// Show the spares, and the size that the pool should have
    #[command(after_help = "Examples:\n  emergent pool show")]
    Show,
    /// Set the shapes and numbers of spares; they replace all earlier ones
    #[command(after_help = "\
Examples:
  emergent pool set --size 3                                   three with the default image and limits
  emergent pool set --shape size=1,image=my/image:1,memory=2G  one of another shape, and nothing else")]
    Set {
        /// The number of spares with the default image and limits
        #[arg(long, value_name = "COUNT", required_unless_present = "shape")]
        size: Option<u32>,
        /// A shape of spares: size=N and any of provider, image, cpu, memory, disk, network
        #[arg(long, value_name = "KEY=VALUE,…", value_parser = shape)]
        shape: Vec<PoolShape>,
    },
    /// Turn the pool off and remove all spares
    #[command(after_help = "Examples:\n  emergent pool off")]
    Off,
    /// Go back to the pool of the server's configuration
    #[command(after_help = "Examples:\n  emergent pool reset")]
    Reset,
}

const DEFAULT_SHAPE: PoolShape =
    PoolShape { size: 0, provider: None, image: None, resource_limits: None, network: None };

/// Parses `size=2,image=…,memory=2G`.
fn shape(text: &str) -> Result<PoolShape> {
    let mut shape = DEFAULT_SHAPE;
    let mut limits = RequestedLimits::default();
    let mut has_size = false;
    for part in text.split(',').filter(|part| !part.trim().is_empty()) {
        let (key, value) = part.split_once('=').ok_or_else(|| anyhow!("'{part}' is not KEY=VALUE"))?;
        let value = value.trim();
        match key.trim() {
            "size" => {
                shape.size = value.parse()?;
                has_size = true;
            }
            "provider" => shape.provider = Some(value.parse()?),
            "image" => shape.image = Some(value.to_owned()),
            "network" => shape.network = Some(value.parse()?),
            "cpu" => limits.cpu = Some(value.parse()?),
            "memory" => limits.memory = Some(value.parse()?),
            "disk" => limits.disk = Some(value.parse()?),
            other => {
                return Err(anyhow!(
                    "'{other}' is none of size, provider, image, cpu, memory, disk, network"
                ));
            }
        }
    }
    if !has_size {
        return Err(anyhow!("size is missing: add size=N, the number of spares"));
    }
    shape.resource_limits = Some(limits).filter(|limits| *limits != RequestedLimits::default());
    Ok(shape)
}

/// Runs one of the commands.
pub(crate) async fn run(args: PoolArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    let call = match args.command {
        PoolCommand::Show => calls::get_pool(),
        PoolCommand::Set { size, shape } => {
            let default = size.map(|size| PoolShape { size, ..DEFAULT_SHAPE });
            let shapes = default.into_iter().chain(shape).collect();
            calls::set_pool().body(&PoolTarget { shapes })?
        }
        PoolCommand::Off => calls::set_pool().body(&PoolTarget::default())?,
        PoolCommand::Reset => calls::reset_pool(),
    };
    let answer = context.client.call(call).await?;
    context.show(&answer, |pool: PoolStatus| show(&pool))?;
    Ok(0)
}

fn show(pool: &PoolStatus) -> Result<()> {
    let mut table = Table::with_head([
        "PROVIDER", "IMAGE", "CPU", "MEMORY", "DISK", "NETWORK", "WANTED", "READY", "FILLING", "PROBLEM",
    ]);
    for shape in &pool.shapes {
        let limits = shape.resource_limits;
        table.row([
            shape.provider.map_or_else(|| "-".to_owned(), |provider| provider.to_string()),
            shape.image.clone(),
            limits.cpu.to_string(),
            limits.memory.to_string(),
            limits.disk.to_string(),
            shape.network.to_string(),
            shape.size.to_string(),
            shape.ready.to_string(),
            shape.filling.to_string(),
            output::shorten(&shape.problem.clone().unwrap_or_default(), 80),
        ]);
    }
    table.print()?;
    if pool.shapes.is_empty() {
        output::note("the pool is off; turn it on with: emergent pool set --size 2");
    }
    if pool.leaving > 0 {
        output::note(format_args!("{} spares are being removed", pool.leaving));
    }
    output::report_damaged_rows(&pool.unreadable);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_shape_is_parsed_from_key_value_pairs() {
        let parsed =
            serde_json::to_value(shape("size=2, image=a/b:1,cpu=0.5,network=isolated").unwrap()).unwrap();
        let expected = serde_json::json!({
            "size": 2, "image": "a/b:1", "resource_limits": {"cpu": "0.5"}, "network": "isolated"
        });
        assert_eq!(parsed, expected);
        for text in ["", "image=a", "size=x", "size=1,colour=red", "size=1,memory", "size=1,provider=lxc"] {
            assert!(shape(text).is_err(), "{text}");
        }
    }
}
