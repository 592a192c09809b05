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
use crate::page::StoredTime;
use crate::postgres_time::PostgresTime;
use crate::types::time_text;

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
        // A damaged id is an error when the caller reads it.
        if let Ok(id) = reader.id_in_any_form() {
            reader.key = id.to_string();
        }
        reader
    }

    /// The id in column `id`, even if no statement finds the row by it. It names a damaged row.
    pub(crate) fn id_in_any_form(&self) -> Result<Uuid> {
        self.not_null("id", self.text_or("id", parse, Ok)?)
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

    /// A value that SQLite stores as text, and PostgreSQL in a type of its own.
    fn text_or<P, T>(
        &self,
        column: &'static str,
        from_text: impl FnOnce(&str) -> std::result::Result<T, String>,
        from_postgres: impl FnOnce(P) -> std::result::Result<T, String>,
    ) -> Result<Option<T>>
    where
        P: for<'v> Decode<'v, Postgres> + Type<Postgres>,
    {
        let value = match self.row {
            Row::Sqlite(_) => self.text_or_null(column)?.map(|text| from_text(&text)),
            Row::Postgres(row) => {
                let value: Option<P> = row.try_get(column).map_err(|error| self.corrupt(column, error))?;
                value.map(from_postgres)
            }
        };
        value.transpose().map_err(|reason| self.corrupt(column, reason))
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
        let from_text = |text: &str| exactly(text, parse, |id: &Uuid| id.hyphenated().to_string());
        self.text_or(column, from_text, Ok)
    }

    pub(crate) fn uuid(&self, column: &'static str) -> Result<Uuid> {
        self.not_null(column, self.uuid_or_null(column)?)
    }

    /// An id in a column of texts.
    pub(crate) fn id_in_text<T: FromStr<Err: Display> + Display>(
        &self,
        column: &'static str,
    ) -> Result<Option<T>> {
        let text = self.text_or_null(column)?;
        let id = text.map(|text| exactly(&text, parse, T::to_string)).transpose();
        id.map_err(|error| self.corrupt(column, error))
    }

    pub(crate) fn time_or_null(&self, column: &'static str) -> Result<Option<DateTime<Utc>>> {
        let parse = |text: &str| {
            DateTime::parse_from_rfc3339(text).map(|time| time.to_utc()).map_err(|error| error.to_string())
        };
        let from_text = |text: &str| exactly(text, parse, |time| time_text(*time));
        let from_postgres =
            |time: PostgresTime| time.to_utc().ok_or_else(|| "it is infinite, or too far away".to_owned());
        self.text_or(column, from_text, from_postgres)
    }

    /// A time as the engine stores it, damaged or not.
    pub(crate) fn stored_time(&self, column: &'static str) -> Result<StoredTime> {
        let time = self.text_or(
            column,
            |text| Ok(StoredTime::Sqlite(text.to_owned())),
            |time| Ok(StoredTime::Postgres(time)),
        )?;
        self.not_null(column, time)
    }

    /// An id as the engine stores it, damaged or not.
    pub(crate) fn stored_id(&self, column: &'static str) -> Result<String> {
        let id = self.text_or(column, |text| Ok(text.to_owned()), |id: Uuid| Ok(id.to_string()))?;
        self.not_null(column, id)
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

fn parse<T: FromStr<Err: Display>>(text: &str) -> std::result::Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

/// Reads a value that is compared as a text in statements, so only the form that this program writes is the value.
fn exactly<T>(
    text: &str,
    parse: impl FnOnce(&str) -> std::result::Result<T, String>,
    written: impl FnOnce(&T) -> String,
) -> std::result::Result<T, String> {
    let value = parse(text)?;
    let written = written(&value);
    if text == written { Ok(value) } else { Err(format!("'{text}' must be written as '{written}'")) }
}
