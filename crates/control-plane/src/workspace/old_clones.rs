//! Removes credentials from clones that earlier versions made of a URL with a credential in it.
//!
//! git keeps the URL of a clone in `.git/config`. The migration that cleaned the database marked these workspaces; their clone is
//! cleaned when this server first reaches the sandbox. Remotes that somebody adds by hand are left alone.

use std::time::Duration;

use emergent_guest_client::{Event, GuestClient};
use emergent_guest_protocol::{GuestCall, WriteCall};
use emergent_store::{CREDENTIAL_IN_CLONE, WorkspaceRecord};
use emergent_wire::git_url::redact_urls;
use emergent_wire::tools::{ReadRequest, WriteAnswer};
use emergent_wire::{ErrorCode, ErrorDetail};
use serde_json::{Map, Value};

use super::Workspaces;

/// Where git keeps a clone's remotes.
const CONFIG: &str = "/workspace/.git/config";
/// The largest configuration that is cleaned.
const CONFIG_BYTES: usize = 1 << 20;
/// How long it may take to clean one.
const CLEAN_TIME: Duration = Duration::from_secs(20);

impl Workspaces {
    /// Cleans the clone of a workspace that is marked. A failure is logged, and it is tried again at the next connection.
    pub(super) async fn clean_old_clone(&self, record: &WorkspaceRecord, channel: &GuestClient) {
        let id = record.workspace.id;
        if record.workspace.metadata.get(CREDENTIAL_IN_CLONE) != Some(&Value::Bool(true)) {
            return;
        }
        let too_slow = |_| Err(ErrorDetail::new(ErrorCode::DeadlineExceeded, "it took too long"));
        match tokio::time::timeout(CLEAN_TIME, remove_credentials(channel)).await.unwrap_or_else(too_slow) {
            Ok(()) => {
                let unmarked = Map::from_iter([(CREDENTIAL_IN_CLONE.to_owned(), Value::Null)]);
                let _ = self.store.merge_metadata(id, unmarked).await;
                tracing::info!(workspace = %id, "removed a credential from the remote of its clone");
            }
            Err(error) => {
                tracing::warn!(workspace = %id, %error, "the remote of its clone may still hold a credential");
            }
        }
    }
}

async fn remove_credentials(channel: &GuestClient) -> Result<(), ErrorDetail> {
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
async fn read_config(channel: &GuestClient) -> Result<Option<String>, ErrorDetail> {
    let request = ReadRequest { file_path: CONFIG.to_owned(), raw: true, ..ReadRequest::default() };
    let mut call = channel.start(&GuestCall::Read(request)).await?;
    let mut bytes = Vec::new();
    loop {
        match call.next().await.map_err(ErrorDetail::from) {
            Ok(Event::Stdout(piece) | Event::Stderr(piece)) => bytes.extend_from_slice(&piece),
            Ok(Event::Answer(_)) => break,
            Err(error) if error.code == ErrorCode::FileNotFound => return Ok(None),
            Err(error) => return Err(error),
        }
        if bytes.len() > CONFIG_BYTES {
            return Err(ErrorDetail::new(ErrorCode::TooLarge, "its configuration is too large to be read"));
        }
    }
    let not_text = |_| ErrorDetail::new(ErrorCode::Unacceptable, "its configuration is not text");
    String::from_utf8(bytes).map(Some).map_err(not_text)
}
