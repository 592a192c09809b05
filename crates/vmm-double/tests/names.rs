//! The double's name decides its role. (Because of this test, the program is rebuilt whenever tests are.)

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::symlink;
use std::process::Command;

#[test]
fn its_name_decides_its_role() {
    let directory = tempfile::tempdir().unwrap();
    for (name, said) in [("firecracker", "Firecracker v1."), ("jailer", "Jailer v1.")] {
        let program = directory.path().join(name);
        symlink(env!("CARGO_BIN_EXE_emergent-vmm-double"), &program).unwrap();
        let output = Command::new(program).arg("--version").output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        assert!(output.starts_with(said), "{output}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_emergent-vmm-double")).arg("--version").output().unwrap();
    assert!(!output.status.success());
}
