//! Short ids. Ids sort by time, so those made about the same time begin alike; their ends are random. A piece from
//! either end will do if only one id has it.

use std::fmt::Display;

use anyhow::{Result, bail};

/// Fewer characters are more likely a mistake than an id.
const SHORTEST: usize = 4;
/// How many candidates an error lists.
const SHOWN: usize = 10;

/// Refuses what can't be a piece of an id, before any call is made.
pub(crate) fn check(given: &str) -> Result<()> {
    let digits = given.chars().filter(|c| *c != '-').count();
    if digits < SHORTEST || !given.chars().all(|c| c.is_ascii_hexdigit() || c == '-') {
        bail!(
            "'{given}' is not an id: give a whole id, or at least {SHORTEST} characters of its beginning or end"
        );
    }
    Ok(())
}

/// The one id that starts or ends with `given`. Each candidate comes with a text to tell it from others.
pub(crate) fn by_id<T: Display>(kind: &str, given: &str, candidates: Vec<(T, String)>) -> Result<T> {
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
                "'{given}' is the beginning or end of {count} ids; give more of it (the end is what differs):\n{}",
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

    fn pick(given: &str) -> Result<&'static str> {
        by_id("workspace", given, IDS.iter().map(|id| (*id, "ready".to_owned())).collect())
    }

    #[test]
    fn a_unique_beginning_or_end_is_enough() {
        assert_eq!(pick("01990001").unwrap(), IDS[2]);
        assert_eq!(pick("BEEF").unwrap(), IDS[0]);
        assert_eq!(pick("01990001-bb").unwrap(), IDS[2]);
        assert_eq!(pick("8000-0000dead0001").unwrap(), IDS[1]);
        assert_eq!(pick("80000000dead0001").unwrap(), IDS[1]);
        assert_eq!(pick(IDS[0]).unwrap(), IDS[0]);
    }

    #[test]
    fn what_fits_several_lists_them() {
        let error = pick("01990000").unwrap_err().to_string();
        assert!(error.contains(IDS[0]) && error.contains(IDS[1]) && !error.contains(IDS[2]), "{error}");
    }

    #[test]
    fn what_fits_none_or_is_too_short_is_refused() {
        assert!(pick("abcd").unwrap_err().to_string().contains("no workspace"));
        for given in ["", "bee", "be-f", "last", "----", "../../x"] {
            assert!(pick(given).unwrap_err().to_string().contains("not an id"), "{given}");
        }
    }
}
