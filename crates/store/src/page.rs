//! Cursors: where the next page begins, as a text that callers pass back unread.
//!
//! A cursor names the last row of its page by the list's own order, so rows that come or go between two pages
//! neither repeat nor hide others.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::error::{Result, StoreError};
use crate::query::Table;
use crate::row::{Reader, Row};
use crate::rows::Rows;

/// The most rows a page can have.
pub(crate) const MAX_PAGE: u32 = 500;

/// How many rows to ask for: one more than the page has, to see whether there is a next one.
pub(crate) fn rows_wanted(limit: u32) -> i64 {
    i64::from(limit.clamp(1, MAX_PAGE)) + 1
}

/// How many rows the page keeps of those.
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
    // Without these two columns of the last row the next page can't be found, so their damage fails the page.
    let cursor = match rows.last() {
        Some(last) if has_next => {
            let last = Reader::by_id(last, table.name);
            Some(time_cursor(last.time("created_at")?, last.uuid("id")?))
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

/// The cursor after a row in the order (time, id).
pub(crate) fn time_cursor(time: DateTime<Utc>, id: Uuid) -> String {
    URL_SAFE_NO_PAD.encode(format!("t{}/{id}", time.timestamp_micros()))
}

/// Reads [`time_cursor`].
pub(crate) fn parse_time_cursor(cursor: &str) -> Result<(DateTime<Utc>, Uuid)> {
    let parse = || {
        let text = decode(cursor)?;
        let (micros, id) = text.strip_prefix('t')?.split_once('/')?;
        let time = DateTime::from_timestamp_micros(micros.parse().ok()?)?;
        Some((time, id.parse().ok()?))
    };
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
    if cursor.len() > 128 {
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
        fn cursors_come_back(micros in -62_167_219_200_000_000i64..253_402_300_799_000_000, id: u128, seq in 0..i64::MAX) {
            let (time, id) = (DateTime::from_timestamp_micros(micros).unwrap(), Uuid::from_u128(id));
            prop_assert_eq!(parse_time_cursor(&time_cursor(time, id)).unwrap(), (time, id));
            prop_assert_eq!(parse_seq_cursor(&seq_cursor(seq.unsigned_abs())).unwrap(), seq);
        }

        #[test]
        fn other_texts_are_refused_without_a_panic(text in "\\PC{0,40}") {
            prop_assert!(parse_time_cursor(&text).is_err());
            prop_assert!(parse_seq_cursor(&text).is_err());
        }
    }
}
