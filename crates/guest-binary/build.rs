//! Builds the guest agent as a static binary in a target directory of its own: the outer cargo holds the lock of
//! the ordinary one, and a static build needs other flags.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

/// The crates the agent is made of.
const SOURCES: [&str; 4] = ["wire", "guest-protocol", "guest-tools", "guest-agent"];

fn main() {
    println!("cargo::rerun-if-env-changed=EMERGENT_GUEST_BINARY");
    let output = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let built = match env::var_os("EMERGENT_GUEST_BINARY") {
        Some(path) => {
            println!("cargo::rerun-if-changed={}", Path::new(&path).display());
            PathBuf::from(path)
        }
        None => build(&output),
    };
    let bytes = std::fs::read(&built).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
    let embedded = output.join("emergent-guest");
    std::fs::write(&embedded, &bytes).expect("the build directory is writable");
    println!("cargo::rustc-env=GUEST_BINARY_PATH={}", embedded.display());
    println!("cargo::rustc-env=GUEST_BINARY_SHA256={}", hex::encode(Sha256::digest(&bytes)));
}

fn build(output: &Path) -> PathBuf {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace exists");
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join("crates").join(source).display());
    }
    println!("cargo::rerun-if-changed={}", root.join("Cargo.lock").display());
    println!("cargo::rerun-if-changed={}", root.join("Cargo.toml").display());
    let target = env::var("TARGET").expect("cargo sets TARGET");
    let directory = target_directory(output).join("guest");
    let status = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"))
        .current_dir(&root)
        .args(["build", "--profile", "guest", "--package", "emergent-guest-agent", "--bin", "emergent-guest"])
        .args(["--target", &target])
        .arg("--target-dir")
        .arg(&directory)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        // What the outer build set for itself (clippy as the compiler, its own flags) must not get in.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("CARGO_TARGET_DIR")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the guest agent can't be built");
    directory.join(target).join("guest/emergent-guest")
}

/// The target directory that cargo is using: the one with its tag file.
fn target_directory(output: &Path) -> PathBuf {
    let tagged = output.ancestors().find(|directory| directory.join("CACHEDIR.TAG").exists());
    tagged.unwrap_or(output).to_owned()
}
