//! Connections to servers that speak HTTP themselves. A connection goes through the sandbox's channel, so the server's port is
//! reachable only from this process.

use emergent_guest_client::TunnelConnection;
use emergent_guest_protocol::{ConnectCall, GuestCall};

use super::McpHost;
use super::call::WAIT_FOR_START;
use super::error::{McpError, Result};
use super::hosted::HostedServer;

impl McpHost {
    /// Opens a connection to a port in the server's sandbox. Dropping it closes the connection there, too.
    pub(crate) async fn connect(&self, server: &HostedServer, port: u16) -> Result<TunnelConnection> {
        server.bridge.ready(WAIT_FOR_START).await.map_err(McpError::NotSent)?;
        let connection = self.workspaces.context.live(server.id).connection().ok_or(McpError::Starting)?;
        let connect = ConnectCall { port, wait_ms: 0, probe: false };
        Ok(TunnelConnection::new(connection.channel.start(&GuestCall::Connect(connect)).await?))
    }
}
