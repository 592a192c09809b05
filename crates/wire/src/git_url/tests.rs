use proptest::prelude::*;

use super::*;

fn code(text: &str) -> Option<ErrorCode> {
    GitUrl::parse(text).err().map(|error| error.code)
}

#[test]
fn urls_without_credentials_are_accepted_as_they_are() {
    for (text, transport, host) in [
        ("https://github.com/a/b.git", GitTransport::Https, "github.com"),
        ("HTTPS://GitHub.com/a/b", GitTransport::Https, "github.com"),
        ("http://127.0.0.1:8080/r", GitTransport::Http, "127.0.0.1"),
        ("https://[::1]:8443/r", GitTransport::Https, "[::1]"),
        ("https://host/@scope/r", GitTransport::Https, "host"),
        ("https://proxy.example/https://github.com/a/b", GitTransport::Https, "proxy.example"),
        ("https://host/a%20b/%C3%BC", GitTransport::Https, "host"),
        ("git://host/r", GitTransport::Git, "host"),
        ("ssh://host:22/r", GitTransport::Ssh, "host"),
        ("ssh://git@host/~user/r", GitTransport::Ssh, "host"),
        ("git@github.com:a/b.git", GitTransport::Ssh, "github.com"),
        ("git@[::1]:a/b", GitTransport::Ssh, "[::1]"),
        ("git@host:a@b", GitTransport::Ssh, "host"),
    ] {
        let url = GitUrl::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!((url.as_str(), url.transport(), url.host()), (text, transport, host));
        assert_eq!(url.to_string(), text);
    }
}

#[test]
fn credentials_are_unacceptable_and_never_repeated() {
    for text in [
        "https://hunter2@host/r",
        "https://@host/r",
        "https://x-access-token:hunter2@host/r",
        "http://:hunter2@host/r",
        "HTTPS://u:hunter2@host",
        "https:////u:hunter2@host/r",
        "https://u:hunter2@evil@host/r",
        "https://u:12345/hunter2@host/r",
        "https://host/r?access_token=hunter2",
        "https://host/r#hunter2",
        "https://host?hunter2",
        "https://proxy.example/https://u:hunter2@host/r",
        "ssh://git:hunter2@host/r",
        "ssh://git%3Ahunter2@host/r",
        "ssh://git%3ahunter2@host/r",
        "ssh://git@host/r?hunter2",
        "git://hunter2@host/r",
        "git:hunter2@host:r",
        "git:/hunter2@host:r",
        "git@host:r?hunter2",
        "git@host:r#hunter2",
    ] {
        let error = GitUrl::parse(text).expect_err(text);
        let expected =
            if text.starts_with("https:////") { ErrorCode::BadRequest } else { ErrorCode::Unacceptable };
        assert_eq!(error.code, expected, "{text}");
        assert!(!error.to_string().contains("hunter2"), "{error}");
        assert!(!GitUrl::without_credentials(text).contains("hunter2"), "{text}");
        assert!(!redact_urls(&format!("fatal: '{text}': no")).contains("hunter2"), "{text}");
    }
}

#[test]
fn malformed_text_and_other_schemes_are_bad_requests() {
    let long = format!("https://host/{}", "a".repeat(MAX_GIT_URL_BYTES));
    for text in [
        "",
        "-",
        "--upload-pack=touch",
        "host",
        "host:path",
        "a/b",
        "file:///etc",
        "ftp://host/r",
        "ext::sh",
        "ext::https://host/r",
        "git@ext::sh",
        "git@host:-x",
        "git@host:",
        "git@host/r",
        "git@-host:r",
        "a b@host:r",
        "ssh://-oProxyCommand/r",
        "ssh://a%20b@host/r",
        "https://",
        "https:///r",
        "https://ho st/r",
        "https://host/\nr",
        "https://host\\@other/r",
        "https://host/%0Aprotocol=x",
        "https://host:port/r",
        &long,
    ] {
        assert_eq!(code(text), Some(ErrorCode::BadRequest), "{text:?}");
    }
}

