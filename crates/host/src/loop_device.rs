//! Loop devices: files that the host uses as disks.
//!
//! A device is always looked up by its file. Its number is never stored, because after a restart of the host the number can
//! belong to another file.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::files::remove_if_there;
use crate::program::run;

/// The suffix that the kernel appends to the path of a file that was removed while it was attached.
const REMOVED_SUFFIX: &str = " (deleted)";

/// The access that a device gives to its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device can be written to.
    ReadWrite,
    /// The kernel refuses every write to the device.
    ReadOnly,
}

/// Attaches a file unless it is attached, and points the symbolic link `link` to its device.
pub fn attach(file: &Path, link: &Path, access: Access) -> io::Result<()> {
    let device = match attached_devices(file)?.pop() {
        Some(device) => device,
        None => {
            let mut arguments = vec![OsStr::new("--find"), OsStr::new("--show")];
            if access == Access::ReadOnly {
                arguments.push(OsStr::new("--read-only"));
            }
            arguments.push(file.as_os_str());
            PathBuf::from(run("losetup", &arguments)?.trim())
        }
    };
    if fs::read_link(link).is_ok_and(|target| target == device) {
        return Ok(());
    }
    let unfinished = unfinished(link);
    let _ = fs::remove_file(&unfinished);
    symlink(&device, &unfinished)?;
    fs::rename(&unfinished, link)
}

/// Removes a link to a device, finished or not.
pub fn remove_link(link: &Path) -> io::Result<()> {
    remove_if_there(&unfinished(link))?;
    remove_if_there(link)
}

/// A link gets its name only when it is complete.
fn unfinished(link: &Path) -> PathBuf {
    link.with_extension("newdev")
}

/// Whether a link points to a device of this file. Read from sysfs, which needs no program.
pub fn points_to(link: &Path, file: &Path) -> bool {
    let device = fs::read_link(link).ok();
    let backing = device.and_then(|device| backing_file(device.file_name()?).ok());
    backing.is_some_and(|backing| Path::new(&backing) == file)
}

/// The path of the file of a device, as the kernel shows it.
fn backing_file(device: &OsStr) -> io::Result<String> {
    let text = fs::read_to_string(Path::new("/sys/block").join(device).join("loop/backing_file"))?;
    Ok(text.trim_end_matches('\n').to_owned())
}

/// Detaches a file from all its devices. A file without a device counts as detached.
pub fn detach(file: &Path) -> io::Result<()> {
    for device in attached_devices(file)? {
        run("losetup", &[OsStr::new("--detach"), device.as_os_str()])?;
    }
    Ok(())
}

/// The loop devices of a file. They are found by the file's inode. The path that a device shows is valid only in the
/// container of the server that attached it.
pub fn attached_devices(file: &Path) -> io::Result<Vec<PathBuf>> {
    if !file.exists() {
        return devices_of_path(file);
    }
    let options = ["--noheadings", "--output", "NAME", "--associated"].map(OsStr::new);
    let found = run("losetup", &[&options[..], &[file.as_os_str()]].concat())?;
    Ok(found.lines().map(|line| PathBuf::from(line.trim())).collect())
}

/// The loop devices of a file that was removed.
fn devices_of_path(file: &Path) -> io::Result<Vec<PathBuf>> {
    let mut devices = Vec::new();
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.as_encoded_bytes().starts_with(b"loop") {
            continue;
        }
        let Ok(backing) = backing_file(&name) else {
            continue;
        };
        if Path::new(backing.trim_end_matches(REMOVED_SUFFIX)) == file {
            devices.push(Path::new("/dev").join(name));
        }
    }
    Ok(devices)
}
