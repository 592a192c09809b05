//! Starts with a bad database, key or data directory. The server refuses to start, names the fix, and changes nothing. After the fix
//! it starts with all workspaces.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::chown;
use std::process::Command;

use emergent_test_support::command::run;
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::json;

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
/// The database's files.
const DATABASE: [&str; 3] = ["emergent.db", "emergent.db-wal", "emergent.db-shm"];

/// A stopped server whose workspace has a file and a variable, and a backup of its database and key.
struct Installation {
    server: TestServer,
    workspace: String,
    backup: tempfile::TempDir,
}

impl Installation {
    async fn new() -> Self {
        let mut server = TestServer::start(BINARY).await;
        let request =
            json!({ "provider": "docker", "network": "isolated", "environment": { "SECRET": "sesame" } });
        let workspace = server.create(request).await;
        server.tool(&workspace, "write", json!({ "file_path": "mark", "content": "kept\n" })).await.ok();
        server.terminate();
        let backup = tempfile::tempdir().unwrap();
        for name in DATABASE.iter().chain(&["encryption-key"]) {
            let _ = std::fs::copy(server.data_dir().join(name), backup.path().join(name));
        }
        Self { server, workspace, backup }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.server.data_dir().join(name)
    }

    /// Restores the backup.
    fn restore(&self) {
        for name in DATABASE {
            let _ = std::fs::remove_file(self.path(name));
        }
        for entry in std::fs::read_dir(self.backup.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            std::fs::copy(self.backup.path().join(&name), self.path(&name)).unwrap();
        }
    }

    /// Asserts that the server refuses to start with these texts, and that it leaves containers and disks unchanged.
    fn assert_refused(&self, parts: &[&str]) {
        let state = || {
            let disks = run("find", &[&self.path("disks").to_string_lossy(), "-printf", "%p %s %T@\n"]);
            let label = format!("label=emergent.installation={}", self.server.installation());
            disks + &run("docker", &["ps", "--filter", &label, "--format", "{{.Names}} {{.ID}}"])
        };
        let before = state();
        let stderr = self.server.refusal(&[]);
        for part in parts {
            assert!(stderr.contains(part), "'{part}' is not in:\n{stderr}");
        }
        assert_eq!(stderr.matches("error: ").count(), 1, "not one error without a backtrace: {stderr}");
        assert_eq!(state(), before);
    }

    /// Restores the backup, and asserts that the workspace is unchanged.
    async fn assert_restored(&mut self) {
        self.restore();
        self.server.start_again().await;
        assert_eq!(self.server.bash(&self.workspace, "cat mark; echo $SECRET").await, "kept\nsesame\n");
    }

    async fn remove(self) {
        self.server.destroy(&self.workspace).await;
        self.server.stop();
    }
}

#[tokio::test]
async fn damaged_empty_or_newer_database_is_refused_without_changes() {
    let mut installation = Installation::new().await;
    let database = installation.path("emergent.db");
    let size = std::fs::metadata(&database).unwrap().len();
    let write = |bytes: &[u8]| std::fs::write(&database, bytes).unwrap();
    let whole = std::fs::read(&database).unwrap();

    let damaged = ["the database file is damaged", "restore emergent.db from a backup", "--adopt"];
    write(&[0x5a; 40_000]);
    installation.assert_refused(&damaged);
    write(&whole[..usize::try_from(size / 8).unwrap()]);
    installation.assert_refused(&damaged);
    let mut holes = whole.clone();
    holes[4096 * 2..4096 * 12].fill(0xa5);
    write(&holes);
    installation.assert_refused(&damaged);

    write(b"");
    installation.assert_refused(&["holds 2 files of workspaces", "Nothing was changed", "--adopt"]);

    installation.restore();
    let newer = "INSERT INTO schema_migrations (version, checksum) VALUES (999, x'00')";
    installation.server.sql(newer).await;
    installation.assert_refused(&["schema version 999", "start the newer program", "restore a backup"]);

    for name in DATABASE {
        let _ = std::fs::remove_file(installation.path(name));
    }
    std::fs::create_dir(&database).unwrap();
    installation.assert_refused(&["emergent.db", "Is a directory"]);
    std::fs::remove_dir(&database).unwrap();

    installation.assert_restored().await;
    installation.remove().await;
}

