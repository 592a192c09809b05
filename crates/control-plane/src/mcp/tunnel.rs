//! Connections to servers that speak HTTP themselves. A connection goes through the sandbox's channel, so the server's port is
//! reachable only from this process.

use emergent_guest_client::Event;
use emergent_guest_protocol::{ConnectCall, GuestCall};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tracing::Instrument as _;

use super::McpHost;
use super::call::WAIT_FOR_START;
use super::error::{McpError, Result};
use super::hosted::HostedServer;

/// The bytes that each direction buffers.
const BUFFER_BYTES: usize = 64 * 1024;

impl McpHost {
    /// Opens a connection to a port in the server's sandbox.
    pub(crate) async fn connect(&self, server: &HostedServer, port: u16) -> Result<DuplexStream> {
        server.bridge.ready(WAIT_FOR_START).await.map_err(McpError::NotSent)?;
        let connection = self.workspaces.context.live(server.id).connection().ok_or(McpError::Starting)?;
        let connect = ConnectCall { port, wait_ms: 0, probe: false };
        let mut call = connection.channel.start(&GuestCall::Connect(connect)).await?;
        let input = call.input();
        let (near, far) = tokio::io::duplex(BUFFER_BYTES);
        let (mut reader, mut writer) = tokio::io::split(far);
        let copy = async move {
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
            // Each direction ends by itself: an HTTP server may close its side first.
            tokio::join!(send, receive);
        };
        tokio::spawn(copy.in_current_span());
        Ok(near)
    }
}
