//! `workspace create`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use emergent_wire::workspace::{CreateWorkspace, NetworkMode, ProviderChoice, SecurityLevel, Workspace};

use super::view;
use crate::client::calls;
use crate::context::Context;
use crate::values::{self, LimitArgs, one_of};
use crate::{output, progress};

/// Create a workspace
///
/// Waits until the workspace takes tool calls. All options have a default.
#[derive(Args, Debug, Default)]
#[command(after_help = "\
Examples:
  emergent workspace create
  id=$(emergent workspace create -q)
  emergent workspace create --repo https://github.com/owner/name --branch main
  emergent workspace create --cpu 0.5 --memory 512M --disk 1G --network isolated --ttl 2h
  emergent workspace create --env MODE=test --env API_KEY      passes on the value of API_KEY")]
pub(crate) struct CreateArgs {
    /// The provider. A named provider is used, or the call fails; auto chooses one
    #[arg(long, value_parser = one_of::<ProviderChoice>(ProviderChoice::ALL.iter().map(|name| name.as_str())))]
    provider: Option<ProviderChoice>,
    /// The image [default: emergent/workspace:latest]
    #[arg(long)]
    image: Option<String>,
    #[command(flatten)]
    limits: LimitArgs,
    /// Its network: access to the internet (nat), or none (isolated)
    #[arg(long, value_parser = one_of::<NetworkMode>(NetworkMode::ALL.iter().map(|name| name.as_str())))]
    network: Option<NetworkMode>,
    /// An environment variable of all commands. NAME alone passes on its value from here
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// A file with environment variables, one on each line
    #[arg(long, value_name = "FILE")]
    env_file: Option<PathBuf>,
    /// A repository to clone into /workspace
    #[arg(long, value_name = "URL")]
    repo: Option<String>,
    /// The branch, tag or commit to check out
    #[arg(long, requires = "repo", value_name = "REF")]
    branch: Option<String>,
    /// Its time to live after the last use: seconds, or 90m, 2h, 7d
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    ttl: Option<std::time::Duration>,
    /// The minimum isolation. With high the provider is a microVM, or the call fails
    #[arg(long, value_parser = one_of::<SecurityLevel>(SecurityLevel::ALL.iter().map(|name| name.as_str())))]
    security_level: Option<SecurityLevel>,
    /// Use no spare of the warm pool
    #[arg(long)]
    no_warm: bool,
    /// Print the id and nothing else
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

impl CreateArgs {
    fn request(&self) -> Result<CreateWorkspace> {
        Ok(CreateWorkspace {
            repository_url: self.repo.clone(),
            branch: self.branch.clone(),
            provider: self.provider,
            security_level: self.security_level,
            resource_limits: self.limits.requested(),
            image: self.image.clone(),
            environment: values::environment(self.env_file.as_deref(), &self.env)?,
            network: self.network,
            warm_start: self.no_warm.then_some(false),
            ttl_seconds: self.ttl.map(|ttl| ttl.as_secs()),
            ..CreateWorkspace::default()
        })
    }
}

pub(super) async fn run(context: &Context, args: &CreateArgs) -> Result<u8> {
    let call = calls::create_workspace().body(&args.request()?)?;
    let answer = progress::during("creating a workspace", context.client.call(call)).await?;
    context.show(&answer, |workspace: Workspace| show_new(&workspace, args.quiet))?;
    Ok(0)
}

/// Prints a new workspace.
pub(crate) fn show_new(workspace: &Workspace, quiet: bool) -> Result<()> {
    view::warnings(workspace);
    if quiet {
        return output::line(workspace.id);
    }
    view::summary(workspace).print()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn omitted_flags_are_not_sent() {
        let request = CreateArgs::default().request().unwrap();
        assert_eq!(serde_json::to_string(&request).unwrap(), "{}");
    }

    #[test]
    fn flags_are_sent_as_fields_of_the_request() {
        let args = CreateArgs {
            limits: LimitArgs { cpu: Some("0.5".parse().unwrap()), ..LimitArgs::default() },
            env: vec![("A".into(), "1".into())],
            ttl: Some(std::time::Duration::from_secs(120)),
            no_warm: true,
            ..CreateArgs::default()
        };
        let request = serde_json::to_value(args.request().unwrap()).unwrap();
        let expected = serde_json::json!({
            "resource_limits": {"cpu": "0.5"}, "environment": {"A": "1"}, "ttl_seconds": 120, "warm_start": false
        });
        assert_eq!(request, expected);
    }
}
