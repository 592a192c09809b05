//! Images: file systems that microVMs' disks are copies of. Each is made once out of an archive of files, such as a
//! container engine exports.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use bytes::Bytes;
use emergent_failpoint::failpoint;
use emergent_host::files::{create_private, remove_if_there};
use emergent_host::program::{command, run};
use emergent_wire::manager::{ImageSettings, MachineImage};
use futures_util::{Stream, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::error::{ManagerError, on_host};
use crate::record::write_whole;

/// Left free in an image's own file system, which grows with the disk that it is copied to.
const SLACK_BYTES: u64 = 64 << 20;

/// The images of one manager.
#[derive(Clone, Debug)]
pub(crate) struct Images {
    directory: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Description {
    settings: ImageSettings,
}

impl Images {
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let directory = data_dir.join("images");
        fs::create_dir_all(&directory)?;
        // What was not finished is of no use.
        for entry in fs::read_dir(&directory)?.flatten() {
            let path = entry.path();
            if path.extension() == Some(OsStr::new("new")) {
                let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            }
        }
        Ok(Self { directory })
    }

    /// Where an image's file system is.
    pub(crate) fn file(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{}.ext4", file_name(id)))
    }

    fn description(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{}.json", file_name(id)))
    }

    /// An image, if it is there as a whole.
    pub(crate) fn get(&self, id: &str) -> Result<MachineImage, ManagerError> {
        let get = || -> Option<MachineImage> {
            let description: Description =
                serde_json::from_slice(&fs::read(self.description(id)).ok()?).ok()?;
            let disk_bytes = file_system_bytes(&self.file(id)).ok()?;
            Some(MachineImage { id: id.to_owned(), disk_bytes, settings: description.settings })
        };
        get().ok_or_else(|| ManagerError::NotFound(format!("image {id}")))
    }

    /// Makes an image out of an archive (`tar`), unless it is there.
    pub(crate) async fn put(
        &self,
        id: &str,
        settings: ImageSettings,
        archive: impl Stream<Item = Result<Bytes, impl std::fmt::Display>> + Send,
    ) -> Result<MachineImage, ManagerError> {
        if let Ok(image) = self.get(id) {
            return Ok(image);
        }
        let mut suffix = [0; 8];
        getrandom::fill(&mut suffix).map_err(|error| ManagerError::failed("making an image", error))?;
        let files = self.directory.join(format!("{}.new", hex::encode(suffix)));
        let made = async {
            unpack(&files, archive).await?;
            failpoint!("manager.image_unpacked");
            let (own, id, files) = (self.clone(), id.to_owned(), files.clone());
            on_host("making the image's file system", move || own.finish(&id, &settings, &files)).await
        };
        let made = made.await;
        let _ = on_host("cleaning up", move || fs::remove_dir_all(files)).await;
        made?;
        self.get(id)
    }

    fn finish(&self, id: &str, settings: &ImageSettings, files: &Path) -> io::Result<()> {
        let unfinished = files.with_extension("ext4.new");
        let made = make_file_system(files, &unfinished)
            .and_then(|()| fs::rename(&unfinished, self.file(id)))
            .and_then(|()| {
                let description = serde_json::to_vec(&Description { settings: settings.clone() })?;
                write_whole(&self.description(id), &description)
            });
        if made.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        made
    }
}

/// The size of a file that is a file system. One that was damaged is none: it is made again.
fn file_system_bytes(path: &Path) -> io::Result<u64> {
    const MAGIC_AT: u64 = 1080;
    const MAGIC: [u8; 2] = [0x53, 0xef];
    let (file, mut found) = (fs::File::open(path)?, [0; 2]);
    file.read_exact_at(&mut found, MAGIC_AT)?;
    if found != MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(file.metadata()?.len())
}

/// A file's name for an image's id, which may hold anything.
fn file_name(id: &str) -> String {
    use sha2::Digest;
    hex::encode(&sha2::Sha256::digest(id.as_bytes())[..16])
}

/// Unpacks an archive with the owners and rights that it says.
async fn unpack(
    files: &Path,
    archive: impl Stream<Item = Result<Bytes, impl std::fmt::Display>> + Send,
) -> Result<(), ManagerError> {
    const WHAT: &str = "unpacking the image";
    let failed = |error: io::Error| ManagerError::failed(WHAT, error);
    fs::create_dir(files).map_err(failed)?;
    let mut tar = command("tar");
    tar.arg("-C").arg(files).args(["-x", "--numeric-owner", "-p", "-f", "-"]);
    // The engine's mark of a container, which this is none.
    tar.args(["--anchored", "--exclude=.dockerenv", "--exclude=./.dockerenv"]);
    tar.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut tar = tokio::process::Command::from(tar).kill_on_drop(true).spawn().map_err(failed)?;
    let mut input = tar.stdin.take().ok_or_else(|| ManagerError::failed(WHAT, "no pipe"))?;
    // Read while it is fed: one that has much to complain about must not wait for us.
    let complaints = tokio::spawn(first_words(tar.stderr.take()));
    let mut archive = std::pin::pin!(archive);
    let fed = async {
        while let Some(bytes) = archive.next().await {
            let bytes = bytes.map_err(|error| ManagerError::failed(WHAT, error))?;
            if input.write_all(&bytes).await.is_err() {
                // It has ended, and says why.
                return Ok(());
            }
        }
        let _ = input.shutdown().await;
        drop(input);
        Ok(())
    };
    fed.await?;
    let status = tar.wait().await.map_err(failed)?;
    if status.success() {
        return Ok(());
    }
    Err(ManagerError::failed(WHAT, complaints.await.unwrap_or_default()))
}

/// The beginning of what a program says; the rest is thrown away.
async fn first_words(stream: Option<tokio::process::ChildStderr>) -> String {
    const KEPT_BYTES: usize = 1000;
    let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
    let Some(mut stream) = stream else {
        return String::new();
    };
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        kept.extend_from_slice(&buffer[..length.min(KEPT_BYTES - kept.len())]);
    }
    String::from_utf8_lossy(&kept).trim().to_owned()
}

/// Makes a file system of a directory's files, with little room to spare.
fn make_file_system(files: &Path, image: &Path) -> io::Result<()> {
    let taken = run(
        "du",
        &["-s", "--block-size=1", "--apparent-size"]
            .map(OsStr::new)
            .into_iter()
            .chain([files.as_os_str()])
            .collect::<Vec<_>>(),
    )?;
    let taken: u64 =
        taken.split_ascii_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0);
    // File systems are about a tenth larger than what is in them, and many small files take whole blocks.
    let inodes = run(
        "du",
        &["-s", "--inodes"].map(OsStr::new).into_iter().chain([files.as_os_str()]).collect::<Vec<_>>(),
    )?;
    let inodes: u64 =
        inodes.split_ascii_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0);
    let bytes = (taken + taken / 8 + inodes * 4096 + SLACK_BYTES).next_multiple_of(1 << 20);
    remove_if_there(image)?;
    create_private(image)?.set_len(bytes)?;
    let options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
    // Blocks and inodes as a large disk has them, since it grows to one; more inodes where the image's files are small.
    let bytes_per_inode = (bytes / (inodes + inodes / 4 + 1)).clamp(4096, 16384).to_string();
    let mut arguments: Vec<&OsStr> =
        ["-q", "-F", "-t", "ext4", "-b", "4096", "-i", &bytes_per_inode, "-m", "0", "-E", options, "-d"]
            .map(OsStr::new)
            .to_vec();
    arguments.extend([files.as_os_str(), image.as_os_str()]);
    run("mke2fs", &arguments)?;
    fs::File::open(image)?.sync_all()
}
