//! Short ids: a prefix or suffix that only one id has. An id begins with the time of its creation, so ids of about the same
//! time have a long common prefix. The ends of ids are random.

use std::fmt::Display;

use anyhow::{Result, bail};

/// The minimum length. Fewer characters are more likely a mistake than an id.
const MIN_LENGTH: usize = 4;
/// The number of candidates that an error lists.
const SHOWN: usize = 10;

/// Refuses a text that can't be a part of an id. Callers use it before they ask the server.
pub(crate) fn check(given: &str) -> Result<()> {
    let digits = given.chars().filter(|c| *c != '-').count();
    if digits < MIN_LENGTH || !given.chars().all(|c| c.is_ascii_hexdigit() || c == '-') {
        bail!(
            "'{given}' is not an id: give a whole id, or at least {MIN_LENGTH} characters of its beginning or end"
        );
    }
    Ok(())
}

/// The only id that starts or ends with `given`. A candidate is an id and its description for the error message.
pub(crate) fn resolve<T: Display>(kind: &str, given: &str, candidates: Vec<(T, String)>) -> Result<T> {
    check(given)?;
    let plain = |text: &str| text.replace('-', "").to_ascii_lowercase();
    let wanted = plain(given);
    let mut found: Vec<(T, String)> = candidates
        .into_iter()
        .filter(|(id, _)| {
            let id = plain(&id.to_string());
            id.starts_with(&wanted) || id.ends_with(&wanted)
        })
        .collect();
    match found.len() {
        0 => bail!("no {kind} has an id that starts or ends with '{given}'"),
        1 => Ok(found.remove(0).0),
        count => {
            let mut lines: Vec<String> =
                found.iter().take(SHOWN).map(|(id, about)| format!("  {id}  {about}")).collect();
            if count > SHOWN {
                lines.push(format!("  … and {} more", count - SHOWN));
            }
            bail!(
                "'{given}' is the beginning or end of {count} ids: give more characters, preferably of the end:\n{}",
                lines.join("\n")
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: [&str; 3] = [
        "01990000-aaaa-7000-8000-00000000beef",
        "01990000-aaaa-7000-8000-0000dead0001",
        "01990001-bbbb-7000-8000-0000cafe0002",
    ];

    fn find(given: &str) -> Result<&'static str> {
        resolve("workspace", given, IDS.iter().map(|id| (*id, "ready".to_owned())).collect())
    }

    #[test]
    fn unique_prefix_or_suffix_resolves_to_its_id() {
        assert_eq!(find("01990001").unwrap(), IDS[2]);
        assert_eq!(find("BEEF").unwrap(), IDS[0]);
        assert_eq!(find("01990001-bb").unwrap(), IDS[2]);
        assert_eq!(find("8000-0000dead0001").unwrap(), IDS[1]);
        assert_eq!(find("80000000dead0001").unwrap(), IDS[1]);
        assert_eq!(find(IDS[0]).unwrap(), IDS[0]);
    }

    #[test]
    fn ambiguous_prefix_is_refused_with_the_matching_ids() {
        let error = find("01990000").unwrap_err().to_string();
        assert!(error.contains(IDS[0]) && error.contains(IDS[1]) && !error.contains(IDS[2]), "{error}");
    }

    #[test]
    fn unknown_and_too_short_ids_are_refused() {
        assert!(find("abcd").unwrap_err().to_string().contains("no workspace"));
        for given in ["", "bee", "be-f", "last", "----", "../../x"] {
            assert!(find(given).unwrap_err().to_string().contains("not an id"), "{given}");
        }
    }
}
