//! `emergent doctor`: checks this machine, and names the fix of each problem. Needs no server.
//!
//! Independent checks run at the same time, each with its own time limit. The checks change nothing, except for one container
//! with the label `emergent.doctor`, which is removed in every case.

mod database;
mod docker;
mod firecracker;
mod gvisor;
mod host;
mod probe;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use emergent_control_plane::{Overrides, Settings};
use emergent_wire::WorkspaceId;
use tokio::signal::unix::{SignalKind, signal};

use self::report::Check;
use crate::progress;

/// The time limit of a check that reads files and runs programs.
const LOOK: Duration = Duration::from_secs(15);

/// Check this machine, and print the fix of each problem
///
/// Starts a gVisor container and removes it again. Needs no server. Exits with 1 when something that the server needs does
/// not work.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent doctor
  emergent doctor --json
  sudo emergent doctor                     with the permissions that the server needs for disks and networks")]
pub(crate) struct DoctorArgs {
    /// The server's data directory [env: EMERGENT_DATA_DIR]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// The server's configuration file [default: emergent.toml in the working directory, if there is one]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Runs all checks and prints their results.
pub(crate) async fn run(args: DoctorArgs) -> Result<u8> {
    let overrides = Overrides { data_dir: args.data_dir.clone(), ..Overrides::default() };
    let (settings, configuration) = match Settings::load(args.config.as_deref(), &overrides) {
        Ok(settings) => (settings, None),
        // The other checks run with the defaults.
        Err(error) => {
            let fix = "correct the file or the variable in the message";
            let mut settings = Settings::default();
            if let Some(data_dir) = args.data_dir {
                settings.data_dir = data_dir;
            }
            (settings, Some(Check::fail("configuration", error, fix)))
        }
    };
    let mut checks: Vec<Check> = configuration.into_iter().collect();
    let container = format!("emergent-doctor-{}", WorkspaceId::generate());
    let work = progress::during("checking this machine", all(&settings, &container));
    tokio::select! {
        found = work => checks.extend(found),
        code = interrupted()? => {
            docker::clean_up(&settings, &container).await;
            return Ok(code);
        }
    }
    report::print(&checks, args.json)?;
    Ok(report::exit_code(&checks))
}

/// Ends at SIGTERM or SIGINT, with the exit code for the signal.
fn interrupted() -> Result<impl Future<Output = u8>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => 143,
            _ = interrupt.recv() => 130,
        }
    })
}

async fn all(settings: &Settings, container: &str) -> Vec<Check> {
    let data_dir = settings.data_dir.clone();
    let on_this_host = {
        let data_dir = data_dir.clone();
        report::blocking("this host", LOOK, move || host::checks(&data_dir))
    };
    let nameservers = settings.providers.nameservers.clone();
    let (host, firewall, dns, engine, microvms, database, server) = tokio::join!(
        on_this_host,
        report::blocking("firewall", LOOK, || vec![host::firewall()]),
        report::blocking("DNS", LOOK, move || vec![host::name_servers(&nameservers)]),
        docker::checks(settings, container),
        report::within("microVMs", LOOK, firecracker::checks(settings)),
        database::check(settings),
        database::server(&data_dir),
    );
    [engine, microvms, host, firewall, dns, vec![database, server]].concat()
}
