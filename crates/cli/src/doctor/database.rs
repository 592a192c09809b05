//! Checks of the database and of the server that uses it. They change nothing: no schema is made, no lock is taken.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use emergent_control_plane::Settings;
use reqwest::Url;
use secrecy::ExposeSecret;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::report::Check;
use crate::client::calls;
use crate::connection::{URL_FILE, is_loopback, read_line};

const WHAT: &str = "database";
/// The SQLite file in the data directory.
const SQLITE_FILE: &str = "emergent.db";
/// The first bytes of every SQLite file.
const SQLITE_MAGIC: &[u8] = b"SQLite format 3\0";
/// The time limit for an answer over the network.
const ANSWER: Duration = Duration::from_secs(5);
/// PostgreSQL's SSLRequest. The server answers with one letter, before any authentication.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
const POSTGRES_PORT: u16 = 5432;

/// Checks the database that the settings name.
pub(super) async fn check(settings: &Settings) -> Check {
    match &settings.database_url {
        Some(url) => postgres(url.expose_secret()).await,
        None => sqlite(&settings.data_dir.join(SQLITE_FILE)),
    }
}

fn sqlite(path: &Path) -> Check {
    let shown = path.display();
    let start = match fs::File::open(path) {
        Ok(file) => {
            let mut start = Vec::new();
            let read = std::io::Read::read_to_end(&mut std::io::Read::take(file, 16), &mut start);
            read.map(|_| start)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Check::ok(WHAT, format!("SQLite; the first start creates {shown}"));
        }
        Err(error) => Err(error),
    };
    match start {
        Err(error) => Check::fail(
            WHAT,
            format!("{shown} can't be read: {error}"),
            "run as the user of the server, or choose another --data-dir",
        ),
        Ok(start) if !start.is_empty() && start != SQLITE_MAGIC => Check::fail(
            WHAT,
            format!("{shown} is not a SQLite file"),
            "restore it from a backup, or move it away to start with an empty database",
        ),
        Ok(_) => {
            let mut lock = path.as_os_str().to_owned();
            lock.push(".lock");
            let holder = lock_holder(Path::new(&lock));
            let used = holder
                .map_or("no server uses it now".to_owned(), |pid| format!("in use by the server, pid {pid}"));
            Check::ok(WHAT, format!("SQLite, {shown}; {used}"))
        }
    }
}

/// The process that holds an flock on the file, as the kernel lists it. Taking the lock to find out, even for a moment, could
/// make a server fail that starts at this moment.
fn lock_holder(path: &Path) -> Option<String> {
    let inode = fs::metadata(path).ok()?.ino();
    let locks = fs::read_to_string("/proc/locks").ok()?;
    find_flock(&locks, inode)?;
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|pid| !pid.is_empty())
}

/// The line of `/proc/locks` for an flock on this inode: `1: FLOCK  ADVISORY  WRITE 123 08:01:4567 0 EOF`.
fn find_flock(locks: &str, inode: u64) -> Option<&str> {
    locks.lines().find(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let file = words.iter().find(|word| word.matches(':').count() == 2);
        let same =
            file.and_then(|file| file.rsplit(':').next()).and_then(|text| text.parse().ok()) == Some(inode);
        words.contains(&"FLOCK") && same
    })
}

/// The address in a PostgreSQL URL.
#[derive(Debug, PartialEq, Eq)]
enum PostgresAddress {
    Tcp(String, u16),
    Socket(PathBuf),
}

fn postgres_address(url: &str) -> Option<PostgresAddress> {
    let url = Url::parse(url).ok().filter(|url| matches!(url.scheme(), "postgres" | "postgresql"))?;
    let parameter =
        |name: &str| url.query_pairs().find(|(key, _)| key == name).map(|(_, value)| value.into_owned());
    let host =
        parameter("host").or_else(|| url.host_str().map(|host| host.replace("%2F", "/").replace("%2f", "/")));
    let host = host.filter(|host| !host.is_empty()).unwrap_or_else(|| "localhost".to_owned());
    let port = parameter("port").and_then(|port| port.parse().ok()).or(url.port()).unwrap_or(POSTGRES_PORT);
    Some(if host.starts_with('/') {
        PostgresAddress::Socket(Path::new(&host).join(format!(".s.PGSQL.{port}")))
    } else {
        PostgresAddress::Tcp(host.trim_matches(['[', ']']).to_owned(), port)
    })
}

