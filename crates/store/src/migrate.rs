//! Brings the schema up to date when the store is opened.
//!
//! Migrations are embedded, numbered from 1 without a gap, and only go forward. All that are missing are applied
//! in one transaction, so a schema is never half migrated; two servers that start at once take turns (advisory
//! lock). The checksum of each applied one is recorded: a database from another build, or from a newer
//! program, is refused before anything is touched.
//!
//! They are written once, in PostgreSQL's words; [`for_sqlite`] turns them into SQLite's. One that changes data in a
//! way that SQL can't has a step in Rust, which runs after its SQL in the same transaction.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use sqlx::AssertSqlSafe;

use crate::db::{Connection, Lock, transaction};
use crate::error::{Result, StoreError};
use crate::query::query;
use crate::row::{Reader, Row};
use crate::stored_credentials::remove_stored_credentials;

struct Migration {
    version: i64,
    sql: &'static str,
}

/// The migration whose step in Rust removes credentials from stored git URLs.
const GIT_CREDENTIALS: i64 = 5;

const MIGRATIONS: &[Migration] = &[
    Migration { version: 1, sql: include_str!("../migrations/0001_initial.sql") },
    Migration { version: 2, sql: include_str!("../migrations/0002_lifecycle.sql") },
    Migration { version: 3, sql: include_str!("../migrations/0003_mcp.sql") },
    Migration { version: 4, sql: include_str!("../migrations/0004_memory_snapshots.sql") },
    Migration { version: GIT_CREDENTIALS, sql: include_str!("../migrations/0005_git_credentials.sql") },
    Migration { version: 6, sql: include_str!("../migrations/0006_idempotency_keys.sql") },
    Migration { version: 7, sql: include_str!("../migrations/0007_principals.sql") },
];

/// The schema version that this program works with.
pub const SCHEMA_VERSION: i64 = MIGRATIONS[MIGRATIONS.len() - 1].version;

const HISTORY: &str = "CREATE TABLE IF NOT EXISTS core.schema_migrations (
    version BIGINT PRIMARY KEY,
    checksum BYTEA NOT NULL,
    applied_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
)";

impl Migration {
    fn checksum(&self) -> Vec<u8> {
        Sha256::digest(self.sql).to_vec()
    }
}

/// Applies the missing migrations to the SQLite database.
pub(crate) async fn sqlite(connection: Connection) -> Result<()> {
    transaction(connection, Lock::Migrate, async |connection| {
        connection.run(AssertSqlSafe(for_sqlite(HISTORY))).await?;
        let rows = query("SELECT version, checksum FROM schema_migrations").fetch_all(connection).await?;
        for migration in missing(&rows)? {
            connection.run(AssertSqlSafe(for_sqlite(migration.sql))).await?;
            if migration.version == GIT_CREDENTIALS {
                // Otherwise the old values stay readable in the free space of the file's pages.
                connection.run("PRAGMA secure_delete = ON").await?;
                remove_stored_credentials(connection).await?;
            }
            record(
                connection,
                "INSERT INTO schema_migrations (version, checksum) VALUES ($1, $2)",
                migration,
            )
            .await?;
        }
        Ok(())
    })
    .await
}

/// Applies the missing migrations to the PostgreSQL database. The connection has the default search path.
pub(crate) async fn postgres(connection: Connection) -> Result<()> {
    transaction(connection, Lock::Migrate, async |connection| {
        // A server may lack the right that `CREATE SCHEMA IF NOT EXISTS` needs, on a database whose schemas an
        // administrator made for it. So the schemas are looked up first.
        for (schema, create) in [("kb", "CREATE SCHEMA kb"), ("core", "CREATE SCHEMA core")] {
            let found = query("SELECT COUNT(*) AS count FROM pg_namespace WHERE nspname = $1").bind(schema);
            if found.fetch_count(connection).await? == 0 {
                connection.run(create).await?;
            }
        }
        connection.run(HISTORY).await?;
        let rows =
            query("SELECT version, checksum FROM core.schema_migrations").fetch_all(connection).await?;
        for migration in missing(&rows)? {
            connection.run(migration.sql).await?;
            if migration.version == GIT_CREDENTIALS {
                connection.run("SET LOCAL search_path TO kb, core").await?;
                remove_stored_credentials(connection).await?;
                connection.run("SET LOCAL search_path TO DEFAULT").await?;
            }
            let insert = "INSERT INTO core.schema_migrations (version, checksum) VALUES ($1, $2)";
            record(connection, insert, migration).await?;
        }
        Ok(())
    })
    .await
}

/// Records that a migration was applied.
async fn record(connection: &mut Connection, insert: &'static str, migration: &Migration) -> Result<()> {
    query(insert).bind(migration.version).bind(migration.checksum().as_slice()).execute(connection).await?;
    tracing::info!(version = migration.version, "migrated the database");
    Ok(())
}

/// The migrations that the recorded ones lack, once those were found to be ours.
fn missing(rows: &[Row]) -> Result<Vec<&'static Migration>> {
    let mut applied = BTreeMap::new();
    for row in rows {
        let reader = Reader::with_key(row, "schema_migrations", "(any)");
        let version = reader.integer("version")?;
        applied.insert(version, reader.bytes("checksum")?);
    }
    if let Some((&found, _)) = applied.last_key_value()
        && found > SCHEMA_VERSION
    {
        let known = SCHEMA_VERSION;
        return Err(StoreError::TooNew { found, known });
    }
    let mut missing = Vec::new();
    for migration in MIGRATIONS {
        match applied.remove(&migration.version) {
            None => missing.push(migration),
            Some(checksum) if checksum == migration.checksum() => {}
            Some(_) => {
                let version = migration.version;
                return Err(StoreError::MigrationChanged { version });
            }
        }
    }
    match applied.first_key_value() {
        Some((&version, _)) => Err(StoreError::MigrationChanged { version }),
        None => Ok(missing),
    }
}

