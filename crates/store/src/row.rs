//! Reads the rows of either engine.
//!
//! | type       | PostgreSQL  | SQLite                                          |
//! |------------|-------------|-------------------------------------------------|
//! | id         | UUID        | TEXT, lower-case with hyphens                   |
//! | time       | TIMESTAMPTZ | TEXT, `2026-01-31T12:00:00.000000Z`, 27 bytes   |
//! | JSON       | JSONB       | TEXT                                            |
//!
//! Invariant: a value that this program does not write is [`StoreError::Corrupt`], which names the table, the row and
//! the column. No reader puts a default in its place.

use std::fmt::Display;
use std::str::FromStr;

use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;
use sqlx::postgres::PgRow;
use sqlx::sqlite::SqliteRow;
use sqlx::types::Json;
use sqlx::{Decode, Postgres, Row as _, Sqlite, Type};
use uuid::Uuid;

use crate::error::{Result, StoreError};

/// A row of either engine.
pub(crate) enum Row {
    Sqlite(SqliteRow),
    Postgres(PgRow),
}

/// Reads the columns of one row. Its errors name the table, the row and the column.
pub(crate) struct Reader<'r> {
    row: &'r Row,
    table: &'static str,
    key: String,
}

impl<'r> Reader<'r> {
    /// A reader of a row whose key is the id in column `id`.
    pub(crate) fn by_id(row: &'r Row, table: &'static str) -> Self {
        let mut reader = Self::with_key(row, table, "(unreadable id)");
        // An id that can't be read is an error when the caller reads it.
        if let Ok(id) = reader.uuid("id") {
            reader.key = id.to_string();
        }
        reader
    }

    /// A reader of a row with a known key.
    pub(crate) fn with_key(row: &'r Row, table: &'static str, key: impl Display) -> Self {
        Self { row, table, key: key.to_string() }
    }

    pub(crate) fn corrupt(&self, column: &'static str, reason: impl Display) -> StoreError {
        StoreError::Corrupt { table: self.table, row: self.key.clone(), column, reason: reason.to_string() }
    }

    /// A value that both engines store in the same type.
    fn value<T>(&self, column: &'static str) -> Result<Option<T>>
    where
        T: for<'v> Decode<'v, Sqlite> + Type<Sqlite> + for<'v> Decode<'v, Postgres> + Type<Postgres>,
    {
        let value = match self.row {
            Row::Sqlite(row) => row.try_get(column),
            Row::Postgres(row) => row.try_get(column),
        };
        value.map_err(|error| self.corrupt(column, error))
    }

    /// A value that SQLite stores as text.
    fn value_or_text<T>(
        &self,
        column: &'static str,
        from_text: impl FnOnce(&str) -> std::result::Result<T, String>,
    ) -> Result<Option<T>>
    where
        T: for<'v> Decode<'v, Postgres> + Type<Postgres>,
    {
        match self.row {
            Row::Sqlite(_) => {
                let text: Option<String> = self.value(column)?;
                text.map(|text| from_text(&text)).transpose().map_err(|error| self.corrupt(column, error))
            }
            Row::Postgres(row) => row.try_get(column).map_err(|error| self.corrupt(column, error)),
        }
    }

    /// A value that must not be NULL.
    pub(crate) fn not_null<T>(&self, column: &'static str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.corrupt(column, "it is NULL"))
    }

    pub(crate) fn text_or_null(&self, column: &'static str) -> Result<Option<String>> {
        self.value(column)
    }

    pub(crate) fn text(&self, column: &'static str) -> Result<String> {
        self.not_null(column, self.text_or_null(column)?)
    }

    /// One of a closed set of names.
    pub(crate) fn name<T: FromStr<Err: Display>>(&self, column: &'static str) -> Result<T> {
        self.text(column)?.parse().map_err(|error| self.corrupt(column, error))
    }

    /// One of a closed set of names, or none, written as the empty text.
    pub(crate) fn name_or_empty<T: FromStr<Err: Display>>(&self, column: &'static str) -> Result<Option<T>> {
        if self.text(column)?.is_empty() {
            return Ok(None);
        }
        self.name(column).map(Some)
    }

    pub(crate) fn integer(&self, column: &'static str) -> Result<i64> {
        self.not_null(column, self.value(column)?)
    }

    pub(crate) fn unsigned_or_null(&self, column: &'static str) -> Result<Option<u64>> {
        let number: Option<i64> = self.value(column)?;
        number.map(u64::try_from).transpose().map_err(|_| self.corrupt(column, "it is negative"))
    }

    pub(crate) fn unsigned(&self, column: &'static str) -> Result<u64> {
        self.not_null(column, self.unsigned_or_null(column)?)
    }

    pub(crate) fn boolean(&self, column: &'static str) -> Result<bool> {
        self.not_null(column, self.value(column)?)
    }

    pub(crate) fn bytes_or_null(&self, column: &'static str) -> Result<Option<Vec<u8>>> {
        self.value(column)
    }

    pub(crate) fn bytes(&self, column: &'static str) -> Result<Vec<u8>> {
        self.not_null(column, self.bytes_or_null(column)?)
    }

    pub(crate) fn uuid_or_null(&self, column: &'static str) -> Result<Option<Uuid>> {
        self.value_or_text(column, |text| text.parse().map_err(|error: uuid::Error| error.to_string()))
    }

    pub(crate) fn uuid(&self, column: &'static str) -> Result<Uuid> {
        self.not_null(column, self.uuid_or_null(column)?)
    }

    /// An id in a column of texts.
    pub(crate) fn id_in_text<T: FromStr<Err: Display>>(&self, column: &'static str) -> Result<Option<T>> {
        let text = self.text_or_null(column)?;
        text.map(|text| text.parse()).transpose().map_err(|error: T::Err| self.corrupt(column, error))
    }

    pub(crate) fn time_or_null(&self, column: &'static str) -> Result<Option<DateTime<Utc>>> {
        self.value_or_text(column, |text| {
            DateTime::parse_from_rfc3339(text).map(|time| time.to_utc()).map_err(|error| error.to_string())
        })
    }

    pub(crate) fn time(&self, column: &'static str) -> Result<DateTime<Utc>> {
        self.not_null(column, self.time_or_null(column)?)
    }

    pub(crate) fn json_or_null<T: DeserializeOwned>(&self, column: &'static str) -> Result<Option<T>> {
        let value: Option<Json<serde_json::Value>> = self.value(column)?;
        value
            .map(|Json(value)| serde_json::from_value(value))
            .transpose()
            .map_err(|error| self.corrupt(column, error))
    }

    pub(crate) fn json<T: DeserializeOwned>(&self, column: &'static str) -> Result<T> {
        self.not_null(column, self.json_or_null(column)?)
    }
}
