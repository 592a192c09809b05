//! Encrypts secrets for the database.
//!
//! AES-256-GCM with a random nonce. The place of a value (table, column, row id) is associated data, so a sealed
//! value that is copied to another row or column does not open there. Layout:
//!
//! ```text
//! version 1 │ key id (8) │ nonce (12) │ ciphertext │ tag (16)
//! ```
//!
//! The key id, a digest of the key, tells "sealed with another key" from "damaged". With random nonces one key
//! is good for 2^32 values.
//!
//! Invariant: key material is never in `Debug` output and is wiped when dropped.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use aes_gcm::aead::{Aead, Payload};
use aes_gcm::{Aes256Gcm, KeyInit, Nonce};
use emergent_wire::WorkspaceId;
use secrecy::zeroize::Zeroizing;
use secrecy::{ExposeSecret, SecretBox};
use sha2::{Digest, Sha256};
use uuid::Uuid;

const VERSION: u8 = 1;
const KEY_BYTES: usize = 32;
const KEY_ID_BYTES: usize = 8;
const NONCE_BYTES: usize = 12;
const HEADER_BYTES: usize = 1 + KEY_ID_BYTES + NONCE_BYTES;

/// Why a key can't be had or a value can't be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// The value was sealed with another key.
    #[error(
        "it was sealed with another key: start the server with the EMERGENT_ENCRYPTION_KEY or key file that it had before"
    )]
    OtherKey,
    /// The value was changed, or belongs to another row.
    #[error("it was changed after it was sealed, or moved from another row")]
    Damaged,
    /// The value was sealed by a newer version of this program.
    #[error("it has format {0}, which this program does not know: start the newer program that wrote it")]
    UnknownVersion(u8),
    /// Not 64 hexadecimal digits.
    #[error(
        "the encryption key must be 64 hexadecimal digits (32 bytes), such as `openssl rand -hex 32` prints"
    )]
    NotAKey,
    /// The key file has something else in it.
    #[error(
        "{} is not a key file: it must hold 64 hexadecimal digits; restore it from a backup",
        .0.display()
    )]
    BadKeyFile(PathBuf),
    /// Others can read the key file.
    #[error(
        "{} can be read by others (mode {mode:03o}): run `chmod 600 {}`",
        path.display(),
        path.display()
    )]
    ExposedKeyFile {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The key file can't be read or made.
    #[error("can't use the key file {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
}

/// The place of a sealed value. The value opens only there.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    table: &'static str,
    column: &'static str,
    row: Uuid,
}

impl Place {
    /// The value in `column` of the row `row` of `table`.
    pub const fn new(table: &'static str, column: &'static str, row: Uuid) -> Self {
        Self { table, column, row }
    }

    fn associated_data(self) -> Vec<u8> {
        format!("emergent/{}.{}/{}", self.table, self.column, self.row.hyphenated()).into_bytes()
    }
}

/// The key that secrets are sealed with.
pub struct SealingKey {
    key: SecretBox<[u8; KEY_BYTES]>,
    id: [u8; KEY_ID_BYTES],
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealingKey(..)")
    }
}

