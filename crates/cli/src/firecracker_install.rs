//! `emergent firecracker install`: installs Firecracker, its jailer and a kernel for microVMs.
//!
//! Invariant: a file is put in its place only after its SHA-256 was verified, whatever its source.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, Subcommand};
use emergent_control_plane::{Overrides, Settings};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{output, progress};

/// The size limit of a download.
const MAX_BYTES: u64 = 256 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// A download fails after this time without a byte.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A file to download, with its checksum.
struct Download {
    url: String,
    sha256: String,
}

/// A program in the archive of the release, with its checksum.
struct ArchiveMember {
    path: String,
    sha256: String,
}

/// The pinned files.
struct Pins {
    archive: Download,
    firecracker: ArchiveMember,
    jailer: ArchiveMember,
    kernel: Download,
}

/// The release of the Firecracker project, and a kernel of its CI.
fn pins() -> Pins {
    const VERSION: &str = "v1.16.1";
    let download = |url: String, sha256: &str| Download { url, sha256: sha256.to_owned() };
    let member = |name: &str, sha256: &str| ArchiveMember {
        path: format!("release-{VERSION}-x86_64/{name}-{VERSION}-x86_64"),
        sha256: sha256.to_owned(),
    };
    Pins {
        archive: download(
            format!(
                "https://github.com/firecracker-microvm/firecracker/releases/download/{VERSION}/firecracker-{VERSION}-x86_64.tgz"
            ),
            "382a02a869e4d6d5cb14c40577f9545e8458021ea8b0b2d3fc10ec14d9c242e6",
        ),
        firecracker: member(
            "firecracker",
            "2fd0171309af7e24cf8dafc8a6f921c1434c49b5f9349bb996b7ed0a4deb8aa7",
        ),
        jailer: member("jailer", "1f3a0c1fe86212d0001819bfe0819071c01208b3ccc9398c3b3bc1b84cf21edd"),
        kernel: download(
            "https://s3.amazonaws.com/spec.ccfc.min/firecracker-ci/v1.15/x86_64/vmlinux-6.1.155".to_owned(),
            "e20e46d0c36c55c0d1014eb20576171b3f3d922260d9f792017aeff53af3d4f2",
        ),
    }
}

/// Install the programs that Firecracker microVMs need
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  sudo emergent firecracker install")]
pub(crate) struct FirecrackerArgs {
    #[command(subcommand)]
    command: FirecrackerCommand,
}

impl FirecrackerArgs {
    pub(crate) fn json(&self) -> bool {
        let FirecrackerCommand::Install(args) = &self.command;
        args.json
    }
}

#[derive(Subcommand, Debug)]
enum FirecrackerCommand {
    Install(InstallArgs),
}

/// Install Firecracker, its jailer and a kernel, and verify their checksums
///
/// They are installed to the paths FIRECRACKER_BIN, JAILER_BIN and FIRECRACKER_KERNEL, by default under /usr/local. Then
/// `emergent serve` creates microVMs on hosts with KVM. A file with the right checksum is not installed again. The server
/// itself makes the root file system of microVMs from the workspace image.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  sudo emergent firecracker install
  sudo emergent firecracker install --from /media/usb        on a host without internet
  sudo emergent firecracker install --mirror https://mirror.example/firecracker
  emergent doctor                                            checks whether this host can run microVMs")]
struct InstallArgs {
    /// Take the files from this directory instead of the internet; their checksums are verified too
    #[arg(long, value_name = "DIR", conflicts_with = "mirror")]
    from: Option<PathBuf>,
    /// Download the files from below this URL, under their original names
    #[arg(long, value_name = "URL")]
    mirror: Option<String>,
    /// The configuration file [default: emergent.toml in the working directory, if there is one]
    #[arg(long, value_name = "FILE", env = "EMERGENT_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The source of the files.
enum Source {
    Internet,
    Mirror(String),
    Directory(PathBuf),
}

/// The paths that the files are installed to.
struct Targets {
    firecracker: PathBuf,
    jailer: PathBuf,
    kernel: PathBuf,
}

/// The result for one file.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Installed {
    path: PathBuf,
    /// False if the right file was there before.
    is_new: bool,
}

/// Installs the files and prints their paths.
pub(crate) async fn run(args: FirecrackerArgs) -> Result<u8> {
    let FirecrackerCommand::Install(args) = args.command;
    if std::env::consts::ARCH != "x86_64" {
        bail!(
            "there are pinned files for x86_64 only: get Firecracker, its jailer and a kernel for {} from another source, and \
             set FIRECRACKER_BIN, JAILER_BIN and FIRECRACKER_KERNEL to their paths",
            std::env::consts::ARCH
        );
    }
    let settings = Settings::load(args.config.as_deref(), &Overrides::default())?;
    let manager = settings.firecracker.manager;
    let targets =
        Targets { firecracker: manager.firecracker, jailer: manager.jailer, kernel: manager.kernel };
    let source = match (args.from, args.mirror) {
        (Some(directory), _) => Source::Directory(directory),
        (None, Some(url)) => Source::Mirror(url),
        (None, None) => Source::Internet,
    };
    let installed = install(&pins(), &source, &targets).await?;
    if args.json {
        output::line(serde_json::to_string_pretty(&installed)?)?;
        return Ok(0);
    }
    for file in &installed {
        let result = if file.is_new { "installed" } else { "already installed" };
        output::line(format!("{result}: {}", file.path.display()))?;
    }
    output::line("next: `emergent doctor` checks whether this host can run microVMs")?;
    Ok(0)
}

