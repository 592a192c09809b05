//! Files of the host.

use std::fs;
use std::io;
use std::path::Path;

/// Removes a file. One that is not there is removed.
pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
