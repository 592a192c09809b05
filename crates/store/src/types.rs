//! The types on which the engines differ, and how a row is read.
//!
//! | meaning   | PostgreSQL  | SQLite                                          |
//! |-----------|-------------|-------------------------------------------------|
//! | id        | UUID        | TEXT, lower-case with hyphens                   |
//! | time      | TIMESTAMPTZ | TEXT, `2026-01-31T12:00:00.000000Z`, 27 bytes   |
//! | structure | JSONB       | TEXT                                            |
//!
//! Invariant: both engines order ids and times the same way, as the text has a fixed width.

use std::borrow::Cow;
use std::fmt::Display;
use std::str::FromStr;

use chrono::{DateTime, SubsecRound, Utc};
use serde::de::DeserializeOwned;
use serde_json::Value;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::PgRow;
use sqlx::sqlite::SqliteRow;
use sqlx::types::Json;
use sqlx::{Database, Decode, Encode, Postgres, Row, Sqlite, Type};
use uuid::Uuid;

use crate::error::{Result, StoreError};

/// An id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DbUuid(pub(crate) Uuid);

/// A point in time, to the microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DbTime(DateTime<Utc>);

impl DbTime {
    /// Both engines keep microseconds; what is finer is cut off here, so that they agree.
    pub(crate) fn new(time: DateTime<Utc>) -> Self {
        Self(time.trunc_subsecs(6))
    }

    pub(crate) fn get(self) -> DateTime<Utc> {
        self.0
    }

    fn to_text(self) -> String {
        self.0.format("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
    }
}

macro_rules! delegate_to_postgres {
    ($wrapper:ident, $inner:ty) => {
        impl Type<Postgres> for $wrapper {
            fn type_info() -> <Postgres as Database>::TypeInfo {
                <$inner as Type<Postgres>>::type_info()
            }
        }

        impl Encode<'_, Postgres> for $wrapper {
            fn encode_by_ref(
                &self,
                buffer: &mut <Postgres as Database>::ArgumentBuffer,
            ) -> std::result::Result<IsNull, BoxDynError> {
                <$inner as Encode<'_, Postgres>>::encode_by_ref(&self.0, buffer)
            }
        }

        impl<'r> Decode<'r, Postgres> for $wrapper {
            fn decode(value: <Postgres as Database>::ValueRef<'r>) -> std::result::Result<Self, BoxDynError> {
                <$inner as Decode<'r, Postgres>>::decode(value).map(Self)
            }
        }
    };
}

macro_rules! text_in_sqlite {
    ($wrapper:ident, |$value:ident| $to_text:expr, |$text:ident| $from_text:expr) => {
        impl Type<Sqlite> for $wrapper {
            fn type_info() -> <Sqlite as Database>::TypeInfo {
                <String as Type<Sqlite>>::type_info()
            }
        }

        impl Encode<'_, Sqlite> for $wrapper {
            fn encode_by_ref(
                &self,
                buffer: &mut <Sqlite as Database>::ArgumentBuffer,
            ) -> std::result::Result<IsNull, BoxDynError> {
                let $value = *self;
                <String as Encode<'_, Sqlite>>::encode($to_text, buffer)
            }
        }

        impl<'r> Decode<'r, Sqlite> for $wrapper {
            fn decode(value: <Sqlite as Database>::ValueRef<'r>) -> std::result::Result<Self, BoxDynError> {
                let $text = <&str as Decode<'r, Sqlite>>::decode(value)?;
                $from_text
            }
        }
    };
}

delegate_to_postgres!(DbUuid, Uuid);
text_in_sqlite!(DbUuid, |id| id.0.hyphenated().to_string(), |text| Ok(Self(Uuid::parse_str(text)?)));

delegate_to_postgres!(DbTime, DateTime<Utc>);
text_in_sqlite!(DbTime, |time| time.to_text(), |text| {
    Ok(Self(DateTime::parse_from_rfc3339(text)?.to_utc()))
});

/// Text that PostgreSQL takes too: it has no NUL.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{fffd}")) } else { Cow::Borrowed(text) }
}

/// JSON that PostgreSQL takes too: its texts have no NUL.
pub(crate) fn clean_json(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(clean(&text).into_owned()),
        Value::Array(items) => items.into_iter().map(clean_json).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (clean(&name).into_owned(), clean_json(value))).collect()
        }
        other => other,
    }
}

type Read<T> = std::result::Result<Option<T>, sqlx::Error>;

/// A row of either engine, column by column.
pub(crate) trait DbRow {
    fn get_text(&self, column: &str) -> Read<String>;
    fn get_int(&self, column: &str) -> Read<i64>;
    fn get_bool(&self, column: &str) -> Read<bool>;
    fn get_bytes(&self, column: &str) -> Read<Vec<u8>>;
    fn get_uuid(&self, column: &str) -> Read<DbUuid>;
    fn get_time(&self, column: &str) -> Read<DbTime>;
    fn get_json(&self, column: &str) -> Read<Json<Value>>;
}

macro_rules! db_row {
    ($row:ty: $($method:ident -> $type:ty),*) => {
        impl DbRow for $row {
            $(fn $method(&self, column: &str) -> Read<$type> {
                self.try_get(column)
            })*
        }
    };
    ($($row:ty),*) => {
        $(db_row!($row: get_text -> String, get_int -> i64, get_bool -> bool, get_bytes -> Vec<u8>,
            get_uuid -> DbUuid, get_time -> DbTime, get_json -> Json<Value>);)*
    };
}

