//! Values in a form that both engines store and give back unchanged.
//!
//! Invariant: both engines order ids and times the same way. In SQLite they are texts of a fixed width.

use std::borrow::Cow;

use chrono::{DateTime, SubsecRound, Utc};
use serde::Serialize;
use serde_json::Value;

use crate::error::Result;

/// A time to the microsecond, which is the precision of both engines.
pub(crate) fn to_microseconds(time: DateTime<Utc>) -> DateTime<Utc> {
    time.trunc_subsecs(6)
}

/// A time as SQLite stores it.
pub(crate) fn time_text(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// Text without NUL, which PostgreSQL refuses.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{fffd}")) } else { Cow::Borrowed(text) }
}

/// JSON whose texts have no NUL.
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

/// A value as JSON whose texts have no NUL.
pub(crate) fn json_of(value: &impl Serialize) -> Result<Value> {
    let value = serde_json::to_value(value).map_err(|error| sqlx::Error::Encode(error.into()))?;
    Ok(clean_json(value))
}

#[cfg(test)]
mod tests {
    use chrono::TimeZone;
    use proptest::prelude::*;
    use serde_json::json;
    use uuid::Uuid;

    use super::*;

    fn time() -> impl Strategy<Value = DateTime<Utc>> {
        // From 0000 to 9999: four digits.
        (-62_167_219_200i64..253_402_300_799, 0u32..1_000_000_000)
            .prop_map(|(seconds, nanos)| Utc.timestamp_opt(seconds, nanos).unwrap())
    }

    proptest! {
        #[test]
        fn times_as_text_have_one_width_and_sort_as_times(a in time(), b in time()) {
            let (a, b) = (to_microseconds(a), to_microseconds(b));
            prop_assert_eq!(time_text(a).len(), 27);
            prop_assert_eq!(a.cmp(&b), time_text(a).cmp(&time_text(b)));
            prop_assert_eq!(DateTime::parse_from_rfc3339(&time_text(a)).unwrap().to_utc(), a);
        }

        #[test]
        fn ids_as_text_sort_as_ids(a: u128, b: u128) {
            let (a, b) = (Uuid::from_u128(a), Uuid::from_u128(b));
            prop_assert_eq!(a.cmp(&b), a.hyphenated().to_string().cmp(&b.hyphenated().to_string()));
        }
    }

    #[test]
    fn json_is_cleaned_of_nul() {
        let dirty = json!({"a\0": ["x\0y", 1.5, null, true]});
        let clean = json!({"a\u{fffd}": ["x\u{fffd}y", 1.5, null, true]});
        assert_eq!(clean_json(dirty), clean);
    }
}
