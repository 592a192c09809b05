//! Suggests similar names when a file is missing.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::fs::Dir;

use crate::location::Location;
use crate::text::edit_distance;

const MAX_SUGGESTIONS: usize = 3;
/// The names of a directory that are compared; more would take too long.
const MAX_NAMES: usize = 10_000;

/// The error for a missing file, with up to three similar names of the same directory.
pub(crate) fn not_found(location: &Location) -> ErrorDetail {
    let path = &location.path;
    let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
        return ErrorDetail::new(ErrorCode::FileNotFound, format!("File not found: {}", path.display()));
    };
    let Ok(directory) = location.open_parent().and_then(Dir::new) else {
        return ErrorDetail::new(
            ErrorCode::FileNotFound,
            format!(
                "File not found: {}. Its directory {} does not exist either; look for the file with glob.",
                path.display(),
                parent.display()
            ),
        );
    };
    let mut is_dangling = false;
    let mut similar: Vec<(u32, Vec<u8>)> = directory
        .flatten()
        .take(MAX_NAMES)
        .filter(|entry| {
            // The name exists and the file does not: a dangling link.
            let is_same = entry.file_name().to_bytes() == name.as_bytes();
            is_dangling |= is_same;
            !is_same
        })
        .filter_map(|entry| {
            let candidate = entry.file_name().to_bytes();
            let distance = distance(name.as_bytes(), candidate)?;
            Some((distance, candidate.to_vec()))
        })
        .collect();
    similar.sort();
    similar.truncate(MAX_SUGGESTIONS);
    let similar: Vec<String> =
        similar.iter().map(|(_, name)| parent.join(OsStr::from_bytes(name)).display().to_string()).collect();
    let hint = if is_dangling {
        "It is a link to something that does not exist; write makes the file that it points to.".to_owned()
    } else if similar.is_empty() {
        format!("List {} with read, or look for the file with glob.", parent.display())
    } else {
        format!("Did you mean one of these?\n{}", similar.join("\n"))
    };
    ErrorDetail::new(ErrorCode::FileNotFound, format!("File not found: {}. {hint}", path.display()))
        .with_details(serde_json::json!({ "similar": similar }))
}

/// The edit distance of two names; none when they have little in common.
fn distance(wanted: &[u8], candidate: &[u8]) -> Option<u32> {
    if candidate == b"." || candidate == b".." {
        return None;
    }
    let wanted = wanted.to_ascii_lowercase();
    let candidate = candidate.to_ascii_lowercase();
    let length = wanted.len().max(candidate.len());
    let edits = edit_distance(&wanted, &candidate);
    if edits * 3 <= length {
        return u32::try_from(edits).ok();
    }
    let (short, long) =
        if wanted.len() < candidate.len() { (&wanted, &candidate) } else { (&candidate, &wanted) };
    let stem = |name: &[u8]| memchr::memchr(b'.', name).unwrap_or(name.len());
    let contains = short.len() >= 3 && memchr::memmem::find(long, short).is_some();
    let same_stem = stem(&wanted) >= 3 && wanted[..stem(&wanted)] == candidate[..stem(&candidate)];
    (contains || same_stem).then(|| u32::try_from(100 + edits).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typing_mistakes_are_near_and_other_names_are_not() {
        assert_eq!(distance(b"main.rs", b"MAIN.rs"), Some(0));
        assert_eq!(distance(b"man.rs", b"main.rs"), Some(1));
        assert!(distance(b"main.js", b"main.test.js").is_some());
        assert!(distance(b"config.yml", b"config.toml").is_some());
        assert_eq!(distance(b"main.rs", b"README.md"), None);
        assert_eq!(distance(b"a", b".."), None);
    }
}