#[tokio::test]
async fn immutable_database_is_refused_without_changes() {
    let mut installation = Installation::new().await;
    let database = installation.path("emergent.db").to_string_lossy().into_owned();
    run("chattr", &["+i", &database]);
    installation.assert_refused(&["can't open", "emergent.db", "Operation not permitted"]);
    run("chattr", &["-i", &database]);
    installation.assert_restored().await;
    installation.remove().await;
}

#[tokio::test]
async fn missing_key_is_refused_and_a_new_key_removes_only_sealed_variables() {
    let mut installation = Installation::new().await;
    let key = installation.path("encryption-key");
    std::fs::remove_file(&key).unwrap();
    let lost = ["the encryption key is missing", "from a backup", "EMERGENT_ENCRYPTION_KEY", "--new-key"];
    installation.assert_refused(&lost);
    assert!(!key.exists(), "a new key was made, which hides that the old one is missing");
    std::fs::write(&key, "0".repeat(64)).unwrap();
    run("chmod", &["600", &key.to_string_lossy()]);
    installation.assert_refused(&["not the one that the database's values are sealed with", "--new-key"]);
    std::fs::write(&key, "not a key").unwrap();
    installation.assert_refused(&["is not a key file", "--new-key"]);
    installation.assert_restored().await;

    // The old key can't be restored.
    installation.server.terminate();
    std::fs::write(&key, "not a key").unwrap();
    installation.server.start_again_with_flags(&["--new-key"]).await;
    let log = installation.server.log();
    assert!(log.contains("variables of these are removed") && log.contains("workspaces=1"), "{log}");
    let read = installation.server.bash(&installation.workspace, "cat mark").await;
    assert_eq!(read, "kept\n");
    let change = async |what: &str| {
        let path = format!("{WORKSPACES}/{}/{what}", installation.workspace);
        installation.server.request("POST", &path, None).await.ok();
    };
    change("stop").await;
    change("resume").await;
    let started = installation.server.bash(&installation.workspace, "cat mark; echo \"[$SECRET]\"").await;
    assert_eq!(started, "kept\n[]\n");
    // The flag does not replace a valid key.
    installation.server.terminate();
    let kept = std::fs::read(&key).unwrap();
    installation.server.start_again_with_flags(&["--new-key"]).await;
    assert_eq!(std::fs::read(&key).unwrap(), kept);
    installation.remove().await;
}

#[tokio::test]
async fn read_only_or_foreign_data_directory_is_reported() {
    let mut installation = Installation::new().await;
    let directory = installation.server.data_dir().to_string_lossy().into_owned();
    run("mount", &["--bind", &directory, &directory]);
    run("mount", &["-o", "remount,ro,bind", &directory]);
    installation.assert_refused(&["can't be used: Read-only file system", "--data-dir"]);
    run("umount", &[&directory]);

    // The server runs as another user than the owner of the directory.
    let elsewhere = tempfile::tempdir().unwrap();
    let binary = elsewhere.path().join("emergent");
    std::fs::copy(BINARY, &binary).unwrap();
    run("chmod", &["755", &elsewhere.path().to_string_lossy()]);
    let (binary, flags) = (binary.to_string_lossy(), ["--listen", "127.0.0.1:0", "--data-dir", &directory]);
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups", "timeout", "60", &binary, "serve"];
    let output = Command::new("setpriv").args(user).args(flags).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{stderr}");
    assert!(stderr.contains("Permission denied") && stderr.contains("run as its owner"), "{stderr}");

    // The directory belongs to another user than the one of the server, which is root.
    chown(&directory, Some(65534), None).unwrap();
    installation.server.start_again().await;
    assert!(installation.server.log().contains("belongs to another user"), "{}", installation.server.log());
    installation.server.terminate();
    chown(&directory, Some(0), None).unwrap();
    installation.assert_restored().await;
    installation.remove().await;
}
