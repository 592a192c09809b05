//! Builds the static binaries that go into every sandbox. They have a target directory of their own, because the outer cargo holds
//! the lock of its target directory and a static build needs other flags.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

/// The crates the binaries are made of.
const SOURCES: [&str; 5] = ["wire", "guest-protocol", "guest-tools", "guest-agent", "guest-search"];
/// Package, binary, profile, and the name in the sandbox.
const BINARIES: [(&str, &str, &str, &str); 2] = [
    ("emergent-guest-agent", "emergent-guest", "guest", "guest"),
    ("emergent-guest-search", "emergent-guest-search", "guest-search", "search"),
];

fn main() {
    let output = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // Read at run time: clones at different places can share a target directory.
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let root = manifest.join("../..").canonicalize().expect("the workspace exists");
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join("crates").join(source).display());
    }
    println!("cargo::rerun-if-changed={}", root.join("Cargo.lock").display());
    println!("cargo::rerun-if-changed={}", root.join("Cargo.toml").display());
    let mut hash = Sha256::new();
    for (package, binary, profile, name) in BINARIES {
        let built = build(&root, &output, package, binary, profile);
        let bytes = std::fs::read(&built).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
        hash.update(&bytes);
        std::fs::write(output.join(name), &bytes).expect("the build directory is writable");
    }
    println!("cargo::rustc-env=GUEST_SHA256={}", hex::encode(hash.finalize()));
}

fn build(root: &Path, output: &Path, package: &str, binary: &str, profile: &str) -> PathBuf {
    let target = env::var("TARGET").expect("cargo sets TARGET");
    let directory = target_directory(output).join("guest");
    let status = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"))
        .current_dir(root)
        .args(["build", "--profile", profile, "--package", package, "--bin", binary, "--target", &target])
        .arg("--target-dir")
        .arg(&directory)
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static")
        // Settings of the outer build, such as clippy as the compiler and its flags.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("CARGO_TARGET_DIR")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "{package} can't be built");
    directory.join(target).join(profile).join(binary)
}

/// The target directory that cargo is using: the one with its tag file.
fn target_directory(output: &Path) -> PathBuf {
    let tagged = output.ancestors().find(|directory| directory.join("CACHEDIR.TAG").exists());
    tagged.unwrap_or(output).to_owned()
}
