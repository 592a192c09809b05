//! The double of the jailer. It makes the same directories and control groups, but no jail, because QEMU needs the host's
//! files. The API's process gets the directory of the jail as an option and resolves all paths against it.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use procfs::MountEntry;

use crate::{option, options};

pub(crate) fn run(arguments: &[String]) -> anyhow::Result<()> {
    let at = arguments.iter().position(|argument| argument == "--").unwrap_or(arguments.len());
    let (own, passed_on) = (&arguments[..at], arguments.get(at + 1..).unwrap_or_default());
    let needed = |name: &str| option(own, name).with_context(|| format!("{name} is needed"));
    let (id, exec_file) = (needed("--id")?, PathBuf::from(needed("--exec-file")?));
    let uid: u32 = needed("--uid")?.parse()?;
    let _gid: u32 = needed("--gid")?.parse()?;
    if id.len() > 64 || !id.chars().all(|each| each.is_ascii_alphanumeric() || each == '-') {
        bail!("Invalid instance ID: {id}");
    }
    let base = option(own, "--chroot-base-dir").unwrap_or_else(|| "/srv/jailer".to_owned());
    let name = exec_file.file_name().context("--exec-file has a name")?;
    let root = Path::new(&base).join(name).join(&id).join("root");
    fs::create_dir_all(root.join("run")).with_context(|| root.display().to_string())?;
    // The real jailer fails in a jail that was used, because it can't make the devices twice.
    fs::create_dir(root.join("dev")).context("a jail can't be used twice")?;
    std::os::unix::fs::chown(root.join("run"), Some(uid), None)?;
    enter_groups(own, &name.to_string_lossy(), &id)?;
    let error = Command::new(&exec_file)
        .arg0(&exec_file)
        .args(["--id", &id, "--double-root"])
        .arg(&root)
        .args(passed_on)
        .env_clear()
        .exec();
    Err(error).with_context(|| exec_file.display().to_string())
}

/// Makes the control groups that the real jailer makes, and moves this process there.
fn enter_groups(arguments: &[String], exec_name: &str, id: &str) -> anyhow::Result<()> {
    let parent = option(arguments, "--parent-cgroup").unwrap_or_else(|| exec_name.to_owned());
    let is_v2 = option(arguments, "--cgroup-version").as_deref() == Some("2");
    for setting in options(arguments, "--cgroup") {
        let (file, value) = setting.split_once('=').context("--cgroup is FILE=VALUE")?;
        let controller = file.split('.').next().unwrap_or_default();
        let mount =
            mount_of(controller, is_v2).with_context(|| format!("no control group for {controller}"))?;
        let group = mount.join(&parent).join(id);
        fs::create_dir_all(&group)?;
        fs::write(group.join(file), value).with_context(|| setting.clone())?;
        fs::write(group.join("cgroup.procs"), std::process::id().to_string())?;
    }
    Ok(())
}

fn mount_of(controller: &str, is_v2: bool) -> Option<PathBuf> {
    let matches = |mount: &MountEntry| {
        if is_v2 {
            mount.fs_vfstype == "cgroup2"
        } else {
            mount.fs_vfstype == "cgroup" && mount.fs_mntops.contains_key(controller)
        }
    };
    procfs::mounts().ok()?.into_iter().find(matches).map(|mount| mount.fs_file.into())
}