/// Checks that PostgreSQL answers. The URL has a password and is never printed.
async fn postgres(url: &str) -> Check {
    let Some(address) = postgres_address(url) else {
        return Check::fail(
            WHAT,
            "DATABASE_URL is not a postgres:// URL",
            "write postgres://USER:PASSWORD@HOST:PORT/DATABASE",
        );
    };
    let shown = match &address {
        PostgresAddress::Tcp(host, port) => format!("{host}:{port}"),
        PostgresAddress::Socket(path) => path.display().to_string(),
    };
    let answer = tokio::time::timeout(ANSWER, async {
        match address {
            PostgresAddress::Tcp(host, port) => {
                request_ssl(TcpStream::connect((host.as_str(), port)).await?).await
            }
            PostgresAddress::Socket(path) => request_ssl(UnixStream::connect(path).await?).await,
        }
    });
    let fix = "start PostgreSQL there, or correct DATABASE_URL (unset it to use SQLite)";
    match answer.await {
        Ok(Ok(b'S' | b'N')) => Check::ok(
            WHAT,
            format!("PostgreSQL answers at {shown} (`emergent serve` checks user and password)"),
        ),
        Ok(Ok(_)) => Check::fail(WHAT, format!("the server at {shown} is not PostgreSQL"), fix),
        Ok(Err(error)) => Check::fail(WHAT, format!("PostgreSQL does not answer at {shown}: {error}"), fix),
        Err(_) => Check::fail(
            WHAT,
            format!("PostgreSQL does not answer at {shown} within {} s", ANSWER.as_secs()),
            fix,
        ),
    }
}

/// Sends the SSLRequest and returns the answer.
async fn request_ssl(mut stream: impl AsyncReadExt + AsyncWriteExt + Unpin) -> std::io::Result<u8> {
    stream.write_all(&SSL_REQUEST).await?;
    stream.read_u8().await
}

/// Checks whether a server runs on this data directory.
pub(super) async fn server(data_dir: &Path) -> Check {
    const WHAT: &str = "server";
    let recorded = match read_line(&data_dir.join(URL_FILE)) {
        Ok(recorded) => recorded,
        Err(error) => return Check::warn(WHAT, error, "run the doctor as the user of the server"),
    };
    let Some(url) = recorded else {
        return Check::ok(WHAT, "no server runs here; start it with: emergent serve");
    };
    match is_ready(&url).await {
        Ok(true) => Check::ok(WHAT, format!("runs at {url}")),
        Ok(false) => Check::warn(WHAT, format!("{url} answers, but is not ready"), "look at its log"),
        Err(_) => Check::warn(
            WHAT,
            format!("no server answers at {url}, the address of the last one"),
            "start it with: emergent serve",
        ),
    }
}

/// Whether the server is ready. An error if its process does not answer.
async fn is_ready(url: &str) -> anyhow::Result<bool> {
    let base = Url::parse(url)?;
    // The requests carry no secret, so the certificate is not verified.
    let mut client = reqwest::Client::builder().timeout(ANSWER).tls_danger_accept_invalid_certs(true);
    if is_loopback(&base) {
        client = client.no_proxy();
    }
    let client = client.build()?;
    client.get(base.join(calls::LIVE)?).send().await?.error_for_status()?;
    let ready = client.get(base.join(calls::READY)?).send().await?;
    Ok(ready.status().is_success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn postgres_urls_name_a_host_or_a_socket() {
        let tcp = |host: &str, port| Some(PostgresAddress::Tcp(host.into(), port));
        assert_eq!(postgres_address("postgres://u:p@db.example/x"), tcp("db.example", 5432));
        assert_eq!(postgres_address("postgresql://u@[::1]:6000/x"), tcp("::1", 6000));
        assert_eq!(postgres_address("postgres:///x"), tcp("localhost", 5432));
        let socket = Some(PostgresAddress::Socket("/run/pg/.s.PGSQL.5433".into()));
        assert_eq!(postgres_address("postgres:///x?host=/run/pg&port=5433"), socket);
        assert_eq!(postgres_address("postgres://u@%2Frun%2Fpg:5433/x"), socket);
        assert_eq!(postgres_address("mysql://host/x"), None);
    }

    #[test]
    fn flock_is_found_by_its_inode_in_proc_locks() {
        let locks =
            "1: POSIX  ADVISORY  WRITE 12 08:01:77 0 EOF\n2: FLOCK  ADVISORY  WRITE 34 08:01:42 0 EOF\n";
        assert!(find_flock(locks, 42).is_some());
        assert!(find_flock(locks, 77).is_none());
        assert!(find_flock(locks, 4).is_none());
    }

    #[test]
    fn files_without_the_sqlite_header_fail_the_check() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(SQLITE_FILE);
        assert!(sqlite(&path).is_ok());
        fs::write(&path, "").unwrap();
        assert!(sqlite(&path).is_ok());
        fs::write(&path, [SQLITE_MAGIC, b"rest"].concat()).unwrap();
        assert!(sqlite(&path).is_ok());
        fs::write(&path, "something else entirely").unwrap();
        assert!(!sqlite(&path).is_ok());
    }

    #[tokio::test]
    async fn server_that_does_not_speak_postgres_fails_the_check_without_showing_the_password() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let url = format!("postgres://user:hunter2@127.0.0.1:{port}/x");
        let answer = async |byte: u8| {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 8];
            stream.read_exact(&mut request).await.unwrap();
            assert_eq!(request, SSL_REQUEST);
            stream.write_all(&[byte]).await.unwrap();
        };
        assert!(tokio::join!(postgres(&url), answer(b'N')).0.is_ok());
        let other = tokio::join!(postgres(&url), answer(b'H')).0;
        assert!(!other.is_ok());
        drop(listener);
        let refused = postgres(&url).await;
        assert!(!refused.is_ok() && !format!("{refused:?}{other:?}").contains("hunter2"));
    }
}
