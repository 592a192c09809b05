//! A connection to the port of a server that speaks HTTP by itself, through the sandbox's channel: nobody but this server
//! reaches it.

use emergent_guest_client::Event;
use emergent_guest_protocol::{ConnectCall, GuestCall};
use emergent_wire::{ErrorCode, ErrorDetail};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::McpHost;
use super::front::{WAIT_FOR_START, refused};
use super::hosted::Hosted;

/// What is on its way in each direction.
const BUFFER_BYTES: usize = 64 * 1024;

impl McpHost {
    /// A connection to the server's port.
    pub(crate) async fn connect(&self, hosted: &Hosted) -> Result<DuplexStream, ErrorDetail> {
        hosted.bridge.ready(WAIT_FOR_START).await.map_err(|error| refused(&error))?;
        let lost =
            || ErrorDetail::new(ErrorCode::Unavailable, "the server is being started: try again in a moment");
        let connection = self.workspaces.context.live(hosted.id).connection().ok_or_else(lost)?;
        let port = hosted.config.port.unwrap_or_default();
        let connect = ConnectCall { port, wait_ms: 0, probe: false };
        let mut call = connection.channel.start(&GuestCall::Connect(connect)).await?;
        let input = call.input();
        let (near, far) = tokio::io::duplex(BUFFER_BYTES);
        let (mut reader, mut writer) = tokio::io::split(far);
        tokio::spawn(async move {
            let send = async {
                let mut buffer = vec![0; BUFFER_BYTES];
                while let Ok(length) = reader.read(&mut buffer).await {
                    if length == 0 || input.send(&buffer[..length]).await.is_err() {
                        break;
                    }
                }
                let _ = input.end().await;
            };
            let receive = async {
                while let Ok(Event::Stdout(bytes)) = call.next().await {
                    if writer.write_all(&bytes).await.is_err() {
                        break;
                    }
                }
                let _ = writer.shutdown().await;
            };
            // Whoever is done first: an HTTP server ends its side when it wants no more.
            tokio::join!(send, receive);
        });
        Ok(near)
    }
}
