//! Access tokens: named, hashed at rest, revocable.
//!
//! A secret is `emt_` and 32 random bytes in hexadecimal. The database has its SHA-256 only; with 256 random
//! bits there is nothing to guess, so a slow hash would only slow down every request. The row is found by the
//! hash, and the hash compared in constant time.

use chrono::{DateTime, TimeDelta, Utc};
use emergent_wire::access::{CreateToken, CreatedToken, Token, TokenScope};
use emergent_wire::{TokenId, WorkspaceId};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::db::{Lock, in_transaction, reading, writing};
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::seal::random;
use crate::types::{DbRow, DbTime, DbUuid, Reader, clean};
use crate::workspace_rows::expiry;

/// What every secret begins with, so that people and scanners know one when they see it.
pub const TOKEN_PREFIX: &str = "emt_";

/// `last_used_at` is written at most this often.
const LAST_USED_PRECISION: TimeDelta = TimeDelta::minutes(1);

const TABLE: &str = "access_tokens";

macro_rules! columns {
    () => {
        "id, name, scope, workspace_id, secret_hash, created_at, expires_at, last_used_at, revoked_at"
    };
}

/// Why a token is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    /// Nobody was given this secret.
    #[error("not known")]
    Unknown,
    /// Its time is over.
    #[error("expired")]
    Expired,
    /// It was revoked.
    #[error("revoked")]
    Revoked,
}

struct TokenRow {
    token: Token,
    secret_hash: Vec<u8>,
    revoked_at: Option<DateTime<Utc>>,
}

impl TokenRow {
    fn from_row(row: &impl DbRow) -> Result<Self> {
        let row = Reader::by_id(row, TABLE);
        let scope = match (row.text("scope")?.as_str(), row.uuid_or_null("workspace_id")?) {
            ("admin", None) => TokenScope::Admin,
            ("workspace", Some(id)) => TokenScope::Workspace { workspace_id: WorkspaceId(id) },
            (scope, _) => return Err(row.corrupt("scope", format!("'{scope}' does not fit workspace_id"))),
        };
        let token = Token {
            id: TokenId(row.uuid("id")?),
            name: row.text("name")?,
            scope,
            created_at: row.time("created_at")?,
            expires_at: row.time_or_null("expires_at")?,
            last_used_at: row.time_or_null("last_used_at")?,
        };
        Ok(Self {
            token,
            secret_hash: row.bytes("secret_hash")?,
            revoked_at: row.time_or_null("revoked_at")?,
        })
    }
}

impl Store {
    /// Makes a token. Its secret is in the answer and nowhere else. A name is free again once its token is
    /// revoked or expired.
    pub async fn create_token(&self, request: &CreateToken, now: DateTime<Utc>) -> Result<CreatedToken> {
        let secret = format!("{TOKEN_PREFIX}{}", hex::encode(random::<32>()));
        let scope = if request.workspace_id.is_some() { "workspace" } else { "admin" };
        let id = TokenId::generate();
        let now_ = DbTime::new(now);
        let expires_at = expiry(now, request.ttl_seconds).map(DbTime::new);
        let created = in_transaction!(self.db(), Lock::None, |connection| {
            sqlx::query(
                "UPDATE access_tokens SET revoked_at = $2
                 WHERE name = $1 AND revoked_at IS NULL AND expires_at <= $2",
            )
            .bind(clean(&request.name))
            .bind(now_)
            .execute(&mut *connection)
            .await?;
            let row = sqlx::query(concat!(
                "INSERT INTO access_tokens (id, name, scope, workspace_id, secret_hash, created_at, expires_at)
                 VALUES ($1, $2, $3, $4, $5, $6, $7)
                 ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING RETURNING ",
                columns!()
            ))
            .bind(DbUuid(id.0))
            .bind(clean(&request.name))
            .bind(scope)
            .bind(request.workspace_id.map(|id| DbUuid(id.0)))
            .bind(hash(&secret))
            .bind(now_)
            .bind(expires_at)
            .fetch_optional(&mut *connection)
            .await?;
            match row {
                Some(row) => Ok(TokenRow::from_row(&row)?.token),
                None => Err(StoreError::Conflict { kind: "token named", name: request.name.clone() }),
            }
        });
        let token = created.map_err(|error| match (error, request.workspace_id) {
            (StoreError::Database(sqlx::Error::Database(error)), Some(workspace))
                if error.is_foreign_key_violation() =>
            {
                StoreError::no_workspace(workspace)
            }
            (error, _) => error,
        })?;
        Ok(CreatedToken { token, secret })
    }