db_row!(SqliteRow, PgRow);

/// Reads the columns of one row; what it can't read it names by table, key and column.
pub(crate) struct Reader<'r, R> {
    row: &'r R,
    table: &'static str,
    key: String,
}

impl<'r, R: DbRow> Reader<'r, R> {
    /// A reader of a row whose key is the id in column `id`.
    pub(crate) fn by_id(row: &'r R, table: &'static str) -> Self {
        let key = match row.get_uuid("id") {
            Ok(Some(id)) => id.0.to_string(),
            // It will fail again, with its reason, when the id is read.
            _ => "(unknown id)".to_owned(),
        };
        Self { row, table, key }
    }

    /// A reader of a row with a known key.
    pub(crate) fn with_key(row: &'r R, table: &'static str, key: impl Display) -> Self {
        let key = key.to_string();
        Self { row, table, key }
    }

    pub(crate) fn corrupt(&self, column: &'static str, reason: impl Display) -> StoreError {
        StoreError::Corrupt { table: self.table, row: self.key.clone(), column, reason: reason.to_string() }
    }

    fn check<T>(&self, column: &'static str, value: Read<T>) -> Result<Option<T>> {
        value.map_err(|error| self.corrupt(column, error))
    }

    fn need<T>(&self, column: &'static str, value: Result<Option<T>>) -> Result<T> {
        value?.ok_or_else(|| self.corrupt(column, "it is NULL"))
    }

    pub(crate) fn text_or_null(&self, column: &'static str) -> Result<Option<String>> {
        self.check(column, self.row.get_text(column))
    }

    pub(crate) fn text(&self, column: &'static str) -> Result<String> {
        self.need(column, self.text_or_null(column))
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

    pub(crate) fn unsigned_or_null(&self, column: &'static str) -> Result<Option<u64>> {
        let number = self.check(column, self.row.get_int(column))?;
        number.map(u64::try_from).transpose().map_err(|_| self.corrupt(column, "it is negative"))
    }

    pub(crate) fn unsigned(&self, column: &'static str) -> Result<u64> {
        self.need(column, self.unsigned_or_null(column))
    }

    pub(crate) fn boolean(&self, column: &'static str) -> Result<bool> {
        self.need(column, self.check(column, self.row.get_bool(column)))
    }

    pub(crate) fn bytes_or_null(&self, column: &'static str) -> Result<Option<Vec<u8>>> {
        self.check(column, self.row.get_bytes(column))
    }

    pub(crate) fn bytes(&self, column: &'static str) -> Result<Vec<u8>> {
        self.need(column, self.bytes_or_null(column))
    }

    pub(crate) fn uuid_or_null(&self, column: &'static str) -> Result<Option<Uuid>> {
        Ok(self.check(column, self.row.get_uuid(column))?.map(|id| id.0))
    }

    pub(crate) fn uuid(&self, column: &'static str) -> Result<Uuid> {
        self.need(column, self.uuid_or_null(column))
    }

    pub(crate) fn time_or_null(&self, column: &'static str) -> Result<Option<DateTime<Utc>>> {
        Ok(self.check(column, self.row.get_time(column))?.map(DbTime::get))
    }

    pub(crate) fn time(&self, column: &'static str) -> Result<DateTime<Utc>> {
        self.need(column, self.time_or_null(column))
    }

    pub(crate) fn json_or_null<T: DeserializeOwned>(&self, column: &'static str) -> Result<Option<T>> {
        let value = self.check(column, self.row.get_json(column))?;
        value
            .map(|Json(value)| serde_json::from_value(value))
            .transpose()
            .map_err(|error| self.corrupt(column, error))
    }

    pub(crate) fn json<T: DeserializeOwned>(&self, column: &'static str) -> Result<T> {
        self.need(column, self.json_or_null(column))
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeZone;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn time() -> impl Strategy<Value = DateTime<Utc>> {
        // From 0000 to 9999: four digits.
        (-62_167_219_200i64..253_402_300_799, 0u32..1_000_000_000)
            .prop_map(|(seconds, nanos)| Utc.timestamp_opt(seconds, nanos).unwrap())
    }

    proptest! {
        #[test]
        fn times_as_text_have_one_width_and_sort_as_times(a in time(), b in time()) {
            let (a, b) = (DbTime::new(a), DbTime::new(b));
            prop_assert_eq!(a.to_text().len(), 27);
            prop_assert_eq!(a.get().cmp(&b.get()), a.to_text().cmp(&b.to_text()));
            prop_assert_eq!(DateTime::parse_from_rfc3339(&a.to_text()).unwrap().to_utc(), a.get());
        }

        #[test]
        fn ids_as_text_sort_as_ids(a: u128, b: u128) {
            let (a, b) = (Uuid::from_u128(a), Uuid::from_u128(b));
            prop_assert_eq!(a.cmp(&b), a.hyphenated().to_string().cmp(&b.hyphenated().to_string()));
        }
    }

    #[test]
    fn json_is_cleaned_of_what_postgresql_would_refuse() {
        let dirty = json!({"a\0": ["x\0y", 1.5, null, true]});
        let clean = json!({"a\u{fffd}": ["x\u{fffd}y", 1.5, null, true]});
        assert_eq!(clean_json(dirty), clean);
    }
}