impl SealingKey {
    /// The key that is written as 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Result<Self, SealError> {
        let mut key = Box::new([0; KEY_BYTES]);
        match hex::decode_to_slice(text.trim(), key.as_mut_slice()) {
            Ok(()) => Ok(Self::from_bytes(SecretBox::new(key))),
            Err(_) => {
                // Half a key may have been decoded.
                drop(SecretBox::new(key));
                Err(SealError::NotAKey)
            }
        }
    }

    /// The key in the file at `path`, which is made, readable by its owner only, when it is not there. Of
    /// several processes that make it at once one wins and all get its key.
    pub fn load_or_create(path: &Path) -> Result<Self, SealError> {
        let failed = |source| SealError::File { path: path.to_owned(), source };
        match fs::metadata(path) {
            Ok(metadata) => return Self::load(path, &metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        create_key_file(path).map_err(failed)?;
        Self::load(path, &fs::metadata(path).map_err(failed)?)
    }

    fn load(path: &Path, metadata: &fs::Metadata) -> Result<Self, SealError> {
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            let path = path.to_owned();
            return Err(SealError::ExposedKeyFile { path, mode });
        }
        // 64 digits and a line end.
        if !metadata.is_file() || metadata.len() > 66 {
            return Err(SealError::BadKeyFile(path.to_owned()));
        }
        let text = Zeroizing::new(
            fs::read(path).map_err(|source| SealError::File { path: path.to_owned(), source })?,
        );
        std::str::from_utf8(&text)
            .ok()
            .and_then(|text| Self::from_hex(text).ok())
            .ok_or_else(|| SealError::BadKeyFile(path.to_owned()))
    }

    fn from_bytes(key: SecretBox<[u8; KEY_BYTES]>) -> Self {
        let digest = Sha256::new()
            .chain_update(b"emergent sealing key id\0")
            .chain_update(key.expose_secret())
            .finalize();
        let mut id = [0; KEY_ID_BYTES];
        id.copy_from_slice(&digest[..KEY_ID_BYTES]);
        Self { key, id }
    }

    fn cipher(&self) -> Aes256Gcm {
        Aes256Gcm::new(self.key.expose_secret().into())
    }

    /// Seals a value for a place.
    pub fn seal(&self, place: Place, plaintext: &[u8]) -> Vec<u8> {
        let nonce: [u8; NONCE_BYTES] = random();
        let mut sealed = Vec::with_capacity(HEADER_BYTES + plaintext.len() + 16);
        sealed.push(VERSION);
        sealed.extend_from_slice(&self.id);
        sealed.extend_from_slice(&nonce);
        let payload = Payload { msg: plaintext, aad: &place.associated_data() };
        let ciphertext =
            self.cipher().encrypt(&Nonce::from(nonce), payload).expect("AES-GCM takes up to 64 GiB");
        sealed.extend_from_slice(&ciphertext);
        sealed
    }

    /// Opens the value that was sealed for this place.
    pub fn open(&self, place: Place, sealed: &[u8]) -> Result<Zeroizing<Vec<u8>>, SealError> {
        match sealed.first() {
            Some(&VERSION) if sealed.len() >= HEADER_BYTES => {}
            Some(&VERSION) | None => return Err(SealError::Damaged),
            Some(&version) => return Err(SealError::UnknownVersion(version)),
        }
        let (header, ciphertext) = sealed.split_at(HEADER_BYTES);
        let (key_id, nonce) = header[1..].split_at(KEY_ID_BYTES);
        if key_id != self.id {
            return Err(SealError::OtherKey);
        }
        let payload = Payload { msg: ciphertext, aad: &place.associated_data() };
        let nonce = <[u8; NONCE_BYTES]>::try_from(nonce).map_err(|_| SealError::Damaged)?;
        self.cipher()
            .decrypt(&Nonce::from(nonce), payload)
            .map(Zeroizing::new)
            .map_err(|_| SealError::Damaged)
    }

    /// Seals a workspace's environment; none when it is empty.
    pub fn seal_environment(
        &self,
        id: WorkspaceId,
        environment: &BTreeMap<String, String>,
    ) -> Option<Vec<u8>> {
        if environment.is_empty() {
            return None;
        }
        let json = serde_json::to_vec(environment).expect("a map of texts is JSON");
        Some(self.seal(environment_of(id), &Zeroizing::new(json)))
    }

    /// Opens the result of [`seal_environment`](Self::seal_environment).
    pub fn open_environment(
        &self,
        id: WorkspaceId,
        sealed: Option<&[u8]>,
    ) -> Result<BTreeMap<String, String>, SealError> {
        let Some(sealed) = sealed else {
            return Ok(BTreeMap::new());
        };
        let json = self.open(environment_of(id), sealed)?;
        serde_json::from_slice(&json).map_err(|_| SealError::Damaged)
    }
}

fn environment_of(id: WorkspaceId) -> Place {
    Place::new("agent_workspaces", "environment_sealed", id.0)
}

/// Random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    bytes
}