async fn install(pins: &Pins, source: &Source, targets: &Targets) -> Result<Vec<Installed>> {
    let programs = [(&pins.firecracker, &targets.firecracker), (&pins.jailer, &targets.jailer)];
    let has_programs = programs.iter().all(|(member, target)| has_checksum(target, &member.sha256));
    let has_kernel = has_checksum(&targets.kernel, &pins.kernel.sha256);
    let work = tempfile::tempdir().context("can't make a temporary directory")?;
    if !has_programs {
        let archive = fetch_and_verify(pins, source, &pins.archive, work.path()).await?;
        unpack(&archive, programs.map(|(member, _)| member), work.path())?;
        for (member, target) in programs {
            install_file(&work.path().join(&member.path), target, 0o755)?;
        }
    }
    if !has_kernel {
        install_file(
            &fetch_and_verify(pins, source, &pins.kernel, work.path()).await?,
            &targets.kernel,
            0o644,
        )?;
    }
    let done = |path: &PathBuf, is_new| Installed { path: path.clone(), is_new };
    Ok(vec![
        done(&targets.firecracker, !has_programs),
        done(&targets.jailer, !has_programs),
        done(&targets.kernel, !has_kernel),
    ])
}

fn file_name(download: &Download) -> &str {
    download.url.rsplit('/').next().unwrap_or_default()
}

/// Gets a file from the source and verifies its checksum. Returns its path.
async fn fetch_and_verify(pins: &Pins, source: &Source, download: &Download, work: &Path) -> Result<PathBuf> {
    let name = file_name(download);
    let url = match source {
        Source::Internet => download.url.clone(),
        Source::Mirror(base) => format!("{}/{name}", base.trim_end_matches('/')),
        Source::Directory(directory) => {
            let path = directory.join(name);
            let found = sha256_of(&path).with_context(|| path.display().to_string())?;
            check(&path.display().to_string(), &found, &download.sha256)?;
            return Ok(path);
        }
    };
    let path = work.join(name);
    let fetched = progress::during(&format!("downloading {url}"), download_to(&url, &path)).await;
    let found = fetched.map_err(|error| {
        let files: Vec<String> =
            [&pins.archive, &pins.kernel].iter().map(|each| format!("  {}", each.url)).collect();
        anyhow!(
            "{url} can't be downloaded: {error:#}\nWithout internet access, copy these files to a directory and give it with \
             --from:\n{}",
            files.join("\n")
        )
    })?;
    check(&url, &found, &download.sha256)?;
    Ok(path)
}

fn check(what: &str, found: &str, wanted: &str) -> Result<()> {
    if found != wanted {
        bail!(
            "{what} is not the expected file: its SHA-256 is {found} instead of {wanted}; it was not installed"
        );
    }
    Ok(())
}

/// Downloads a file and returns its checksum.
async fn download_to(url: &str, to: &Path) -> Result<String> {
    let client =
        reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(IDLE_TIMEOUT).build()?;
    let mut response = client.get(url).send().await?.error_for_status()?;
    let (mut file, mut hash, mut bytes) = (File::create(to)?, Sha256::new(), 0);
    while let Some(chunk) = response.chunk().await? {
        bytes += chunk.len() as u64;
        if bytes > MAX_BYTES {
            bail!("it is larger than {} MiB", MAX_BYTES >> 20);
        }
        hash.update(&chunk);
        file.write_all(&chunk)?;
    }
    Ok(hex::encode(hash.finalize()))
}

fn has_checksum(path: &Path, sha256: &str) -> bool {
    sha256_of(path).is_ok_and(|found| found == sha256)
}

fn sha256_of(path: &Path) -> std::io::Result<String> {
    let (mut file, mut hash, mut buffer) = (File::open(path)?, Sha256::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex::encode(hash.finalize())),
            length => hash.update(&buffer[..length]),
        }
    }
}

/// Extracts programs from an archive and verifies their checksums.
fn unpack(archive: &Path, members: [&ArchiveMember; 2], into: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(archive).arg("-C").arg(into).arg("--no-same-owner");
    let unpacked = tar.args(members.map(|member| &member.path)).output().context("can't run tar")?;
    if !unpacked.status.success() {
        bail!(
            "{} can't be unpacked: {}",
            archive.display(),
            String::from_utf8_lossy(&unpacked.stderr).trim()
        );
    }
    for member in members {
        let found = sha256_of(&into.join(&member.path)).with_context(|| member.path.clone())?;
        check(&member.path, &found, &member.sha256)?;
    }
    Ok(())
}

