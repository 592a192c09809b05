//! The guest agent's binaries as a read-only file system that all containers of an installation share.
//!
//! On gVisor a read-only mount is only a flag inside the sandbox. A guest can clear it from a user namespace of its own, and
//! `O_TRUNC` reaches the host even with the flag. So the host must refuse writes. The binaries are in an image file behind a
//! read-only loop device, which the engine mounts read-only. No process of a sandbox, gVisor included, can write to it.
//!
//! The image is a function of the embedded binaries, byte for byte. It is built at each start and compared with the existing
//! one, and its hash is checked before each container. The names of the link and the volume hold the inode, so a container
//! never gets a mount of a file that was replaced.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use emergent_guest_binary::FILES;
use emergent_host::files::{create_temporary, ensure_private_directory, remove_if_there, write_atomically};
use emergent_host::loop_device::{self, Access};
use emergent_host::program::{command, failure};
use emergent_wire::id::InstallationId;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::file_lock::lock_within;

/// Space for the file system's own blocks.
const METADATA_BYTES: u64 = 1 << 20;
/// The time limit for the directory's lock. Making an image takes a few seconds.
const LOCK_TIME: Duration = Duration::from_secs(60);
/// A fixed UUID, so that the image is the same at each start.
const IMAGE_UUID: &str = "e3e26e47-0000-4000-8000-000000000001";
/// All times in the image, in seconds since 1970.
const IMAGE_TIME: &str = "1";

/// The image of one installation.
#[derive(Debug)]
pub(crate) struct GuestImage {
    directory: PathBuf,
    installation: InstallationId,
    current: Mutex<Arc<Image>>,
}

/// An image file.
#[derive(Debug)]
struct Image {
    file: PathBuf,
    sha256: String,
    inode: u64,
}

/// The engine's volume of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestVolume {
    pub(crate) name: String,
    /// A link to the device.
    pub(crate) device: PathBuf,
}

impl GuestImage {
    /// Builds the image in a private directory, unless an intact one exists.
    pub(crate) fn install(directory: &Path, installation: InstallationId) -> io::Result<Self> {
        ensure_private_directory(directory)?;
        let directory = directory.canonicalize()?;
        let image = Image::install(&directory)?;
        Ok(Self { directory, installation, current: Mutex::new(Arc::new(image)) })
    }

    fn current(&self) -> Arc<Image> {
        Arc::clone(&self.current.lock())
    }

    /// Checks the image's hash, replaces an altered image, attaches it, and returns its volume.
    pub(crate) fn volume(&self) -> io::Result<GuestVolume> {
        let mut image = self.current();
        if !image.is_intact() {
            tracing::error!(
                image = %image.file.display(),
                "the image with the guest agent was altered on the host and is made again; restart the sandboxes that run, \
                 and find out who can write to the data directory"
            );
            image = Arc::new(Image::install(&self.directory)?);
            *self.current.lock() = Arc::clone(&image);
        }
        let volume = self.volume_of(&image);
        if !loop_device::points_to(&volume.device, &image.file) {
            // Without the lock, two concurrent creates would attach the image twice.
            let _lock = lock(&self.directory)?;
            loop_device::attach(&image.file, &volume.device, Access::ReadOnly)?;
        }
        Ok(volume)
    }

    fn volume_of(&self, image: &Image) -> GuestVolume {
        let installation = self.installation.0.simple().to_string();
        let own = &installation[installation.len() - 10..];
        let short = &image.sha256[..12];
        GuestVolume {
            name: format!("emergent-guest-{own}-{short}-{}", image.inode),
            device: self.directory.join(format!("{short}-{}.dev", image.inode)),
        }
    }

    /// The volume of the current image, attached or not.
    pub(crate) fn current_volume(&self) -> GuestVolume {
        self.volume_of(&self.current())
    }

    /// The volumes of all images but the current one.
    pub(crate) fn older_volumes(&self) -> io::Result<Vec<(GuestVolume, PathBuf)>> {
        let current = self.current();
        let mut older = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let file = entry?.path();
            let Some(sha256) = image_hash(&file).filter(|_| file != current.file) else {
                continue;
            };
            let image = Image { sha256: sha256.to_owned(), inode: fs::metadata(&file)?.ino(), file };
            older.push((self.volume_of(&image), image.file));
        }
        Ok(older)
    }

    /// Detaches the current image. No container may use it.
    pub(crate) fn detach(&self) -> io::Result<()> {
        let image = self.current();
        let _lock = lock(&self.directory)?;
        loop_device::detach(&image.file)?;
        remove_if_there(&self.volume_of(&image).device)
    }

    /// Removes an older image. No container may use it.
    pub(crate) fn remove(volume: &GuestVolume, file: &Path) -> io::Result<()> {
        loop_device::detach(file)?;
        remove_if_there(&volume.device)?;
        remove_if_there(file)
    }
}

impl Image {
    /// The image of the embedded binaries: the existing one if it is intact, else a new one.
    fn install(directory: &Path) -> io::Result<Self> {
        let _lock = lock(directory)?;
        let (made, sha256) = make(directory)?;
        let file = directory.join(format!("{sha256}.img"));
        let kept = hash_of(&file).is_ok_and(|found| found == sha256);
        let placed = if kept { fs::remove_file(&made) } else { fs::rename(&made, &file) };
        if placed.is_err() {
            let _ = fs::remove_file(&made);
        }
        placed?;
        Ok(Self { inode: fs::metadata(&file)?.ino(), file, sha256 })
    }

    /// Whether the file is the same inode with the same bytes.
    fn is_intact(&self) -> bool {
        fs::symlink_metadata(&self.file).is_ok_and(|found| found.is_file() && found.ino() == self.inode)
            && hash_of(&self.file).is_ok_and(|found| found == self.sha256)
    }
}

