//! Idempotency keys: a request that is sent again gets the resource that the first one made.
//!
//! ```text
//! begin ──▶ in_progress ──finish──▶ done ──24 h──▶ (row gone)
//!               │
//!               └──forget: it failed, the key is free again
//! ```
//!
//! A key belongs to the token that sent it, and names one request: its operation and the hash of its body. The
//! same key with another request is refused, as the client would take the first resource for the second. Only
//! hashes of keys and bodies are stored.
//!
//! Invariant: of concurrent calls of [`Store::begin_idempotent`] with one key, one gets [`Begun::New`] and the others
//! find its row, over all servers (primary key).
//!
//! A row in progress whose owner is dead was interrupted by a crash. [`Store::take_over_idempotent`] gives it to
//! one of the servers that see it, which looks up the resource and finishes or forgets the row. For that a caller
//! sets the resource id at the begin, before it makes the resource.

use chrono::{DateTime, TimeDelta, Utc};
use emergent_wire::TokenId;
use emergent_wire::id::ServerId;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::db::Lock;
use crate::error::{Result, RowKind, StoreError};
use crate::open::Store;
use crate::query::query;
use crate::row::{Reader, Row};
use crate::types::clean;

const TABLE: &str = "idempotency_keys";
/// A key is free again after this time.
pub const IDEMPOTENCY_KEY_LIFETIME: TimeDelta = TimeDelta::hours(24);
/// The longest key.
pub const MAX_IDEMPOTENCY_KEY_BYTES: usize = 255;
/// The most keys that one token has at a time.
pub const MAX_IDEMPOTENCY_KEYS: u32 = 10_000;
/// The number of attempts to begin a request: another server can remove the row between the two statements.
const TRIES: usize = 5;
/// The number of rows that one statement of the pruning removes.
const PRUNE_BATCH: i64 = 1000;

/// A request that carries a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotentRequest {
    token_id: TokenId,
    key_hash: Vec<u8>,
    operation: String,
    request_hash: Vec<u8>,
}

impl IdempotentRequest {
    /// A request of `token_id` with the client's `key` (1 to 255 bytes). `body` is the request as it is compared: the
    /// bytes of its body, or any other text that is the same for the same request.
    pub fn new(token_id: TokenId, key: &str, operation: &str, body: &[u8]) -> Result<Self> {
        if key.is_empty() || key.len() > MAX_IDEMPOTENCY_KEY_BYTES {
            return Err(StoreError::BadIdempotencyKey);
        }
        Ok(Self {
            token_id,
            key_hash: Sha256::digest(key).to_vec(),
            operation: clean(operation).into_owned(),
            request_hash: Sha256::digest(body).to_vec(),
        })
    }
}

/// The status of a request with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdempotencyStatus {
    /// It runs, or was interrupted by the end of its server.
    InProgress,
    /// It has succeeded.
    Done,
}

impl std::str::FromStr for IdempotencyStatus {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "in_progress" => Ok(Self::InProgress),
            "done" => Ok(Self::Done),
            other => Err(format!("'{other}' is none of 'in_progress' 'done'")),
        }
    }
}

/// An earlier request with the same key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EarlierRequest {
    /// The resource that it made or is making, if that is known.
    pub resource_id: Option<Uuid>,
    /// Its status.
    pub status: IdempotencyStatus,
    /// The server that works on it; none when it is done.
    pub owner: Option<ServerId>,
    /// The time it was received.
    pub created_at: DateTime<Utc>,
}

/// The result of [`Store::begin_idempotent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begun {
    /// Nothing: this call works on the request, and finishes or forgets it.
    New,
    /// The same request was sent before.
    Earlier(EarlierRequest),
}

impl EarlierRequest {
    fn from_row(row: &Row, request: &IdempotentRequest) -> Result<Self> {
        let row = Reader::with_key(row, TABLE, hex::encode(&request.key_hash));
        let is_same =
            row.text("operation")? == request.operation && row.bytes("request_hash")? == request.request_hash;
        if !is_same {
            return Err(StoreError::IdempotencyKeyReused);
        }
        Ok(Self {
            resource_id: row.uuid_or_null("resource_id")?,
            status: row.name("status")?,
            owner: row.uuid_or_null("owner")?.map(ServerId),
            created_at: row.time("created_at")?,
        })
    }
}

impl Store {
    /// Begins a request, or finds the same request that was sent before. `resource_id` is the id of the resource that the
    /// request creates, if it is known already.
    pub async fn begin_idempotent(
        &self,
        request: &IdempotentRequest,
        resource_id: Option<Uuid>,
        now: DateTime<Utc>,
    ) -> Result<Begun> {
        for _ in 0..TRIES {
            if let Some(begun) = self.try_begin(request, resource_id, now).await? {
                return Ok(begun);
            }
        }
        Err(StoreError::Unavailable(sqlx::Error::RowNotFound))
    }