#[test]
fn credentials_are_removed_from_one_url() {
    for (text, expected) in [
        ("https://u:p@host/a?x=1#y", "https://host/a"),
        ("https://token@host:8443/a", "https://host:8443/a"),
        ("https://u:p/q?r#s@t@host/a", "https://host/a"),
        ("https://x-access-token:secret", "https://"),
        ("//u:p@host/a", "//host/a"),
        ("https:////u:p@host/a", "https:////host/a"),
        ("u:p@https://host/a", "https://host/a"),
        ("u:p@host:a", "host:a"),
        ("ssh://git@host/a?x", "ssh://git@host/a"),
        ("ssh://git:p@host/a", "ssh://host/a"),
        ("git@host:a?x", "git@host:a"),
        ("host/a?token=x", "host/a"),
        ("https://h/https://u:p@host/a", "https://h/https://host/a"),
    ] {
        assert_eq!(GitUrl::without_credentials(text), expected, "{text}");
    }
    for same in
        ["", "/a@b:c?d", "./x", "https://[::1]/a", "https://host/@scope/r", "git@host:a", "file:///a/b"]
    {
        assert!(matches!(GitUrl::without_credentials(same), Cow::Borrowed(text) if text == same), "{same}");
    }
}

#[test]
fn credentials_are_removed_from_every_url_in_a_text() {
    for (text, expected) in [
        (
            "fatal: unable to access 'https://u:p@host/a/': The requested URL returned error: 403",
            "fatal: unable to access 'https://host/a/': The requested URL returned error: 403",
        ),
        ("from https://t@a/b to\n\thttps://u:p@c/d?e.", "from https://a/b to\n\thttps://c/d."),
        ("https://a/b,https://u:p@c/d", "https://a/b,https://c/d"),
        ("[https://u:p@host] (ssh://git:p@host)", "[https://host] (ssh://host)"),
        ("cannot clone u:p@host:r: no", "cannot clone host:r: no"),
    ] {
        assert_eq!(redact_urls(text), expected);
    }
    for same in [
        "error: pathspec 'a@b' did not match",
        "see npm:left-pad@1.0.0, mail a@b.c",
        "Cloning into git@host:a/b …  https://host:80/r.",
    ] {
        assert!(matches!(redact_urls(same), Cow::Borrowed(_)), "{same}");
    }
}

/// Text in which pieces of URLs come together in any order.
fn pieces() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-z0-9]{0,6}",
        prop::sample::select(vec![
            "://", "https://", "ssh://", "@", ":", "/", "?", "#", "\\", "[", "]", " ", "'", "//", "%3a", ".",
            "ü", "\n",
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_text_is_handled_and_a_second_pass_changes_nothing(text in prop_oneof![pieces(), "\\PC{0,60}"]) {
        let once = GitUrl::without_credentials(&text).into_owned();
        prop_assert_eq!(GitUrl::without_credentials(&once), once.as_str());
        let redacted = redact_urls(&text).into_owned();
        prop_assert_eq!(redact_urls(&redacted), redacted.as_str());
        if let Ok(url) = GitUrl::parse(&text) {
            prop_assert_eq!(url.as_str(), text.as_str());
            prop_assert_eq!(once, text);
        }
    }

    #[test]
    fn a_password_never_remains(
        scheme in prop::sample::select(vec!["https://", "http://", "ssh://", "git+https://", "postgres://", "//", ""]),
        user in "[a-z0-9._-]{0,8}",
        before in "[a-z0-9:/?#@%'\"\\\\.()\\[\\]-]{0,8}",
        after in "[a-z0-9:/?#@%'\"\\\\.()\\[\\]-]{0,8}",
        host in "[a-z]{1,8}(\\.[a-z]{1,4})?(:[0-9]{1,5})?",
        path in "(/[a-z@._~-]{0,8}){0,3}",
    ) {
        let path = if scheme.is_empty() { format!(":{}", path.trim_start_matches('/')) } else { path };
        // Without a scheme and user it could be a path.
        let user = if scheme.is_empty() { format!("u{user}") } else { user };
        let text = format!("{scheme}{user}:{before}SECRET{after}@{host}{path}");
        prop_assert!(GitUrl::parse(&text).is_err(), "{text}");
        let url = GitUrl::without_credentials(&text);
        prop_assert!(!url.contains("SECRET"), "{text} -> {url}");
        if scheme != "//" {
            let sentence = format!("fatal: could not read '{text}': gone");
            let redacted = redact_urls(&sentence);
            prop_assert!(!redacted.contains("SECRET"), "{sentence} -> {redacted}");
            prop_assert!(redacted.ends_with(" gone"), "{redacted}");
        }
    }

    #[test]
    fn a_token_as_user_name_never_remains(token in "[A-Za-z0-9_]{8,40}", query in "(\\?[a-z=&]{0,8})?") {
        let text = format!("https://{token}@host/r{query}");
        prop_assert_eq!(GitUrl::without_credentials(&text), "https://host/r");
        let text = format!("https://host/r?private_token={token}");
        prop_assert_eq!(redact_urls(&text), "https://host/r");
    }
}
