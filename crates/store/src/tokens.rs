//! Access tokens: named, hashed at rest, revocable.
//!
//! A secret is `emt_` and 32 random bytes in hexadecimal. The database has its SHA-256 only; with 256 random
//! bits there is nothing to guess, so a slow hash would only slow down every request. The row is found by the
//! hash, and the hash compared in constant time.
//!
//! Invariant: no call revokes the last usable admin token. A token is usable while it is neither revoked nor
//! expired, and its row is not damaged. Without a usable one no token could be created any more. Calls that
//! revoke take [`Lock::Tokens`], so two of them can't each count on the token that the other one revokes.

use chrono::{DateTime, TimeDelta, Utc};
use emergent_wire::access::{CreatedToken, Token, TokenScope};
use emergent_wire::id::{ProjectId, SessionId};
use emergent_wire::{TokenId, WorkspaceId};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use uuid::Uuid;

use crate::db::{Connection, Lock};
use crate::error::{Result, RowKind, StoreError};
use crate::open::Store;
use crate::query::{Table, query};
use crate::row::{Reader, Row};
use crate::rows::Rows;
use crate::seal::random;
use crate::types::clean;
use crate::workspace_rows::expiry;

/// The prefix of each secret, by which people and secret scanners recognise it.
pub const TOKEN_PREFIX: &str = "emt_";

/// `last_used_at` is written at most this often.
const LAST_USED_PRECISION: TimeDelta = TimeDelta::minutes(1);

const TOKENS: Table = Table {
    name: "access_tokens",
    columns: "id, name, scope, project_id, session_id, workspace_id, secret_hash, created_at, expires_at, \
              last_used_at, revoked_at",
};

/// Why a token is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefusal {
    /// The secret belongs to no token.
    #[error("not known")]
    Unknown,
    /// It is expired.
    #[error("expired")]
    Expired,
    /// It was revoked.
    #[error("revoked")]
    Revoked,
}

/// A token that is to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct NewToken {
    /// Its name, unique among the tokens that are not revoked.
    pub name: String,
    /// Its scope.
    pub scope: TokenScope,
    /// It stops working after this time; never unless given.
    pub ttl_seconds: Option<u64>,
}

/// A scope as the table has it.
struct ScopeColumns {
    scope: String,
    project_id: Option<Uuid>,
    session_id: Option<Uuid>,
    workspace_id: Option<Uuid>,
}

impl From<TokenScope> for ScopeColumns {
    fn from(scope: TokenScope) -> Self {
        let (scope, project_id, session_id, workspace_id) = match scope {
            TokenScope::Admin => ("admin", None, None, None),
            TokenScope::Project { project_id } => ("project", Some(project_id), None, None),
            TokenScope::Session { session_id, workspace_id } => {
                ("session", None, Some(session_id), workspace_id)
            }
            TokenScope::Workspace { workspace_id } => ("workspace", None, None, Some(workspace_id)),
        };
        Self {
            scope: scope.to_owned(),
            project_id: project_id.map(|id| id.0),
            session_id: session_id.map(|id| id.0),
            workspace_id: workspace_id.map(|id| id.0),
        }
    }
}

impl ScopeColumns {
    /// None if the columns contradict each other.
    fn to_scope(&self) -> Option<TokenScope> {
        let workspace_id = self.workspace_id.map(WorkspaceId);
        match (self.scope.as_str(), self.project_id, self.session_id, workspace_id) {
            ("admin", None, None, None) => Some(TokenScope::Admin),
            ("project", Some(id), None, None) => Some(TokenScope::Project { project_id: ProjectId(id) }),
            ("session", None, Some(id), workspace_id) => {
                Some(TokenScope::Session { session_id: SessionId(id), workspace_id })
            }
            ("workspace", None, None, Some(workspace_id)) => Some(TokenScope::Workspace { workspace_id }),
            _ => None,
        }
    }
}

struct TokenRow {
    token: Token,
    secret_hash: Vec<u8>,
    revoked_at: Option<DateTime<Utc>>,
}

