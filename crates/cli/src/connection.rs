//! Which server the client talks to, and with which token: flags and environment, else the data directory, where
//! the server leaves both.

use std::ffi::OsStr;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use emergent_control_plane::config::default_data_dir;
use reqwest::Url;

/// The file with the server's address.
pub(crate) const URL_FILE: &str = "server-url";
/// The file with the first admin token.
pub(crate) const TOKEN_FILE: &str = "admin-token";

/// Flags that every client command takes.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Server")]
pub(crate) struct ConnectionArgs {
    /// The server's address, such as http://127.0.0.1:7171 [default: DATA_DIR/server-url]
    #[arg(long, global = true, env = "EMERGENT_URL", hide_env_values = true, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// The access token; other users can see flags, so prefer the variable [default: DATA_DIR/admin-token]
    #[arg(long, global = true, env = "EMERGENT_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub(crate) token: Option<String>,
    /// Where the server on this machine keeps its files
    #[arg(
        long,
        global = true,
        env = "EMERGENT_DATA_DIR",
        hide_env_values = true,
        value_name = "DIR",
        value_parser = path()
    )]
    pub(crate) data_dir: Option<PathBuf>,
    /// A PEM file with the certificate of a server (or its authority) that this machine does not know
    #[arg(
        long,
        global = true,
        env = "EMERGENT_CA_CERT",
        hide_env_values = true,
        value_name = "FILE",
        value_parser = path()
    )]
    pub(crate) ca_cert: Option<PathBuf>,
    /// Print the server's JSON; a failure's JSON goes to stdout as well
    #[arg(long, global = true, help_heading = None)]
    pub(crate) json: bool,
}

/// A path that may be empty: a variable that is set to nothing counts as not set.
fn path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// A flag or variable that says something.
fn given<T: AsRef<OsStr> + Clone>(value: &Option<T>) -> Option<T> {
    value.clone().filter(|value| !value.as_ref().is_empty())
}

/// Where to send calls.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// The server.
    pub(crate) url: Url,
    /// The token; never shown.
    pub(crate) token: String,
    /// Where the token came from, in words.
    pub(crate) token_source: String,
    /// An additional certificate to trust.
    pub(crate) ca_cert: Option<PathBuf>,
}

impl ConnectionArgs {
    /// The data directory, given or usual.
    pub(crate) fn data_dir(&self) -> PathBuf {
        given(&self.data_dir).unwrap_or_else(default_data_dir)
    }

    /// Finds server and token, or says what to do.
    pub(crate) fn target(&self) -> Result<Target> {
        let directory = self.data_dir();
        let recorded = read_line(&directory.join(URL_FILE))?;
        let (url, url_is_given) = match (given(&self.url), &recorded) {
            (Some(url), _) => (parse_url(&url).context("--url (or EMERGENT_URL)")?, true),
            (None, Some(url)) => {
                (parse_url(url).with_context(|| directory.join(URL_FILE).display().to_string())?, false)
            }
            (None, None) => bail!(
                "no server is known: there is no {}. Start the server with: emergent serve (or, for one that runs \
                 elsewhere, set EMERGENT_URL and EMERGENT_TOKEN)",
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
                    bail!("{url} is not this machine's server: set EMERGENT_TOKEN to a token of that server");
                }
                let path = directory.join(TOKEN_FILE);
                let token = read_line(&path)?.ok_or_else(|| {
                    anyhow!(
                        "no token is known: there is no {}. Set EMERGENT_TOKEN, or give the server's --data-dir",
                        path.display()
                    )
                })?;
                (token, path.display().to_string())
            }
        };
        Ok(Target { url, token, token_source, ca_cert: given(&self.ca_cert) })
    }
}

/// The first line of a file; none when there is no such file or nothing in it.
pub(crate) fn read_line(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let line = text.lines().next().unwrap_or_default().trim();
            Ok(Some(line.to_owned()).filter(|line| !line.is_empty()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Err(anyhow!(
            "{} belongs to another user: run this as the user who runs the server, or set EMERGENT_URL and EMERGENT_TOKEN",
            path.display()
        )),
        Err(error) => Err(error).with_context(|| format!("can't read {}", path.display())),
    }
}

fn parse_url(text: &str) -> Result<Url> {
    let url = Url::parse(text).map_err(|error| anyhow!("'{text}' is not an address: {error}"))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        bail!("'{text}' is not an http:// or https:// address");
    }
    Ok(url)
}

/// Whether the address is on this machine.
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
    fn both_are_found_in_the_data_directory() {
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

    /// The admin token of this machine must not be sent to whoever is named on the command line.
    #[test]
    fn a_token_is_only_sent_where_it_belongs() {
        let args = ConnectionArgs {
            url: Some("https://elsewhere.example".into()),
            token: Some(String::new()),
            data_dir: Some(PathBuf::new()),
            ..ConnectionArgs::default()
        };
        assert!(error(&args).contains("EMERGENT_TOKEN"), "{}", error(&args));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let args = |url: &str| ConnectionArgs { url: Some(url.into()), ..ConnectionArgs::default() };
        assert!(error(&args("127.0.0.1:7171")).contains("127.0.0.1:7171"));
        assert!(error(&args("ftp://host")).contains("http://"));
    }
}
