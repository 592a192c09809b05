//! `emergent firecracker-manager`: the service that runs microVMs on a host with KVM.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use emergent_control_plane::{ManagerAddress, Overrides, Settings};

use crate::serve::{start_logging, stop_signal};
use crate::values::shell_word;

/// The default data directory.
const DATA_DIR: &str = "/var/lib/emergent/firecracker";

/// Run the service that manages Firecracker microVMs on this host
///
/// Each host with KVM runs one manager, and servers on this or other hosts request microVMs from it. A single host needs only
/// `emergent serve`: a server without FIRECRACKER_MANAGER_URL runs a manager itself. MicroVMs outlive the manager: the next
/// one finds them when it starts. Needs root.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent firecracker-manager                           listens on a socket in its data directory
  FIRECRACKER_MANAGER_URL=unix:/var/lib/emergent/firecracker/manager.sock emergent serve
  EMERGENT_TLS_CERTIFICATE=cert.pem EMERGENT_TLS_KEY=key.pem \\
    emergent firecracker-manager --listen 0.0.0.0:7172   for servers on other hosts, which need
                                                         FIRECRACKER_MANAGER_URL and _TOKEN
  FIRECRACKER_MAX_VMS=200 emergent firecracker-manager

Servers need the manager's token. It is in the file manager-token of the data directory, unless FIRECRACKER_MANAGER_TOKEN \
sets it for both. `emergent firecracker install` installs Firecracker, its jailer and a kernel.")]
pub(crate) struct ManagerArgs {
    /// Listen on this address instead of a socket. An address that other hosts reach needs TLS
    #[arg(long, value_name = "ADDR:PORT", env = "FIRECRACKER_MANAGER_LISTEN", hide_env_values = true)]
    listen: Option<SocketAddr>,
    /// Listen on this socket [default: manager.sock in the data directory]
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    socket: Option<PathBuf>,
    /// The data directory, with disks, images and records
    #[arg(
        long,
        value_name = "DIR",
        env = "FIRECRACKER_MANAGER_DATA_DIR",
        hide_env_values = true,
        default_value = DATA_DIR
    )]
    data_dir: PathBuf,
    /// The configuration file [default: emergent.toml in the working directory, if there is one]
    #[arg(long, value_name = "FILE", env = "EMERGENT_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
}

/// Runs the manager until SIGTERM or SIGINT.
pub(crate) fn run(args: &ManagerArgs) -> Result<u8> {
    let settings = Settings::load(args.config.as_deref(), &Overrides::default())?;
    start_logging(&settings.log, None)?;
    let address = match (args.listen, &args.socket) {
        (Some(listen), _) => ManagerAddress::Tcp(listen),
        (None, Some(socket)) => ManagerAddress::Socket(socket.clone()),
        (None, None) => ManagerAddress::OwnSocket,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("can't start the runtime")?;
    let result = runtime.block_on(async {
        let stopped = stop_signal()?;
        let on_ready = |url: &str, token: &Path| {
            let token = shell_word(&token.to_string_lossy());
            let text = format!(
                "listening on {url}\n\nStart a server that uses it with:\n  \
                 FIRECRACKER_MANAGER_URL={url} FIRECRACKER_MANAGER_TOKEN=$(cat {token}) emergent serve\n"
            );
            // A closed stdout does not end the manager.
            let mut stdout = io::stdout().lock();
            let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        };
        emergent_control_plane::serve_manager(
            &args.data_dir,
            address,
            &settings.firecracker,
            &settings.tls,
            stopped,
            on_ready,
        )
        .await
        .map_err(|error| anyhow!("{error}"))?;
        Ok(0)
    });
    // A task may wait for long, such as for the lock of the firewall. The next manager does its work.
    runtime.shutdown_background();
    result
}