impl TokenRow {
    fn from_row(row: &Row) -> Result<Self> {
        let row = Reader::by_id(row, TOKENS.name);
        let scope = ScopeColumns {
            scope: row.text("scope")?,
            project_id: row.uuid_or_null("project_id")?,
            session_id: row.uuid_or_null("session_id")?,
            workspace_id: row.uuid_or_null("workspace_id")?,
        };
        let scope = scope.to_scope().ok_or_else(|| {
            row.corrupt("scope", format!("'{}' does not fit the ids beside it", scope.scope))
        })?;
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

/// Whether this is an admin token that is not expired.
fn is_admin_at(token: &Token, now: DateTime<Utc>) -> bool {
    token.scope == TokenScope::Admin && token.expires_at.is_none_or(|end| end > now)
}

/// Inserts a new token. Fails with [`StoreError::Conflict`] if its name is in use.
async fn insert_token(connection: &mut Connection, secret: &Secret<'_>, now: DateTime<Utc>) -> Result<Token> {
    let request = secret.request;
    let scope = ScopeColumns::from(request.scope);
    let row = TOKENS
        .returning(
            "INSERT INTO access_tokens
                 (id, name, scope, project_id, session_id, workspace_id, secret_hash, created_at, expires_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
             ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING",
        )
        .bind(secret.id.0)
        .bind(clean(&request.name))
        .bind(scope.scope)
        .bind(scope.project_id)
        .bind(scope.session_id)
        .bind(scope.workspace_id)
        .bind(hash(&secret.secret).as_slice())
        .bind(now)
        .bind(expiry(now, request.ttl_seconds))
        .fetch_optional(connection)
        .await?;
    match row {
        Some(row) => Ok(TokenRow::from_row(&row)?.token),
        None => Err(StoreError::Conflict { kind: "token named", name: request.name.clone() }),
    }
}

impl Store {
    /// Makes a token. Its secret is in the answer and nowhere else. A name is free again once its token is
    /// revoked or expired.
    pub async fn create_token(&self, request: &NewToken, now: DateTime<Utc>) -> Result<CreatedToken> {
        let secret = Secret::generate(request);
        let created = self
            .db()
            .transaction(Lock::None, async |connection| {
                query(
                    "UPDATE access_tokens SET revoked_at = $2
                     WHERE name = $1 AND revoked_at IS NULL AND expires_at <= $2",
                )
                .bind(clean(&request.name))
                .bind(now)
                .execute(connection)
                .await?;
                insert_token(connection, &secret, now).await
            })
            .await;
        secret.created(created)
    }

    /// Makes a token in place of the one with the same name, if there is one, which is revoked in the same
    /// transaction. An admin token can only be replaced by an admin token.
    ///
    /// This is how the server renews its own token at start: [`Store::revoke_token`] would refuse to revoke it
    /// first if it is the last one, and the name is not free before.
    pub async fn replace_token(&self, request: &NewToken, now: DateTime<Utc>) -> Result<CreatedToken> {
        let secret = Secret::generate(request);
        let created = self
            .db()
            .transaction(Lock::Tokens, async |connection| {
                let rows = TOKENS
                    .returning(
                        "UPDATE access_tokens SET revoked_at = $2 WHERE name = $1 AND revoked_at IS NULL",
                    )
                    .bind(clean(&request.name))
                    .bind(now)
                    .fetch_all(connection)
                    .await?;
                for row in &rows {
                    let old = TokenRow::from_row(row)?.token;
                    if old.scope == TokenScope::Admin && request.scope != TokenScope::Admin {
                        let name = request.name.clone();
                        return Err(StoreError::Conflict { kind: "admin token named", name });
                    }
                }
                insert_token(connection, &secret, now).await
            })
            .await;
        self.known_tokens().forget();
        secret.created(created)
    }

    /// The token with this secret, if it is accepted at `now`.
    pub async fn verify_token(&self, secret: &str, now: DateTime<Utc>) -> Result<Token> {
        let refused = |why| Err(StoreError::TokenRefused(why));
        let hash = hash(secret);
        if let Some(token) = self.known_tokens().get(&hash, now) {
            return Ok(token);
        }
        let changes = self.known_tokens().changes();
        let row = TOKENS
            .select("WHERE secret_hash = $1")
            .bind(hash.as_slice())
            .fetch_optional(&mut self.db().reader().await?)
            .await?;
        let Some(row) = row else {
            return refused(TokenRefusal::Unknown);
        };
        let found = TokenRow::from_row(&row)?;
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
            // The token is valid without it.
            tracing::warn!(token_id = %found.token.id, error = &error as &dyn std::error::Error,
                "can't write when the token was last used");
        }
        self.known_tokens().put(changes, hash, found.token.clone(), now);
        Ok(found.token)
    }

    /// Waits until a verified token is revoked or expires.
    pub async fn token_ended(&self, secret: &str, token: &Token) {
        /// The interval at which revocations by other servers are looked up.
        const LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(400);
        let mut taken_away = self.known_tokens().watch();
        loop {
            let left = token.expires_at.map(|end| (end - Utc::now()).to_std().unwrap_or_default());
            let pause = left.into_iter().chain(self.is_shared().then_some(LOOK_EVERY)).min();
            let next = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = taken_away.changed() => if changed.is_err() { return },
                () = next => {}
            }
            if let Err(StoreError::TokenRefused(_)) = self.verify_token(secret, Utc::now()).await {
                return;
            }
        }
    }

    /// Whether a token is usable at `now`. For work that continues after the request that began it.
    pub async fn is_token_usable(&self, id: TokenId, now: DateTime<Utc>) -> Result<bool> {
        let count = query(
            "SELECT COUNT(*) AS count FROM access_tokens
             WHERE id = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > $2)",
        );
        let count = count.bind(id.0).bind(now).fetch_count(&mut self.db().reader().await?).await?;
        Ok(count > 0)
    }

