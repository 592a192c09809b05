//! PostgreSQL's times as the engine stores them. Some are in no calendar: `infinity`, and years that `chrono` does not have, for
//! which its addition panics.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArgumentBuffer, PgTypeInfo, PgValueRef};
use sqlx::{Decode, Encode, Postgres, Type};

/// The beginning of the year 2000, from which PostgreSQL counts, in Unix time.
const EPOCH_MICROS: i64 = 946_684_800_000_000;

/// A TIMESTAMPTZ, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct PostgresTime(i64);

impl PostgresTime {
    #[cfg(test)]
    pub(crate) fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// None if the calendar does not have it.
    pub(crate) fn to_utc(self) -> Option<DateTime<Utc>> {
        DateTime::from_timestamp_micros(self.0.checked_add(EPOCH_MICROS)?)
    }
}

impl Type<Postgres> for PostgresTime {
    fn type_info() -> PgTypeInfo {
        <DateTime<Utc> as Type<Postgres>>::type_info()
    }
}

impl Encode<'_, Postgres> for PostgresTime {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        <i64 as Encode<Postgres>>::encode_by_ref(&self.0, buffer)
    }
}

impl<'r> Decode<'r, Postgres> for PostgresTime {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        <i64 as Decode<Postgres>>::decode(value).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_from_the_year_2000_and_infinity_is_none() {
        assert_eq!(PostgresTime(0).to_utc().unwrap().to_rfc3339(), "2000-01-01T00:00:00+00:00");
        assert_eq!(PostgresTime(-1).to_utc().unwrap().timestamp_micros(), EPOCH_MICROS - 1);
        for time in [i64::MAX, i64::MIN, i64::MAX - EPOCH_MICROS] {
            assert_eq!(PostgresTime(time).to_utc(), None);
        }
    }
}
