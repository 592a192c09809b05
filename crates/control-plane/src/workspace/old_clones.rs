//! Removes credentials from clones that earlier versions made from a URL with a credential in it.
//!
//! git keeps the URL of a clone in `.git/config`. The migration that cleaned the database has marked these workspaces. Their clones
//! are cleaned when this server first connects to the sandbox. Later changes to the remotes are left alone.

use std::time::Duration;

use emergent_guest_client::{CallError, Event, GuestClient};
use emergent_guest_protocol::{GuestCall, WriteCall};
use emergent_store::{CREDENTIAL_IN_CLONE, WorkspaceRecord};
use emergent_wire::ErrorCode;
use emergent_wire::git_url::redact_urls;
use emergent_wire::tools::{ReadRequest, WriteAnswer};
use serde_json::Value;

use super::context::Context;

/// The file with the remotes of a clone.
const CONFIG: &str = "/workspace/.git/config";
/// The limit on the size of that file.
const CONFIG_BYTES: usize = 1 << 20;
/// The time limit for cleaning a clone.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(20);

/// Cleans the clone of a marked workspace. A failure is logged, and the next connection tries again.
pub(super) async fn clean(context: &Context, record: &WorkspaceRecord, channel: &GuestClient) {
    let id = record.workspace.id;
    if record.workspace.metadata.get(CREDENTIAL_IN_CLONE) != Some(&Value::Bool(true)) {
        return;
    }
    match tokio::time::timeout(CLEAN_TIMEOUT, remove_credentials(channel))
        .await
        .unwrap_or(Err(CleanError::TooSlow))
    {
        Ok(()) => {
            context.note_in_metadata(id, CREDENTIAL_IN_CLONE, Value::Null).await;
            tracing::info!(workspace = %id, "removed a credential from the remote of its clone");
        }
        Err(error) => {
            tracing::warn!(workspace = %id, %error, "the remote of its clone may still hold a credential");
        }
    }
}

/// The error of cleaning a clone.
#[derive(Debug, thiserror::Error)]
enum CleanError {
    #[error("it took more than {} s", CLEAN_TIMEOUT.as_secs())]
    TooSlow,
    #[error("its configuration has more than {CONFIG_BYTES} bytes")]
    TooLarge,
    #[error("its configuration is not text")]
    NotText,
    #[error(transparent)]
    Call(#[from] CallError),
}

async fn remove_credentials(channel: &GuestClient) -> Result<(), CleanError> {
    let Some(config) = read_config(channel).await? else {
        return Ok(());
    };
    let clean = redact_urls(&config);
    if clean == config {
        return Ok(());
    }
    let call = channel.start(&GuestCall::Write(WriteCall { file_path: CONFIG.to_owned() })).await?;
    call.send_input(clean.as_bytes()).await?;
    call.end_input().await?;
    call.answer::<WriteAnswer>().await?;
    Ok(())
}

/// The configuration of the clone, if there is one.
async fn read_config(channel: &GuestClient) -> Result<Option<String>, CleanError> {
    let request = ReadRequest { file_path: CONFIG.to_owned(), raw: true, ..ReadRequest::default() };
    let mut call = channel.start(&GuestCall::Read(request)).await?;
    let mut bytes = Vec::new();
    loop {
        match call.next().await {
            Ok(Event::Stdout(piece) | Event::Stderr(piece)) => bytes.extend_from_slice(&piece),
            Ok(Event::Answer(_)) => break,
            Err(CallError::Failed(error)) if error.code == ErrorCode::FileNotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        if bytes.len() > CONFIG_BYTES {
            return Err(CleanError::TooLarge);
        }
    }
    String::from_utf8(bytes).map(Some).map_err(|_| CleanError::NotText)
}