/// Copies a file to its place by a rename, which is atomic and works while the old program runs.
fn install_file(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let copy = || -> std::io::Result<()> {
        let directory = to.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(directory)?;
        let mut unfinished = tempfile::NamedTempFile::new_in(directory)?;
        std::io::copy(&mut File::open(from)?, &mut unfinished)?;
        unfinished.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
        unfinished.as_file().sync_all()?;
        unfinished.persist(to)?;
        Ok(())
    };
    copy().with_context(|| format!("{} can't be written (try sudo)", to.display()))
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::net::TcpListener;

    use super::*;

    /// Makes a directory with the archive of a release and a kernel.
    fn release(directory: &Path) -> Pins {
        let mut members = Vec::new();
        for name in ["firecracker", "jailer"] {
            let path = format!("release/{name}");
            fs::create_dir_all(directory.join("release")).unwrap();
            fs::write(directory.join(&path), format!("#!/bin/sh\necho {name}\n")).unwrap();
            members.push(ArchiveMember { sha256: sha256_of(&directory.join(&path)).unwrap(), path });
        }
        let archive = directory.join("release.tgz");
        let mut tar = Command::new("tar");
        tar.arg("-czf").arg(&archive).arg("-C").arg(directory).arg("release");
        assert!(tar.status().unwrap().success());
        fs::write(directory.join("vmlinux"), "a kernel").unwrap();
        let download = |name: &str| Download {
            url: format!("http://127.0.0.1:1/{name}"),
            sha256: sha256_of(&directory.join(name)).unwrap(),
        };
        let (archive, kernel) = (download("release.tgz"), download("vmlinux"));
        let jailer = members.pop().unwrap();
        Pins { archive, firecracker: members.pop().unwrap(), jailer, kernel }
    }

    fn targets(directory: &Path) -> Targets {
        let at = |name: &str| directory.join("bin").join(name);
        Targets { firecracker: at("firecracker"), jailer: at("jailer"), kernel: at("vmlinux") }
    }

    #[tokio::test]
    async fn installed_files_are_not_installed_again() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pins, targets) = (release(from.path()), targets(to.path()));
        let source = Source::Directory(from.path().to_owned());
        let done = install(&pins, &source, &targets).await.unwrap();
        assert!(done.iter().all(|file| file.is_new), "{done:?}");
        let output = Command::new(&targets.jailer).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "jailer\n");
        assert_eq!(fs::read_dir(to.path().join("bin")).unwrap().count(), 3, "a temporary file is left");
        // The source is not used for files that are installed.
        let done = install(&pins, &Source::Internet, &targets).await.unwrap();
        assert!(done.iter().all(|file| !file.is_new), "{done:?}");
    }

    #[tokio::test]
    async fn file_with_another_checksum_is_not_installed() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pins, targets) = (release(from.path()), targets(to.path()));
        fs::write(from.path().join("vmlinux"), "another kernel").unwrap();
        let source = Source::Directory(from.path().to_owned());
        let error = install(&pins, &source, &targets).await.unwrap_err().to_string();
        assert!(error.contains("vmlinux is not the expected file"), "{error}");
        assert!(!targets.kernel.exists());
    }

    #[tokio::test]
    async fn mirror_is_asked_for_each_file_by_its_name() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pins, targets) = (release(from.path()), targets(to.path()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mirror = Source::Mirror(format!("http://{}/files/", listener.local_addr().unwrap()));
        let directory = from.path().to_owned();
        let serving = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = String::new();
                std::io::BufReader::new(&stream).read_line(&mut request).unwrap();
                let name = request.split(' ').nth(1).unwrap().strip_prefix("/files/").unwrap();
                let bytes = fs::read(directory.join(name)).unwrap();
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                    bytes.len()
                );
                stream.write_all(head.as_bytes()).unwrap();
                stream.write_all(&bytes).unwrap();
            }
        });
        install(&pins, &mirror, &targets).await.unwrap();
        serving.join().unwrap();
        assert_eq!(fs::read_to_string(&targets.kernel).unwrap(), "a kernel");
    }

    #[tokio::test]
    async fn failed_download_names_the_files_to_copy_by_hand() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let pins = release(from.path());
        let error = install(&pins, &Source::Internet, &targets(to.path())).await.unwrap_err().to_string();
        for part in ["can't be downloaded", "--from", "release.tgz", "vmlinux"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn pinned_checksums_have_32_bytes() {
        let pins = pins();
        for sha256 in
            [&pins.archive.sha256, &pins.kernel.sha256, &pins.firecracker.sha256, &pins.jailer.sha256]
        {
            assert!(hex::decode(sha256).is_ok_and(|bytes| bytes.len() == 32), "{sha256}");
        }
    }
}
