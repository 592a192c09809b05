//! `emergent token`: access tokens.

use std::time::Duration;

use anyhow::{Context as _, Result};
use chrono::Utc;
use clap::{Args, Subcommand};
use emergent_wire::TokenId;
use emergent_wire::access::{CreateToken, CreatedToken, Token, TokenList, TokenScope};

use crate::client::calls;
use crate::connection::ConnectionArgs;
use crate::context::Context;
use crate::output::{self, Table};
use crate::short_id;
use crate::values::{self, age, timestamp};

/// Create, list and revoke access tokens
///
/// An admin token may do everything. A token for a workspace may read that workspace and use its tools.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent token create laptop
  emergent token list
  emergent token revoke laptop")]
pub(crate) struct TokenArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Subcommand, Debug)]
enum TokenCommand {
    /// Create a token and print it; it is never shown again
    #[command(after_help = "\
Examples:
  emergent token create laptop                                       an admin token
  EMERGENT_TOKEN=$(emergent token create agent-1 --workspace 3fa2c9d1 --ttl 2h)")]
    Create {
        /// Its name
        name: String,
        /// Only for this workspace: its id, or a unique prefix or suffix of it
        #[arg(long, value_name = "ID")]
        workspace: Option<String>,
        /// It expires after this time: seconds, or 90m, 2h, 7d [default: never]
        #[arg(long, value_name = "DURATION", value_parser = values::duration)]
        ttl: Option<Duration>,
    },
    /// List the tokens that are not revoked
    #[command(visible_alias = "ls", after_help = "Examples:\n  emergent token list")]
    List,
    /// Revoke a token: it stops working at once
    #[command(after_help = "Examples:\n  emergent token revoke laptop\n  emergent token revoke 3fa2c9d1")]
    Revoke {
        /// The token's name, its id, or a unique prefix or suffix of the id
        #[arg(value_name = "ID|NAME")]
        which: String,
    },
}

/// Runs one of the commands.
pub(crate) async fn run(args: TokenArgs) -> Result<u8> {
    let context = Context::open(&args.connection)?;
    match args.command {
        TokenCommand::Create { name, workspace, ttl } => create(&context, name, workspace, ttl).await?,
        TokenCommand::List => list(&context).await?,
        TokenCommand::Revoke { which } => revoke(&context, &which).await?,
    }
    Ok(0)
}

async fn create(
    context: &Context,
    name: String,
    workspace: Option<String>,
    ttl: Option<Duration>,
) -> Result<()> {
    let workspace_id = match workspace {
        Some(given) => Some(context.workspace_id(&given).await?),
        None => None,
    };
    let request = CreateToken { name, workspace_id, ttl_seconds: ttl.map(|ttl| ttl.as_secs()) };
    let answer = context.client.call(calls::create_token().body(&request)?).await?;
    context.show(&answer, |created: CreatedToken| {
        // Only the secret goes to stdout, so that a shell can assign it to a variable.
        output::line(&created.secret)?;
        let token = created.token;
        let until = token
            .expires_at
            .map_or("until it is revoked".to_owned(), |at| format!("until {}", timestamp(at)));
        output::note(format_args!(
            "token '{}' ({}) for {}, {until}; it is not shown again",
            output::one_line(&token.name),
            token.id,
            scope(&token)
        ));
        Ok(())
    })
}

fn scope(token: &Token) -> String {
    match token.scope {
        TokenScope::Admin => "admin".to_owned(),
        TokenScope::Project { project_id } => format!("project {project_id}"),
        TokenScope::Session { session_id, .. } => format!("session {session_id}"),
        TokenScope::Workspace { workspace_id } => format!("workspace {workspace_id}"),
    }
}

async fn list(context: &Context) -> Result<()> {
    let answer = context.client.call(calls::list_tokens()).await?;
    context.show(&answer, |list: TokenList| {
        output::report_damaged_rows(&list.unreadable);
        let now = Utc::now();
        let mut table = Table::with_head(["ID", "NAME", "FOR", "AGE", "USED", "EXPIRES"]);
        for token in &list.tokens {
            table.row([
                token.id.to_string(),
                token.name.clone(),
                scope(token),
                age(token.created_at, now),
                token.last_used_at.map_or("never".to_owned(), |at| format!("{} ago", age(at, now))),
                token.expires_at.map_or("never".to_owned(), timestamp),
            ]);
        }
        table.print()
    })
}

async fn revoke(context: &Context, given: &str) -> Result<()> {
    let id = match given.parse::<TokenId>() {
        Ok(id) => id,
        Err(_) => {
            let list: TokenList = context.client.call(calls::list_tokens()).await?.parse()?;
            find(given, list.tokens)?
        }
    };
    context.client.call(calls::revoke_token(id)).await?;
    if !context.json {
        output::line(format_args!("{id} revoked"))?;
    }
    Ok(())
}

/// The id of the token with this name, else of the token whose id starts or ends with it.
fn find(given: &str, tokens: Vec<Token>) -> Result<TokenId> {
    if let Some(token) = tokens.iter().find(|token| token.name == given) {
        return Ok(token.id);
    }
    let candidates = tokens.into_iter().map(|token| (token.id, token.name)).collect();
    short_id::resolve("token", given, candidates).context("no token has that name")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: &str, name: &str) -> Token {
        Token {
            id: id.parse().unwrap(),
            name: name.into(),
            scope: TokenScope::Admin,
            created_at: Utc::now(),
            expires_at: None,
            last_used_at: None,
        }
    }

    #[test]
    fn token_name_takes_precedence_over_a_part_of_an_id() {
        let first = "01990000-aaaa-7000-8000-00000000beef";
        let second = "01990000-aaaa-7000-8000-00000000cafe";
        let tokens = || vec![token(first, "laptop"), token(second, "beef")];
        assert_eq!(find("laptop", tokens()).unwrap().to_string(), first);
        assert_eq!(find("beef", tokens()).unwrap().to_string(), second);
        assert_eq!(find("cafe", tokens()).unwrap().to_string(), second);
        assert!(find("unknown", tokens()).is_err());
    }
}