/// Turns a migration into SQLite's words. Outside of quotes and comments:
///
/// - the schema prefixes `kb.` and `core.` are dropped,
/// - the types UUID, TIMESTAMPTZ, JSONB become TEXT, BYTEA becomes BLOB, BIGINT and BOOLEAN become INTEGER,
/// - `NOW()` becomes the time as [`time_text`](crate::types::time_text) writes it (to the millisecond).
///
/// Types and `NOW` are found in capitals only, which is how migrations write them.
pub(crate) fn for_sqlite(sql: &str) -> String {
    const NOW: &str = "(strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))";
    let mut out = String::with_capacity(sql.len());
    let mut rest = sql;
    while let Some(first) = rest.chars().next() {
        let (token, kind) = next_token(rest, first);
        rest = &rest[token.len()..];
        if kind == Token::Word {
            match token {
                "kb" | "core" if rest.starts_with('.') => rest = &rest[1..],
                "UUID" | "TIMESTAMPTZ" | "JSONB" => out.push_str("TEXT"),
                "BYTEA" => out.push_str("BLOB"),
                "BIGINT" | "BOOLEAN" => out.push_str("INTEGER"),
                "NOW" if rest.starts_with("()") => {
                    rest = &rest[2..];
                    out.push_str(NOW);
                }
                word => out.push_str(word),
            }
        } else {
            out.push_str(token);
        }
    }
    out
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Token {
    Word,
    /// Quoted text, a comment, or a single other character: copied as it is.
    Verbatim,
}

fn next_token(rest: &str, first: char) -> (&str, Token) {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || !c.is_ascii();
    let end = if word(first) {
        let end = rest.find(|c| !word(c)).unwrap_or(rest.len());
        return (&rest[..end], Token::Word);
    } else if first == '\'' || first == '"' {
        // A doubled quote inside ends one quoted text and begins the next: the same bytes are copied.
        rest[1..].find(first).map(|at| at + 2)
    } else if rest.starts_with("--") {
        rest.find('\n')
    } else if rest.starts_with("/*") {
        rest.find("*/").map(|at| at + 2)
    } else {
        Some(first.len_utf8())
    };
    (&rest[..end.unwrap_or(rest.len())], Token::Verbatim)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn versions_count_from_one() {
        for (index, migration) in MIGRATIONS.iter().enumerate() {
            assert_eq!(migration.version, i64::try_from(index).unwrap() + 1);
        }
    }

    #[test]
    fn an_applied_migration_never_changes() {
        // Add a line for each new migration; never change one: databases in the field have it already.
        let checksums: Vec<_> = MIGRATIONS.iter().map(|m| hex::encode(m.checksum())).collect();
        assert_eq!(
            checksums,
            [
                "7ef5249359895cadd08a5f49be755df79f0cbdf7b4685df4db0b5268b026d6ce",
                "e3a9ae6f1746e4c42dfd57ae1f294d967296c64af1b8c91a682c48a754b88bc9",
                "805e3acead371f4b92c024172d3e9715f535c50321c5ee1c9795eb0b6dce312c",
                "240606f018aaa5a8ed70846ddbfa7c38b123c7b68a48c426994ad3487296682e",
                "e73c92bc8134281a88560a065105c0cdf2c8e23d372c5aeb32ed7334b52c692d",
                "da5aeebbe4ed2e97b5994bf03f62b60d6d94c216cc2aaae2891e2ed290b9c4ac",
                "8af55f247e01b252b09b5aec062855ae6fce4d039f1e67691febd8ce6b72e18b",
            ]
        );
    }

    #[test]
    fn the_schema_is_turned_into_sqlites_words() {
        let sql = "CREATE TABLE kb.t (id UUID, \"UUID\" BIGINT, at TIMESTAMPTZ DEFAULT NOW(), -- kb.UUID\n\
                   x BYTEA DEFAULT 'it''s kb.JSONB', y TEXT REFERENCES core.u(id) /* kb.x */)";
        assert_eq!(
            for_sqlite(sql),
            "CREATE TABLE t (id TEXT, \"UUID\" INTEGER, at TEXT DEFAULT \
             (strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')), -- kb.UUID\n\
             x BLOB DEFAULT 'it''s kb.JSONB', y TEXT REFERENCES u(id) /* kb.x */)"
        );
    }

    proptest! {
        #[test]
        fn any_text_is_turned_without_a_panic_and_only_once(
            text in "[a-zA-Z_.()'\"*/\\- \nü]{0,60}|\\PC{0,40}"
        ) {
            // `kb.kb.t` has no meaning, but it would be turned twice.
            prop_assume!(!text.contains("kb.kb.") && !text.contains("core.core.") && !text.contains("kb.core.")
                && !text.contains("core.kb."));
            let once = for_sqlite(&text);
            let twice = for_sqlite(&once);
            prop_assert_eq!(twice, once);
        }

        #[test]
        fn quoted_text_is_never_changed(text in "'[^']{0,40}'") {
            prop_assert_eq!(for_sqlite(&text), text);
        }

        #[test]
        fn other_words_are_never_changed(text in "[a-z_]{1,20}( [a-z_]{1,20}){0,4}") {
            prop_assert_eq!(for_sqlite(&text), text);
        }
    }
}