    async fn try_begin(
        &self,
        request: &IdempotentRequest,
        resource_id: Option<Uuid>,
        now: DateTime<Utc>,
    ) -> Result<Option<Begun>> {
        self.db().transaction(Lock::None, async |connection| {
            query(
                "DELETE FROM idempotency_keys WHERE token_id = $1 AND key_hash = $2 AND created_at <= $3",
            )
            .bind(request.token_id.0)
            .bind(request.key_hash.as_slice())
            .bind(now - IDEMPOTENCY_KEY_LIFETIME)
            .execute(connection)
            .await?;
            let inserted = query(
                "INSERT INTO idempotency_keys (token_id, key_hash, operation, request_hash, resource_id, status,
                     owner, created_at)
                 VALUES ($1, $2, $3, $4, $5, 'in_progress', $6, $7)
                 ON CONFLICT (token_id, key_hash) DO NOTHING",
            )
            .bind(request.token_id.0)
            .bind(request.key_hash.as_slice())
            .bind(request.operation.as_str())
            .bind(request.request_hash.as_slice())
            .bind(resource_id)
            .bind(self.server().0)
            .bind(now)
            .execute(connection)
            .await?;
            if inserted == 1 {
                let counted = query(
                    "SELECT COUNT(*) AS count FROM
                     (SELECT 1 FROM idempotency_keys WHERE token_id = $1 LIMIT $2) AS counted",
                );
                let limit = i64::from(MAX_IDEMPOTENCY_KEYS) + 1;
                let keys = counted.bind(request.token_id.0).bind(limit).fetch_count(connection).await?;
                if keys > u64::from(MAX_IDEMPOTENCY_KEYS) {
                    return Err(StoreError::TooManyIdempotencyKeys { limit: MAX_IDEMPOTENCY_KEYS });
                }
                return Ok(Some(Begun::New));
            }
            let row = query(
                "SELECT operation, request_hash, resource_id, status, owner, created_at FROM idempotency_keys
                 WHERE token_id = $1 AND key_hash = $2",
            )
            .bind(request.token_id.0)
            .bind(request.key_hash.as_slice())
            .fetch_optional(connection)
            .await?;
            // None: it was forgotten in this moment.
            row.map(|row| EarlierRequest::from_row(&row, request).map(Begun::Earlier)).transpose()
        }).await
    }

    /// The request that this server began has made its resource.
    pub async fn finish_idempotent(&self, request: &IdempotentRequest, resource_id: Uuid) -> Result<()> {
        let finished = query(
            "UPDATE idempotency_keys SET status = 'done', owner = NULL, resource_id = $3
             WHERE token_id = $1 AND key_hash = $2 AND status = 'in_progress' AND owner = $4",
        )
        .bind(request.token_id.0)
        .bind(request.key_hash.as_slice())
        .bind(resource_id)
        .bind(self.server().0)
        .execute(&mut self.db().writer().await?)
        .await?;
        if finished == 0 {
            let (kind, id) = (RowKind::IdempotencyKey, hex::encode(&request.key_hash));
            return Err(StoreError::NotFound { kind, id });
        }
        Ok(())
    }

    /// The request that this server began has failed: the key is free again. Forgetting twice is no error.
    pub async fn forget_idempotent(&self, request: &IdempotentRequest) -> Result<()> {
        query(
            "DELETE FROM idempotency_keys
             WHERE token_id = $1 AND key_hash = $2 AND status = 'in_progress' AND owner = $3",
        )
        .bind(request.token_id.0)
        .bind(request.key_hash.as_slice())
        .bind(self.server().0)
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(())
    }

    /// Makes this server the one that works on an interrupted request, if `from` is still its owner. One of the
    /// servers that try gets true.
    pub async fn take_over_idempotent(
        &self,
        request: &IdempotentRequest,
        from: Option<ServerId>,
    ) -> Result<bool> {
        let taken = query(
            "UPDATE idempotency_keys SET owner = $3
             WHERE token_id = $1 AND key_hash = $2 AND status = 'in_progress'
               AND owner IS NOT DISTINCT FROM $4",
        )
        .bind(request.token_id.0)
        .bind(request.key_hash.as_slice())
        .bind(self.server().0)
        .bind(from.map(|from| from.0))
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(taken == 1)
    }

    /// Removes keys that are older than 24 hours and gives their number.
    pub async fn prune_idempotency_keys(&self, now: DateTime<Utc>) -> Result<u64> {
        let mut pruned = 0;
        loop {
            let removed = query(
                "DELETE FROM idempotency_keys WHERE (token_id, key_hash) IN (
                 SELECT token_id, key_hash FROM idempotency_keys WHERE created_at <= $1 LIMIT $2)",
            )
            .bind(now - IDEMPOTENCY_KEY_LIFETIME)
            .bind(PRUNE_BATCH)
            .execute(&mut self.db().writer().await?)
            .await?;
            pruned += removed;
            if removed == 0 {
                return Ok(pruned);
            }
        }
    }
}
