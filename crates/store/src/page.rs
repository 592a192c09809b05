//! Cursors: where the next page begins, as a text that callers pass back unread.
//!
//! A cursor names the last row of its page by the list's own order, so rows that come or go between two pages
//! neither repeat nor hide others. It has the values as the engine stores them, because a row with a damaged value has
//! a place in the order, too.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

use crate::db::Db;
use crate::error::{Result, StoreError};
use crate::postgres_time::PostgresTime;
use crate::query::{Argument, Table};
use crate::row::{Reader, Row};
use crate::rows::Rows;

/// The most rows a page can have.
pub(crate) const MAX_PAGE: u32 = 500;

/// The longest cursor. A damaged value may be of any length.
const MAX_CURSOR_BYTES: usize = 4096;

/// A time as the engine stores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum StoredTime {
    Sqlite(String),
    Postgres(PostgresTime),
}

/// The place of a row in the order (`created_at`, `id`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Place(StoredTime, String);

/// The row limit of a page's query: one more than the page has, which shows whether there is a next page.
pub(crate) fn rows_wanted(limit: u32) -> i64 {
    i64::from(limit.clamp(1, MAX_PAGE)) + 1
}

/// The most rows of one page.
fn page_length(limit: u32) -> usize {
    limit.clamp(1, MAX_PAGE) as usize
}

/// Reads a page of rows in the order (`created_at`, `id`), and gives the cursor for the next page if there is one.
pub(crate) fn read<T>(
    table: &Table,
    mut rows: Vec<Row>,
    limit: u32,
    read: impl Fn(&Row) -> Result<T>,
) -> Result<(Rows<T>, Option<String>)> {
    let has_next = rows.len() > page_length(limit);
    rows.truncate(page_length(limit));
    let cursor = match rows.last() {
        Some(last) if has_next => {
            let last = Reader::by_id(last, table.name);
            Some(place_cursor(&Place(last.stored_time("created_at")?, last.stored_id("id")?)))
        }
        _ => None,
    };
    Ok((Rows::read(table, &rows, read)?, cursor))
}

/// Cuts the extra row off, and gives the cursor for the next page if there was one.
pub(crate) fn cut<T>(rows: &mut Vec<T>, limit: u32, cursor: impl Fn(&T) -> String) -> Option<String> {
    if rows.len() <= page_length(limit) {
        return None;
    }
    rows.truncate(page_length(limit));
    rows.last().map(cursor)
}

/// The parameters for the columns `created_at` and `id` of the row before the page. NULL for the first page.
pub(crate) fn after(cursor: Option<&str>, db: &Db) -> Result<[Argument; 2]> {
    let Some(cursor) = cursor else {
        return Ok([Argument::Time(None), Argument::Id(None)]);
    };
    let Place(time, id) = parse_place_cursor(cursor)?;
    match (db, time) {
        (Db::Sqlite { .. }, StoredTime::Sqlite(time)) => {
            Ok([Argument::Text(Some(time)), Argument::Text(Some(id))])
        }
        (Db::Postgres(_), StoredTime::Postgres(time)) => {
            let id = id.parse().map_err(|_| StoreError::BadCursor)?;
            Ok([Argument::PostgresTime(time), Argument::Id(Some(id))])
        }
        _ => Err(StoreError::BadCursor),
    }
}

/// The cursor after a row in the order (`created_at`, `id`).
fn place_cursor(place: &Place) -> String {
    URL_SAFE_NO_PAD.encode(serde_json::json!(place).to_string())
}

/// Reads [`place_cursor`].
fn parse_place_cursor(cursor: &str) -> Result<Place> {
    let parse = || serde_json::from_str(&decode(cursor)?).ok();
    parse().ok_or(StoreError::BadCursor)
}

/// The cursor after a row in the order of a number.
pub(crate) fn seq_cursor(seq: u64) -> String {
    URL_SAFE_NO_PAD.encode(format!("s{seq}"))
}

/// Reads [`seq_cursor`].
pub(crate) fn parse_seq_cursor(cursor: &str) -> Result<i64> {
    let parse = || decode(cursor)?.strip_prefix('s')?.parse().ok().filter(|seq| *seq >= 0);
    parse().ok_or(StoreError::BadCursor)
}

fn decode(cursor: &str) -> Option<String> {
    if cursor.len() > MAX_CURSOR_BYTES {
        return None;
    }
    String::from_utf8(URL_SAFE_NO_PAD.decode(cursor).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn cursors_come_back(time in "\\PC{0,40}", micros: i64, id in "\\PC{0,40}", seq in 0..i64::MAX) {
            for time in [StoredTime::Sqlite(time), StoredTime::Postgres(PostgresTime::from_micros(micros))] {
                let place = Place(time, id.clone());
                prop_assert_eq!(parse_place_cursor(&place_cursor(&place)).unwrap(), place);
            }
            prop_assert_eq!(parse_seq_cursor(&seq_cursor(seq.unsigned_abs())).unwrap(), seq);
        }

        #[test]
        fn other_texts_are_refused_without_a_panic(text in "\\PC{0,40}") {
            prop_assert!(parse_place_cursor(&text).is_err());
            prop_assert!(parse_seq_cursor(&text).is_err());
        }
    }
}
