//! Finds out, after a failed transfer, whether its remote answers. git itself asks (`ls-remote`), so its settings apply:
//! proxies, replaced URLs, certificates.

use emergent_wire::ErrorCode;

use super::run::{Git, Transfer};
use crate::reaper::Ended;

/// The transports whose answers git's trace shows. For ssh it shows none: its aliases, proxies and keys are its own.
const TRACED: [&str; 3] = ["http://", "https://", "git://"];
/// Makes git write the messages of HTTP and of its own protocol to standard error.
const TRACE: [(&str, &str); 3] =
    [("GIT_TRACE_CURL", "1"), ("GIT_TRACE_CURL_NO_DATA", "1"), ("GIT_TRACE_PACKET", "1")];

/// Whether the remote of a failed transfer does not answer as a git server: its name does not resolve, the connection fails or
/// breaks, or a server in front of it reports an error of its own. False when that can't be found out.
pub(super) fn does_not_answer(git: &Git, transfer: &Transfer<'_>) -> bool {
    let get_url: Vec<&str> = ["ls-remote", "--get-url"].into_iter().chain(transfer.remote).collect();
    let Some(url) = git.first_line(&get_url) else { return false };
    let push_url = || {
        let remote = transfer.remote.filter(|_| transfer.is_push)?;
        git.first_line(&["remote", "get-url", "--push", remote]).filter(|push_url| *push_url != url)
    };
    let push_url = push_url();
    if !TRACED.iter().any(|scheme| push_url.as_ref().unwrap_or(&url).starts_with(scheme)) {
        return false;
    }
    let mut ask = vec!["ls-remote", "--quiet"];
    // A remote has settings of its own, so it is asked by its name.
    ask.extend(push_url.as_deref().or(transfer.remote).into_iter().flat_map(|remote| [remote, "HEAD"]));
    match git.with_variables(TRACE).probe(&ask) {
        Ok((captured, Ended::Exited(status))) => {
            status != 0 && !is_refusal(&String::from_utf8_lossy(&captured.stderr))
        }
        Ok(_) => false,
        Err(error) => error.code == ErrorCode::DeadlineExceeded,
    }
}

/// Whether the remote has refused the request: its last HTTP status is an error of the client, or it has sent an ERR packet.
fn is_refusal(trace: &str) -> bool {
    /// The client shall repeat the request: it was too slow, or has sent too many.
    const TEMPORARY: [u16; 2] = [408, 429];
    let is_final = |status: u16| (400..500).contains(&status) && !TEMPORARY.contains(&status);
    let last_status = trace.lines().rev().find_map(|line| {
        let (_, status_line) = line.split_once(": HTTP/")?;
        status_line.split_ascii_whitespace().nth(1)?.parse().ok()
    });
    last_status.is_some_and(is_final) || trace.lines().any(|line| line.contains("< ERR "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_status_and_an_error_packet_are_refusals() {
        let status = |status: &str| {
            format!(
                "1:2 http.c:872    => Send header: GET /a.git/info/refs HTTP/1.1\n\
                 1:2 http.c:872    <= Recv header: HTTP/{status}\n\
                 1:2 http.c:872    <= Recv header: Server: x\n"
            )
        };
        for refused in ["1.1 404 Not Found", "2 403", "1.0 401 Unauthorized"] {
            assert!(is_refusal(&status(refused)), "{refused}");
        }
        for unclear in ["1.1 200 OK", "2 503", "1.1 429 Too Many Requests", "1.1"] {
            assert!(!is_refusal(&status(unclear)), "{unclear}");
        }
        let connected = status("1.1 200 Connection established");
        assert!(is_refusal(&format!("{connected}{}", status("2 404"))));
        assert!(!is_refusal(&format!("{}{}", status("1.1 404 Not Found"), status("1.1 502 Bad Gateway"))));
        assert!(is_refusal("1:2 pkt-line.c:80   packet:  ls-remote< ERR access denied\n"));
        assert!(!is_refusal("1:2 pkt-line.c:80   packet:  ls-remote< version 2\nfatal: early EOF\n"));
        assert!(!is_refusal(""));
    }
}