    async fn note_use(&self, id: TokenId, now: DateTime<Utc>, due: DateTime<Utc>) -> Result<()> {
        query(
            "UPDATE access_tokens SET last_used_at = $2
             WHERE id = $1 AND (last_used_at IS NULL OR last_used_at <= $3)",
        )
        .bind(id.0)
        .bind(now)
        .bind(due)
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(())
    }

    /// The tokens that are not revoked, oldest first.
    pub async fn tokens(&self) -> Result<Rows<Token>> {
        let rows = TOKENS
            .select("WHERE revoked_at IS NULL ORDER BY created_at, id")
            .fetch_all(&mut self.db().reader().await?)
            .await?;
        Rows::read(&TOKENS, &rows, |row| Ok(TokenRow::from_row(row)?.token))
    }

    /// Revokes a token: it is refused from now on. The last usable admin token is not revoked
    /// ([`StoreError::LastAdminToken`]).
    pub async fn revoke_token(&self, id: TokenId, now: DateTime<Utc>) -> Result<()> {
        let revoked = self
            .db()
            .transaction(Lock::Tokens, async |connection| {
                let row = TOKENS
                    .returning(
                        "UPDATE access_tokens SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL",
                    )
                    .bind(id.0)
                    .bind(now)
                    .fetch_optional(connection)
                    .await?;
                let Some(row) = row else {
                    let (kind, id) = (RowKind::Token, id.to_string());
                    return Err(StoreError::NotFound { kind, id });
                };
                let token = TokenRow::from_row(&row)?.token;
                if is_admin_at(&token, now) {
                    let others = TOKENS.select("WHERE scope = 'admin' AND revoked_at IS NULL");
                    let others = others.fetch_all(connection).await?;
                    // A damaged token is refused, so it is none to count on.
                    let is_usable =
                        |row| TokenRow::from_row(row).is_ok_and(|other| is_admin_at(&other.token, now));
                    if !others.iter().any(is_usable) {
                        // An error rolls the transaction back, and the revocation with it.
                        return Err(StoreError::LastAdminToken { name: token.name });
                    }
                }
                Ok(())
            })
            .await;
        self.known_tokens().forget();
        revoked
    }
}

/// The id and secret of a token that is about to be inserted.
struct Secret<'a> {
    request: &'a NewToken,
    id: TokenId,
    secret: String,
}

impl<'a> Secret<'a> {
    fn generate(request: &'a NewToken) -> Self {
        let secret = format!("{TOKEN_PREFIX}{}", hex::encode(random::<32>()));
        Self { request, id: TokenId::generate(), secret }
    }

    fn created(self, inserted: Result<Token>) -> Result<CreatedToken> {
        let token = inserted.map_err(|error| match error {
            StoreError::Database(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => {
                missing(self.request.scope)
            }
            error => error,
        })?;
        Ok(CreatedToken { token, secret: self.secret })
    }
}

/// The token names something that does not exist.
fn missing(scope: TokenScope) -> StoreError {
    let (kind, id) = match scope {
        TokenScope::Admin => (RowKind::Token, String::new()),
        TokenScope::Project { project_id } => (RowKind::Project, project_id.to_string()),
        TokenScope::Session { session_id, .. } => (RowKind::Session, session_id.to_string()),
        TokenScope::Workspace { workspace_id } => return StoreError::no_workspace(workspace_id),
    };
    StoreError::NotFound { kind, id }
}

fn hash(secret: &str) -> Vec<u8> {
    Sha256::digest(secret).to_vec()
}
