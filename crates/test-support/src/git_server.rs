//! A real git server: `git http-backend` behind a small HTTP server.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, header};
use tokio::io::AsyncWriteExt;

use crate::command::run;

/// A server of one repository, `project.git`, with the branch `main`.
pub struct GitServer {
    directory: tempfile::TempDir,
    address: SocketAddr,
    serving: tokio::task::JoinHandle<()>,
}

struct Served {
    root: PathBuf,
    /// The required `Authorization` header, if any.
    credentials: Option<String>,
}

impl GitServer {
    /// Serves a public repository with one commit of these files.
    pub fn start(listener: TcpListener, files: &[(&str, &str)]) -> Self {
        Self::serve(listener, files, None)
    }

    /// Serves a private repository. No caller knows its credentials.
    pub fn start_private(listener: TcpListener, files: &[(&str, &str)]) -> Self {
        Self::serve(listener, files, Some("Basic nobody-knows".to_owned()))
    }

    fn serve(listener: TcpListener, files: &[(&str, &str)], credentials: Option<String>) -> Self {
        let directory = tempfile::Builder::new().prefix("emergent-git-").tempdir();
        let directory = directory.expect("a directory can be made");
        let (work, bare) = (directory.path().join("work"), directory.path().join("project.git"));
        git(directory.path(), &["init", "--quiet", "--initial-branch=main", "work"]);
        for (name, content) in files {
            let path = work.join(name);
            let parent = path.parent().expect("the path is below the directory");
            std::fs::create_dir_all(parent).expect("a directory can be made");
            std::fs::write(path, content).expect("a file can be written");
        }
        git(&work, &["add", "--all"]);
        git(&work, &["commit", "--quiet", "--message=First"]);
        git(directory.path(), &["clone", "--quiet", "--bare", "work", "project.git"]);
        git(&bare, &["config", "http.receivepack", "true"]);
        listener.set_nonblocking(true).expect("the socket can be changed");
        let address = listener.local_addr().expect("the listener has an address");
        let listener = tokio::net::TcpListener::from_std(listener).expect("a runtime runs");
        let served = Arc::new(Served { root: directory.path().to_owned(), credentials });
        let app = Router::new().fallback(answer).with_state(served);
        let serving = tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        });
        Self { directory, address, serving }
    }

    /// The repository's URL.
    pub fn url(&self) -> String {
        format!("http://{}/project.git", self.address)
    }

    /// Runs git in the repository, and returns its output.
    pub fn git(&self, arguments: &[&str]) -> String {
        git(&self.directory.path().join("project.git"), arguments)
    }
}

impl Drop for GitServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn git(directory: &Path, arguments: &[&str]) -> String {
    let directory = directory.to_string_lossy();
    let identity = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.com"];
    let all: Vec<&str> =
        ["-C", &*directory].into_iter().chain(identity).chain(arguments.iter().copied()).collect();
    run("git", &all)
}

/// Passes a request to git by CGI.
async fn answer(State(served): State<Arc<Served>>, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    if let Some(wanted) = &served.credentials
        && text(&head.headers, header::AUTHORIZATION) != *wanted
    {
        let response = Response::builder().status(StatusCode::UNAUTHORIZED);
        return response
            .header(header::WWW_AUTHENTICATE, "Basic realm=\"git\"")
            .body(Body::empty())
            .expect("the response is valid");
    }
    let body = axum::body::to_bytes(body, 64 << 20).await.unwrap_or_default();
    match backend(&served.root, &head.method, &head.uri, &head.headers, &body).await {
        Some(response) => response,
        None => {
            let response = Response::builder().status(StatusCode::INTERNAL_SERVER_ERROR);
            response.body(Body::from("git http-backend failed")).expect("the response is valid")
        }
    }
}

async fn backend(
    root: &Path,
    method: &Method,
    uri: &axum::http::Uri,
    headers: &HeaderMap,
    body: &Bytes,
) -> Option<Response<Body>> {
    let mut child = tokio::process::Command::new("git")
        .arg("http-backend")
        .env("GIT_PROJECT_ROOT", root)
        .env("GIT_HTTP_EXPORT_ALL", "1")
        .env("GIT_CONFIG_COUNT", "1")
        .env("GIT_CONFIG_KEY_0", "safe.directory")
        .env("GIT_CONFIG_VALUE_0", "*")
        .env("GIT_PROTOCOL", text(headers, "git-protocol"))
        .env("REQUEST_METHOD", method.as_str())
        .env("PATH_INFO", uri.path())
        .env("QUERY_STRING", uri.query().unwrap_or_default())
        .env("CONTENT_TYPE", text(headers, header::CONTENT_TYPE))
        .env("CONTENT_LENGTH", body.len().to_string())
        .env("HTTP_CONTENT_ENCODING", text(headers, header::CONTENT_ENCODING))
        .env("REMOTE_ADDR", "203.0.113.1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .ok()?;
    let mut stdin = child.stdin.take()?;
    let sending = async {
        let _ = stdin.write_all(body).await;
        drop(stdin);
    };
    let ((), output) = tokio::join!(sending, child.wait_with_output());
    let output = output.ok()?.stdout;
    let end = output.windows(4).position(|window| window == b"\r\n\r\n")?;
    let mut response = Response::builder();
    for line in std::str::from_utf8(&output[..end]).ok()?.lines() {
        let (name, value) = line.split_once(": ")?;
        response = match name {
            "Status" => response.status(value.split(' ').next()?.parse::<u16>().ok()?),
            _ => response.header(name, value),
        };
    }
    response.body(Body::from(output[end + 4..].to_vec())).ok()
}

fn text(headers: &HeaderMap, name: impl header::AsHeaderName) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}