/// Locks the directory until the file is dropped. Concurrent creates, and servers on one database, share the directory.
fn lock(directory: &Path) -> io::Result<File> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(directory.join("lock"))?;
    lock_within(&file, LOCK_TIME)?;
    Ok(file)
}

/// The hash in the name of an image file.
fn image_hash(file: &Path) -> Option<&str> {
    let stem = file.file_stem()?.to_str()?;
    let is_image = file.extension() == Some(OsStr::new("img")) && stem.len() == 64;
    (is_image && stem.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(stem)
}

/// Builds the file system under a temporary name. Returns its path and hash.
fn make(directory: &Path) -> io::Result<(PathBuf, String)> {
    let (image, file) = create_temporary(&directory.join("image"))?;
    let staging = image.with_extension("files");
    let made = (|| {
        fs::create_dir(&staging)?;
        // The root directory of the image gets these rights. Users other than root run the binaries, too.
        fs::set_permissions(&staging, fs::Permissions::from_mode(0o755))?;
        for (name, bytes) in FILES {
            write_atomically(&staging.join(name), bytes, 0o755)?;
        }
        let content: u64 = FILES.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        file.set_len((content + content / 16 + METADATA_BYTES).next_multiple_of(4096))?;
        fill(&image, &staging)?;
        file.sync_all()?;
        hash_of(&image)
    })();
    let _ = fs::remove_dir_all(&staging);
    if made.is_err() {
        let _ = fs::remove_file(&image);
    }
    made.map(|sha256| (image, sha256))
}

/// Builds a reproducible file system.
fn fill(image: &Path, staging: &Path) -> io::Result<()> {
    let options = format!("hash_seed={IMAGE_UUID},nodiscard,lazy_itable_init=0,root_owner=0:0");
    let features = "^has_journal,^metadata_csum,^resize_inode";
    let arguments = [
        "-q", "-F", "-t", "ext4", "-b", "4096", "-O", features, "-m", "0", "-N", "16", "-U", IMAGE_UUID, "-E",
    ];
    let mut mke2fs = command("mke2fs");
    mke2fs.env("E2FSPROGS_FAKE_TIME", IMAGE_TIME).args(arguments).arg(options);
    let output = mke2fs.arg("-d").arg(staging).arg(image).output()?;
    if !output.status.success() {
        return Err(failure("mke2fs", &output));
    }
    // mke2fs copies the files with their present times.
    let script = staging.join(".times");
    let mut lines = String::new();
    for (name, _) in FILES {
        for field in ["atime", "ctime", "mtime"] {
            lines.push_str(&format!("set_inode_field /{name} {field} @{IMAGE_TIME}\n"));
        }
    }
    write_atomically(&script, lines.as_bytes(), 0o600)?;
    let mut debugfs = command("debugfs");
    debugfs.env("E2FSPROGS_FAKE_TIME", IMAGE_TIME).arg("-w").arg("-f").arg(&script).arg(image);
    let output = debugfs.output()?;
    if output.status.success() { Ok(()) } else { Err(failure("debugfs", &output)) }
}

/// The SHA-256 of a file, in hexadecimal. Links are not followed.
fn hash_of(path: &Path) -> io::Result<String> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?);
    let mut hash = Sha256::new();
    io::copy(&mut file, &mut hash)?;
    Ok(hex::encode(hash.finalize()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::os::unix::fs::{FileExt, symlink};

    use super::*;

    fn installed(directory: &Path) -> GuestImage {
        GuestImage::install(directory, InstallationId::generate()).unwrap()
    }

    #[test]
    fn the_image_is_private_and_the_same_at_each_start() {
        let directory = tempfile::tempdir().unwrap();
        let first = installed(directory.path()).current();
        let second = installed(directory.path()).current();
        assert_eq!((&first.file, first.inode), (&second.file, second.inode));
        assert_eq!(fs::metadata(&first.file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(directory.path()).unwrap().permissions().mode() & 0o777, 0o700);
        let names = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut left: Vec<String> = fs::read_dir(directory.path()).unwrap().map(names).collect();
        left.sort();
        assert_eq!(left, [format!("{}.img", first.sha256), "lock".to_owned()]);
    }

    #[test]
    fn concurrent_creates_attach_the_image_once() {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let image = installed(directory.path());
        let file = image.current().file.clone();
        let devices = || loop_device::attached_devices(&file).unwrap().len();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| image.volume().unwrap());
            }
        });
        let attached = devices();
        image.detach().unwrap();
        assert_eq!((attached, devices()), (1, 0));
    }

    /// The alteration keeps the file's length and times.
    #[test]
    fn an_altered_image_is_replaced_at_the_next_start_and_before_the_next_container() {
        let directory = tempfile::tempdir().unwrap();
        let image = installed(directory.path());
        let before = image.current();
        let alter = |file: &Path| {
            let found = fs::metadata(file).unwrap();
            let opened = File::options().write(true).open(file).unwrap();
            opened.write_all_at(b"trojan", found.len() / 2).unwrap();
            opened.set_modified(found.modified().unwrap()).unwrap();
        };
        alter(&before.file);
        assert!(!before.is_intact());
        let after = installed(directory.path()).current();
        assert!(after.is_intact());
        assert_ne!(before.inode, after.inode);
        assert_ne!(image.volume_of(&before), image.volume_of(&after));
        // Replaced by another file of any content, or by a link.
        let target = directory.path().join("elsewhere");
        fs::rename(&after.file, &target).unwrap();
        symlink(&target, &after.file).unwrap();
        assert!(!after.is_intact());
        assert!(installed(directory.path()).current().is_intact());
        assert!(fs::symlink_metadata(&after.file).unwrap().is_file());
    }
}