    /// The token with this secret, if it is accepted at `now`.
    pub async fn verify_token(&self, secret: &str, now: DateTime<Utc>) -> Result<Token> {
        let refused = |why| Err(StoreError::TokenRefused(why));
        let hash = hash(secret);
        if let Some(token) = self.known_tokens().get(&hash, now) {
            return Ok(token);
        }
        let changes = self.known_tokens().changes();
        let found = reading!(self.db(), |connection| {
            let row =
                sqlx::query(concat!("SELECT ", columns!(), " FROM access_tokens WHERE secret_hash = $1"))
                    .bind(hash.as_slice())
                    .fetch_optional(&mut *connection)
                    .await?;
            row.map(|row| TokenRow::from_row(&row)).transpose()?
        });
        let Some(found) = found else {
            return refused(TokenRefusal::Unknown);
        };
        if !bool::from(found.secret_hash.ct_eq(&hash)) {
            return refused(TokenRefusal::Unknown);
        }
        if found.revoked_at.is_some() {
            return refused(TokenRefusal::Revoked);
        }
        if found.token.expires_at.is_some_and(|end| end <= now) {
            return refused(TokenRefusal::Expired);
        }
        let due = now - LAST_USED_PRECISION;
        if found.token.last_used_at.is_none_or(|used| used <= due)
            && let Err(error) = self.note_use(found.token.id, now, due).await
        {
            // The token is good all the same.
            tracing::warn!(token_id = %found.token.id, error = &error as &dyn std::error::Error,
                "can't write when the token was last used");
        }
        self.known_tokens().put(changes, hash, found.token.clone(), now);
        Ok(found.token)
    }

    async fn note_use(&self, id: TokenId, now: DateTime<Utc>, due: DateTime<Utc>) -> Result<()> {
        writing!(self.db(), |connection| {
            sqlx::query(
                "UPDATE access_tokens SET last_used_at = $2
                 WHERE id = $1 AND (last_used_at IS NULL OR last_used_at <= $3)",
            )
            .bind(DbUuid(id.0))
            .bind(DbTime::new(now))
            .bind(DbTime::new(due))
            .execute(&mut *connection)
            .await?;
        });
        Ok(())
    }

    /// The tokens that are not revoked, oldest first.
    pub async fn tokens(&self) -> Result<Vec<Token>> {
        reading!(self.db(), |connection| {
            let rows = sqlx::query(concat!(
                "SELECT ",
                columns!(),
                " FROM access_tokens WHERE revoked_at IS NULL ORDER BY created_at, id"
            ))
            .fetch_all(&mut *connection)
            .await?;
            rows.iter().map(|row| Ok(TokenRow::from_row(row)?.token)).collect()
        })
    }

    /// Revokes a token: it is refused from now on.
    pub async fn revoke_token(&self, id: TokenId, now: DateTime<Utc>) -> Result<()> {
        let revoked = writing!(self.db(), |connection| {
            sqlx::query("UPDATE access_tokens SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL")
                .bind(DbUuid(id.0))
                .bind(DbTime::new(now))
                .execute(&mut *connection)
                .await?
                .rows_affected()
        });
        self.known_tokens().forget();
        if revoked == 0 {
            let (kind, id) = ("token", id.to_string());
            return Err(StoreError::NotFound { kind, id });
        }
        Ok(())
    }
}

fn hash(secret: &str) -> Vec<u8> {
    Sha256::digest(secret).to_vec()
}
