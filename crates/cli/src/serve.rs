//! `emergent serve`: loads the settings, sets up logging and signals, and runs the server of `emergent-control-plane`.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::exit;

use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use emergent_control_plane::config::{LogFormat, LogSettings, default_data_dir};
use emergent_control_plane::{Existing, Overrides, Running, Settings};
use emergent_otlp::OtlpExport;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tracing::Subscriber;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, registry};

use crate::client::calls;
use crate::connection::TOKEN_FILE;
use crate::output;
use crate::values::shell_word;

/// The name of the server in exported traces.
const SERVICE: &str = "emergent";

/// Start the server
///
/// The server keeps its files in the data directory and listens on 127.0.0.1:7171 by default. It prints `listening on URL` when
/// it takes requests. At Ctrl-C or SIGTERM it finishes running calls and exits; a second signal ends it at once. Workspaces
/// outlive the server: it finds them again when it starts.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  emergent serve
  emergent serve --listen 127.0.0.1:0 --data-dir /tmp/try      on a free port, with another data directory
  EMERGENT_LOG=debug EMERGENT_LOG_FORMAT=json emergent serve
  DATABASE_URL=postgres://user:password@host/database emergent serve

A flag overrides its environment variable, which overrides the configuration file, which overrides the default.")]
pub(crate) struct ServeArgs {
    /// The address to listen on; port 0 takes a free port [env: EMERGENT_LISTEN] [default: 127.0.0.1:7171]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// The data directory [env: EMERGENT_DATA_DIR]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// The configuration file [default: emergent.toml in the working directory, if there is one]
    #[arg(long, value_name = "FILE", env = "EMERGENT_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
    /// Allow workspaces in plain containers (`--provider docker`), which share the host's kernel
    #[arg(long)]
    allow_docker: bool,
    /// Move the disks of an installation whose database is lost to quarantine (see `emergent quarantine`)
    #[arg(long, conflicts_with = "discard_existing")]
    adopt: bool,
    /// Move the files of another installation aside and start a new one; nothing is removed
    #[arg(long)]
    discard_existing: bool,
    /// Replace a lost encryption key. The variables of workspaces and MCP servers, which were sealed with it, are removed
    #[arg(long)]
    new_key: bool,
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn run(args: &ServeArgs) -> Result<u8> {
    let overrides = Overrides {
        listen: args.listen,
        data_dir: args.data_dir.clone(),
        allow_docker: args.allow_docker,
        existing: match (args.adopt, args.discard_existing) {
            (true, _) => Existing::Adopt,
            (false, true) => Existing::Discard,
            (false, false) => Existing::Refuse,
        },
        new_key: args.new_key,
    };
    let settings = Settings::load(args.config.as_deref(), &overrides)?;
    // Before the runtime begins: the HTTP client of the export has a runtime of its own.
    let traces = match &settings.log.otlp_endpoint {
        Some(endpoint) => Some(OtlpExport::start(endpoint, SERVICE, env!("CARGO_PKG_VERSION"))?),
        None => None,
    };
    start_logging(&settings.log, traces.as_ref())?;
    let certificate = settings.tls.certificate.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("can't start the runtime")?;
    let result = runtime.block_on(async {
        let stopped = stop_signal()?;
        let on_ready = |running: &Running| {
            if let Some(traces) = &traces {
                traces.set_installation(running.installation.to_string());
            }
            let text = greeting(running, certificate.as_deref());
            // A closed stdout does not end the server.
            let mut stdout = io::stdout().lock();
            let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        };
        // The text of a `ServeError` includes its causes.
        emergent_control_plane::serve(settings, stopped, on_ready)
            .await
            .map_err(|error| anyhow!("{error}"))?;
        Ok(0)
    });
    // The runtime still runs, so a second signal ends the process at once.
    if let Some(traces) = &traces {
        traces.shut_down();
    }
    result
}

/// Sets up the log, and the export of spans if there is one.
pub(crate) fn start_logging(log: &LogSettings, traces: Option<&OtlpExport>) -> Result<()> {
    // The MCP library rmcp logs whole requests, so its lines below `warn` are off unless the filter names it.
    let quiet = if log.filter.contains("rmcp") { "" } else { ",rmcp=warn" };
    let filter = EnvFilter::try_new(format!("{}{quiet}", log.filter)).map_err(|error| {
        anyhow!("the log filter '{}' (EMERGENT_LOG, log.filter) is not valid: {error}", log.filter)
    })?;
    let lines = fmt::layer().with_writer(io::stderr).with_ansi(output::stderr_is_terminal());
    let started = match log.format {
        LogFormat::Text => start_subscriber(lines, filter, traces),
        LogFormat::Json => start_subscriber(lines.json(), filter, traces),
    };
    started.map_err(|error| anyhow!("can't set up logging: {error}"))
}

fn start_subscriber(
    lines: impl Layer<Registry> + Send + Sync,
    filter: EnvFilter,
    traces: Option<&OtlpExport>,
) -> Result<(), TryInitError> {
    match traces {
        None => without_traces(lines, filter).try_init(),
        // The filter is for lines. Spans are exported whether lines show them or not.
        Some(traces) => registry().with(lines.with_filter(filter)).with(traces.layer()).try_init(),
    }
}

/// The filter is outermost, so that spans and events that no line needs are off.
fn without_traces(lines: impl Layer<Registry> + Send + Sync, filter: EnvFilter) -> impl Subscriber {
    registry().with(lines.and_then(filter))
}

/// A future that is ready at the first SIGTERM or SIGINT. The second signal ends the process at once.
pub(crate) fn stop_signal() -> Result<impl Future<Output = ()> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate()).context("can't handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("can't handle SIGINT")?;
    let (stop, stopped) = oneshot::channel();
    tokio::spawn(async move {
        let mut stop = Some(stop);
        loop {
            let code = tokio::select! {
                _ = terminate.recv() => 143,
                _ = interrupt.recv() => 130,
            };
            match stop.take() {
                Some(stop) => {
                    let _ = stop.send(());
                }
                None => exit(code),
            }
        }
    });
    Ok(async {
        let _ = stopped.await;
    })
}

