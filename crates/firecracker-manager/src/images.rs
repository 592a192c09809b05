//! Images: file systems that the disks of microVMs are copied from. Each is made once, of an archive of files such as a
//! container engine exports.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use bytes::Bytes;
use emergent_failpoint::failpoint;
use emergent_host::ext4;
use emergent_host::program::{command, run};
use emergent_wire::manager::{ImageSettings, MachineImage};
use futures_util::{Stream, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::task::AbortOnDropHandle;

use crate::error::{HostError, ManagerError, NotFound, on_host};
use crate::record::write_whole;

/// The free space of an image's file system. On a larger disk the file system is grown.
const SLACK_BYTES: u64 = 64 << 20;

/// Why an image was not made.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The stream of the archive broke.
    #[error("unpacking the image: {0}")]
    Archive(String),
    /// `tar` could not unpack the archive.
    #[error("unpacking the image: {0}")]
    Unpack(String),
}

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
        // Leftovers of images that were not finished.
        for entry in fs::read_dir(&directory)?.flatten() {
            let path = entry.path();
            if path.extension() == Some(OsStr::new("new")) {
                let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            }
        }
        Ok(Self { directory })
    }

    /// The file of an image's file system.
    pub(crate) fn file(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{}.ext4", file_name(id)))
    }

    fn description(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{}.json", file_name(id)))
    }

    /// A complete image.
    pub(crate) fn get(&self, id: &str) -> Result<MachineImage, NotFound> {
        let get = || -> Option<MachineImage> {
            let description: Description =
                serde_json::from_slice(&fs::read(self.description(id)).ok()?).ok()?;
            let disk_bytes = file_system_bytes(&self.file(id)).ok()?;
            Some(MachineImage { id: id.to_owned(), disk_bytes, settings: description.settings })
        };
        get().ok_or_else(|| NotFound::Image(id.to_owned()))
    }

    /// Makes an image of an archive (`tar`), unless it exists.
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
        let random = getrandom::fill(&mut suffix).map_err(|error| io::Error::other(error.to_string()));
        random.map_err(|error| HostError::io("making an image", error))?;
        let files = self.directory.join(format!("{}.new", hex::encode(suffix)));
        let made = async {
            unpack(&files, archive).await?;
            failpoint!("manager.image_unpacked");
            let (own, id, files) = (self.clone(), id.to_owned(), files.clone());
            Ok(on_host("making the image's file system", move || own.finish(&id, &settings, &files)).await?)
        };
        let made = made.await;
        let _ = on_host("removing the unpacked archive", move || fs::remove_dir_all(files)).await;
        made.and_then(|()| Ok(self.get(id)?))
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

/// The size of a file that contains a file system. A damaged one is an error, so that the image is made again.
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

/// A file name for an image's id, which can contain any characters.
fn file_name(id: &str) -> String {
    use sha2::Digest;
    hex::encode(&sha2::Sha256::digest(id.as_bytes())[..16])
}

/// Unpacks an archive with its owners and permissions.
async fn unpack(
    files: &Path,
    archive: impl Stream<Item = Result<Bytes, impl std::fmt::Display>> + Send,
) -> Result<(), ManagerError> {
    let failed = |error: io::Error| HostError::io("unpacking the image", error);
    fs::create_dir(files).map_err(failed)?;
    let mut tar = command("tar");
    tar.arg("-C").arg(files).args(["-x", "--numeric-owner", "-p", "-f", "-"]);
    // The engine marks containers with this file. A microVM is not one.
    tar.args(["--anchored", "--exclude=.dockerenv", "--exclude=./.dockerenv"]);
    tar.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut tar = tokio::process::Command::from(tar).kill_on_drop(true).spawn().map_err(failed)?;
    let mut input = tar.stdin.take().ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
    // Its errors are read while its input is written. Otherwise a full pipe would block both.
    let errors = AbortOnDropHandle::new(tokio::spawn(read_beginning(tar.stderr.take())));
    let mut archive = std::pin::pin!(archive);
    let fed = async {
        while let Some(bytes) = archive.next().await {
            let bytes = bytes.map_err(|error| ImageError::Archive(error.to_string()))?;
            if input.write_all(&bytes).await.is_err() {
                // It has ended. Its status and its errors tell why.
                return Ok::<_, ManagerError>(());
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
    Err(ImageError::Unpack(errors.await.unwrap_or_default()).into())
}

/// Reads a stream to its end and returns its beginning.
async fn read_beginning(stream: Option<tokio::process::ChildStderr>) -> String {
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

/// Makes a file system of a directory's files, with little free space.
fn make_file_system(files: &Path, image: &Path) -> io::Result<()> {
    let content = disk_usage(files, &["--block-size=1", "--apparent-size"])?;
    let inodes = disk_usage(files, &["--inodes"])?;
    // A file system needs about a tenth more than its content, and each small file occupies a whole block.
    let bytes = (content + content / 8 + inodes * 4096 + SLACK_BYTES).next_multiple_of(1 << 20);
    // Block size and inode density of a large disk, because it can be grown to one. Images of small files get more inodes.
    let bytes_per_inode = (bytes / (inodes + inodes / 4 + 1)).clamp(4096, 16384).to_string();
    let density = ["-b", "4096", "-i", &bytes_per_inode, "-d"].map(OsStr::new);
    ext4::make(image, bytes, &[&density[..], &[files.as_os_str()]].concat())?;
    fs::File::open(image)?.sync_all()
}

/// The number that `du` prints for a directory.
fn disk_usage(files: &Path, options: &[&str]) -> io::Result<u64> {
    let mut arguments = vec![OsStr::new("-s")];
    arguments.extend(options.iter().map(OsStr::new));
    arguments.push(files.as_os_str());
    let output = run("du", &arguments)?;
    Ok(output.split_ascii_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0))
}