/// Writes a new key to a file beside it and gives that file the name, unless the name is taken by then.
fn create_key_file(path: &Path) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut text = Zeroizing::new([0; KEY_BYTES * 2 + 1]);
    let (digits, end) = text.split_at_mut(KEY_BYTES * 2);
    let key = Zeroizing::new(random::<KEY_BYTES>());
    hex::encode_to_slice(key.as_slice(), digits).map_err(io::Error::other)?;
    end.fill(b'\n');
    let mut file = tempfile::Builder::new()
        .prefix(".new-key-")
        .permissions(fs::Permissions::from_mode(0o600))
        .tempfile_in(directory)?;
    file.write_all(text.as_slice())?;
    file.as_file().sync_all()?;
    match file.persist_noclobber(path) {
        Ok(_) => fs::File::open(directory)?.sync_all(),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error.error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    fn key(byte: u8) -> SealingKey {
        SealingKey::from_hex(&hex::encode([byte; 32])).unwrap()
    }

    fn place(row: u128) -> Place {
        Place::new("t", "c", Uuid::from_u128(row))
    }

    proptest! {
        #[test]
        fn a_sealed_value_opens_only_in_its_place(text: Vec<u8>, row: u128, other: u128) {
            prop_assume!(row != other);
            let sealed = key(1).seal(place(row), &text);
            prop_assert_eq!(&*key(1).open(place(row), &sealed).unwrap(), &text);
            prop_assert!(matches!(key(1).open(place(other), &sealed), Err(SealError::Damaged)));
            let elsewhere = Place::new("t", "d", Uuid::from_u128(row));
            prop_assert!(matches!(key(1).open(elsewhere, &sealed), Err(SealError::Damaged)));
            prop_assert!(matches!(key(2).open(place(row), &sealed), Err(SealError::OtherKey)));
        }

        #[test]
        fn a_changed_value_does_not_open(text in proptest::collection::vec(any::<u8>(), 0..50), at: prop::sample::Index, bit in 0u8..8) {
            let mut sealed = key(1).seal(place(1), &text);
            let at = at.index(sealed.len());
            sealed[at] ^= 1 << bit;
            prop_assert!(key(1).open(place(1), &sealed).is_err());
        }

        #[test]
        fn any_bytes_are_refused_without_a_panic(bytes: Vec<u8>) {
            prop_assert!(key(1).open(place(1), &bytes).is_err());
        }
    }

    #[test]
    fn the_same_text_is_sealed_differently_each_time() {
        assert_ne!(key(1).seal(place(1), b"x"), key(1).seal(place(1), b"x"));
    }

    #[test]
    fn debug_output_has_no_key() {
        assert_eq!(format!("{:?}", key(7)), "SealingKey(..)");
    }

    #[test]
    fn a_wrong_key_is_told_from_damage() {
        let sealed = key(1).seal(place(1), b"x");
        let message = key(2).open(place(1), &sealed).unwrap_err().to_string();
        assert!(message.contains("was sealed with another key"), "{message}");
        let mut newer = sealed;
        newer[0] = 9;
        assert!(matches!(key(1).open(place(1), &newer), Err(SealError::UnknownVersion(9))));
    }

    #[test]
    fn a_key_file_is_made_once_and_is_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let barrier = Barrier::new(8);
        let ids: Vec<_> = thread::scope(|scope| {
            let make = || {
                barrier.wait();
                SealingKey::load_or_create(&path).unwrap().id
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_key_file_that_others_can_read_or_that_is_cut_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        SealingKey::load_or_create(&path).unwrap();
        for mode in [0o640, 0o604, 0o620] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let message = SealingKey::load_or_create(&path).unwrap_err().to_string();
            assert!(message.contains(&format!("chmod 600 {}", path.display())), "{message}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        for text in ["", "abcd", &"0".repeat(63), &"0".repeat(128), &"x".repeat(64)] {
            fs::write(&path, text).unwrap();
            assert!(matches!(SealingKey::load_or_create(&path), Err(SealError::BadKeyFile(_))), "{text}");
            assert!(matches!(SealingKey::from_hex(text), Err(SealError::NotAKey)), "{text}");
        }
    }
}