/// The first output of the server: its URL, and three commands to try.
fn greeting(running: &Running, certificate: Option<&Path>) -> String {
    let url = &running.url;
    let (mut workspace, mut curl) = (format!("{} workspace", this_program()), "curl".to_owned());
    if running.data_dir != default_data_dir() {
        let data_dir = shell_word(&running.data_dir.to_string_lossy());
        workspace.push_str(&format!(" --data-dir {data_dir}"));
    }
    if let Some(certificate) = certificate {
        let certificate = shell_word(&certificate.to_string_lossy());
        workspace.push_str(&format!(" --ca-cert {certificate}"));
        curl.push_str(&format!(" --cacert {certificate}"));
    }
    let token_file = running.data_dir.join(TOKEN_FILE);
    let token = shell_word(&token_file.to_string_lossy());
    let first = if running.first_start {
        format!("The first start created an admin token. `emergent` reads it from {token}.\n")
    } else if token_file.exists() {
        String::new()
    } else {
        format!(
            "{token} has no admin token: set EMERGENT_TOKEN to a token that you have, or create a new one with \
             `touch {token}` and a restart.\n"
        )
    };
    format!(
        "listening on {url}\n\n\
         {first}Try it in another terminal:\n  \
         id=$({workspace} create -q)\n  \
         {workspace} bash \"$id\" -- 'uname -a'\n  \
         {curl} -H \"Authorization: Bearer $(cat {token})\" {url}{}\n",
        calls::PROVIDERS
    )
}

/// The shell word that runs this program: its name if PATH finds it, else its path.
fn this_program() -> String {
    let Ok(path) = std::env::current_exe() else {
        return "emergent".to_owned();
    };
    let found = std::env::var_os("PATH").and_then(|directories| {
        let candidates = std::env::split_paths(&directories).map(|directory| directory.join("emergent"));
        candidates.into_iter().find(|candidate| candidate.is_file())
    });
    if found.and_then(|found| found.canonicalize().ok()) == path.canonicalize().ok() {
        return "emergent".to_owned();
    }
    shell_word(&path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use emergent_wire::id::InstallationId;
    use tracing::level_filters::LevelFilter;

    use super::*;

    #[test]
    fn without_an_export_the_filter_turns_off_what_it_hides() {
        let subscriber = without_traces(fmt::layer(), EnvFilter::new("warn,emergent_providers=info"));
        assert_eq!(subscriber.max_level_hint(), Some(LevelFilter::INFO));
    }

    #[test]
    fn commands_of_the_greeting_are_valid_shell_for_this_server() {
        let running = Running {
            url: "https://127.0.0.1:7".to_owned(),
            data_dir: PathBuf::from("/tmp/with space"),
            first_start: true,
            installation: InstallationId::generate(),
        };
        let text = greeting(&running, Some(Path::new("cert.pem")));
        assert!(text.starts_with("listening on https://127.0.0.1:7\n"), "{text}");
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("  ")).collect();
        assert_eq!(lines.len(), 3);
        assert!(
            lines[0].ends_with(" workspace --data-dir '/tmp/with space' --ca-cert cert.pem create -q)"),
            "{text}"
        );
        assert!(
            lines[2].contains("--cacert cert.pem")
                && lines[2].contains("$(cat '/tmp/with space/admin-token')")
        );
        for line in lines {
            let checked = std::process::Command::new("sh").args(["-n", "-c", line]).status().unwrap();
            assert!(checked.success(), "{line}");
        }
        let usual = Running { data_dir: default_data_dir(), first_start: false, ..running };
        let text = greeting(&usual, None);
        assert!(!text.contains("--data-dir"), "{text}");
        let elsewhere = Running { data_dir: PathBuf::from("/nonexistent"), ..usual };
        assert!(greeting(&elsewhere, None).contains("`touch /nonexistent/admin-token`"));
    }
}
