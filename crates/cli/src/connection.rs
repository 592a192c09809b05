//! The URL of the server and the token of the client. Flags and environment variables come first, then the files that the
//! server writes to its data directory.

use std::ffi::OsStr;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use emergent_control_plane::config::default_data_dir;
use reqwest::Url;

/// The file with the server's URL.
pub(crate) const URL_FILE: &str = "server-url";
/// The file with the first admin token.
pub(crate) const TOKEN_FILE: &str = "admin-token";

/// The flags of every client command.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Server")]
pub(crate) struct ConnectionArgs {
    /// The server's URL, such as http://127.0.0.1:7171 [default: the one in DATA_DIR/server-url]
    #[arg(long, global = true, env = "EMERGENT_URL", hide_env_values = true, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// The access token. Other users can see flags: prefer the variable [default: the one in DATA_DIR/admin-token]
    #[arg(long, global = true, env = "EMERGENT_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub(crate) token: Option<String>,
    /// The data directory of the server on this machine
    #[arg(
        long,
        global = true,
        env = "EMERGENT_DATA_DIR",
        hide_env_values = true,
        value_name = "DIR",
        value_parser = path()
    )]
    pub(crate) data_dir: Option<PathBuf>,
    /// A PEM file with the certificate of the server, or of its authority, if this machine does not trust it
    #[arg(
        long,
        global = true,
        env = "EMERGENT_CA_CERT",
        hide_env_values = true,
        value_name = "FILE",
        value_parser = path()
    )]
    pub(crate) ca_cert: Option<PathBuf>,
    /// Print the server's JSON to stdout, for failures too
    #[arg(long, global = true, help_heading = None)]
    pub(crate) json: bool,
}

/// Parses a path. Unlike clap's parser it accepts an empty one, because an empty variable counts as not set.
fn path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// The value of a flag or variable, unless it is empty.
fn given<T: AsRef<OsStr> + Clone>(value: &Option<T>) -> Option<T> {
    value.clone().filter(|value| !value.as_ref().is_empty())
}

/// The server that calls are sent to.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its URL.
    pub(crate) url: Url,
    /// The token. It is never printed.
    pub(crate) token: String,
    /// The flag or file that the token is from, for messages.
    pub(crate) token_source: String,
    /// The file of an additional certificate to trust.
    pub(crate) ca_cert: Option<PathBuf>,
}

impl ConnectionArgs {
    /// The data directory: the given one, or the default.
    pub(crate) fn data_dir(&self) -> PathBuf {
        given(&self.data_dir).unwrap_or_else(default_data_dir)
    }

    /// Finds the server's URL and the token. The error names the next step.
    pub(crate) fn target(&self) -> Result<Target> {
        let directory = self.data_dir();
        let recorded = read_line(&directory.join(URL_FILE))?;
        let (url, url_is_given) = match (given(&self.url), &recorded) {
            (Some(url), _) => (parse_url(&url).context("--url (or EMERGENT_URL)")?, true),
            (None, Some(url)) => {
                (parse_url(url).with_context(|| directory.join(URL_FILE).display().to_string())?, false)
            }
            (None, None) => bail!(
                "no server is known: {} does not exist. Start the server with: emergent serve (or set EMERGENT_URL and \
                 EMERGENT_TOKEN to use a server on another machine)",
                directory.join(URL_FILE).display()
            ),
        };
        let (token, token_source) = match given(&self.token) {
            Some(token) => (token, "--token or EMERGENT_TOKEN".to_owned()),
            None => {
                let own = !url_is_given
                    || given(&self.data_dir).is_some()
                    || is_loopback(&url)
                    || recorded.is_some_and(|recorded| parse_url(&recorded).is_ok_and(|known| known == url));
                if !own {
                    bail!(
                        "{url} is not the server of this machine: set EMERGENT_TOKEN to a token of that server"
                    );
                }
                let path = directory.join(TOKEN_FILE);
                let token = read_line(&path)?.ok_or_else(|| {
                    anyhow!(
                        "no token is known: {} does not exist. Set EMERGENT_TOKEN, or give the server's --data-dir",
                        path.display()
                    )
                })?;
                (token, path.display().to_string())
            }
        };
        Ok(Target { url, token, token_source, ca_cert: given(&self.ca_cert) })
    }
}

/// The first line of a file. `None` if the file does not exist or the line is empty.
pub(crate) fn read_line(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let line = text.lines().next().unwrap_or_default().trim();
            Ok(Some(line.to_owned()).filter(|line| !line.is_empty()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Err(anyhow!(
            "{} belongs to another user: run this as the user of the server, or set EMERGENT_URL and EMERGENT_TOKEN",
            path.display()
        )),
        Err(error) => Err(error).with_context(|| format!("can't read {}", path.display())),
    }
}

fn parse_url(text: &str) -> Result<Url> {
    let url = Url::parse(text).map_err(|error| anyhow!("'{text}' is not a URL: {error}"))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        bail!("'{text}' is not an http:// or https:// URL");
    }
    Ok(url)
}

/// Whether the URL's host is this machine.
pub(crate) fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_directory(directory: &Path) -> ConnectionArgs {
        ConnectionArgs { data_dir: Some(directory.to_owned()), ..ConnectionArgs::default() }
    }

    fn error(args: &ConnectionArgs) -> String {
        format!("{:#}", args.target().err().unwrap())
    }

    #[test]
    fn url_and_token_are_read_from_the_data_directory_unless_given() {
        let directory = tempfile::tempdir().unwrap();
        let args = in_directory(directory.path());
        assert!(error(&args).contains("emergent serve"));
        std::fs::write(directory.path().join(URL_FILE), "http://127.0.0.1:7\n").unwrap();
        assert!(error(&args).contains("EMERGENT_TOKEN"));
        std::fs::write(directory.path().join(TOKEN_FILE), "secret\n").unwrap();
        let target = args.target().unwrap();
        assert_eq!((target.url.as_str(), target.token.as_str()), ("http://127.0.0.1:7/", "secret"));
        let given =
            ConnectionArgs { url: Some("https://[::1]:8/base".into()), token: Some("other".into()), ..args };
        let target = given.target().unwrap();
        assert_eq!((target.url.as_str(), target.token.as_str()), ("https://[::1]:8/base", "other"));
        assert!(is_loopback(&target.url));
    }

    #[test]
    fn admin_token_of_this_machine_is_not_sent_to_another_server() {
        let args = ConnectionArgs {
            url: Some("https://elsewhere.example".into()),
            token: Some(String::new()),
            data_dir: Some(PathBuf::new()),
            ..ConnectionArgs::default()
        };
        assert!(error(&args).contains("EMERGENT_TOKEN"), "{}", error(&args));
    }

    #[test]
    fn invalid_server_urls_are_refused() {
        let args = |url: &str| ConnectionArgs { url: Some(url.into()), ..ConnectionArgs::default() };
        assert!(error(&args("127.0.0.1:7171")).contains("127.0.0.1:7171"));
        assert!(error(&args("ftp://host")).contains("http://"));
    }
}
