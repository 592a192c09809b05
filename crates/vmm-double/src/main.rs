//! A double of Firecracker and its jailer for machines that have no KVM: the same command lines, the same API socket, the
//! same vsock protocol, and behind them a real Linux guest in QEMU, emulated in software.
//!
//! It is one program under two names: what it is called (`firecracker`, `jailer`) decides what it plays. What it needs
//! itself is in a file `double.json` beside that name, so that whoever starts it need not know that it is not the real one.
//!
//! What it does not have is refused as Firecracker refuses what it does not know. QEMU can't copy a machine whose vsock
//! lives in another process: it is unplugged before, and plugged in again. Connections are lost by that, as with
//! Firecracker.

mod api;
mod jailer;
mod machine;
mod qmp;
mod vsock;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Deserialize;

/// The release whose behaviour is played.
const VERSION: &str = "1.16.1";

/// What the double itself needs.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Settings {
    /// QEMU.
    qemu: PathBuf,
    /// The program that carries vsock between QEMU and Unix sockets.
    vhost_device_vsock: PathBuf,
    /// An archive that is added to the memory disk: a `/double/init` that loads the modules of the kernel and goes on with
    /// `/init`.
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
        Some("firecracker") if arguments == ["--version"] => say(&format!("Firecracker v{VERSION}")),
        Some("jailer") if arguments == ["--version"] => say(&format!("Jailer v{VERSION}")),
        Some("firecracker") => api::run(&Settings::beside(&program)?, &arguments),
        Some("jailer") => jailer::run(&arguments),
        _ => bail!("this program has to be called firecracker or jailer"),
    }
}

#[expect(clippy::print_stdout, reason = "the version is what the program was asked for")]
fn say(text: &str) -> anyhow::Result<()> {
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
