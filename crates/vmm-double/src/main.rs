//! A test double of Firecracker and its jailer, for hosts without KVM: the same command lines, the same API socket, the
//! same vsock protocol, and behind them a real Linux guest in QEMU, emulated in software.
//!
//! It is one program with two names. Its name (`firecracker` or `jailer`) decides its role. Its own settings are in a file
//! `double.json` beside that name, so the manager starts it exactly as the real programs.
//!
//! Unsupported requests are refused with Firecracker's error for unknown requests. QEMU can't write the memory of a machine
//! whose vsock is in another process, so vsock is unplugged before and plugged in again. That ends all connections, as in
//! Firecracker.

mod api;
mod jailer;
mod machine;
mod qmp;
mod vsock;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Deserialize;

/// The Firecracker release that is imitated.
const VERSION: &str = "1.16.1";

/// The double's own settings.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Settings {
    /// QEMU.
    qemu: PathBuf,
    /// The program that connects QEMU's vsock to Unix sockets.
    vhost_device_vsock: PathBuf,
    /// An archive that is added to the initrd: a `/double/init` that loads the kernel's modules and then runs `/init`.
    modules: PathBuf,
}

impl Settings {
    fn beside(program: &Path) -> anyhow::Result<Self> {
        let path = program.with_file_name("double.json");
        let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
        serde_json::from_slice(&text).with_context(|| path.display().to_string())
    }
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args();
    let program = PathBuf::from(arguments.next().context("a program has a name")?);
    let arguments: Vec<String> = arguments.collect();
    match program.file_name().and_then(|name| name.to_str()) {
        Some("firecracker") if arguments == ["--version"] => print(&format!("Firecracker v{VERSION}")),
        Some("jailer") if arguments == ["--version"] => print(&format!("Jailer v{VERSION}")),
        Some("firecracker") => api::run(&Settings::beside(&program)?, &arguments),
        Some("jailer") => jailer::run(&arguments),
        _ => bail!("this program has to be called firecracker or jailer"),
    }
}

#[expect(clippy::print_stdout, reason = "the version is the output that was asked for")]
fn print(text: &str) -> anyhow::Result<()> {
    println!("{text}");
    Ok(())
}

/// The value of an option in a command line: `--name value` or `--name=value`.
pub(crate) fn option(arguments: &[String], name: &str) -> Option<String> {
    options(arguments, name).into_iter().next()
}

/// All values of an option that may be given more than once.
pub(crate) fn options(arguments: &[String], name: &str) -> Vec<String> {
    let mut values = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        if argument == name {
            values.extend(rest.next().cloned());
        } else if let Some(value) = argument.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')) {
            values.push(value.to_owned());
        }
    }
    values
}
