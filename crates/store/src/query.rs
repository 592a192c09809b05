//! Statements with parameters, for either engine.
//!
//! A statement has one text for both engines. Its parameters have the types of the table in [`row`](crate::row), and
//! are turned into the engine's own types when it runs.
//!
//! A [`Table`] writes the column list that its rows are read from, so that no statement repeats it.

use std::borrow::Cow;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use sqlx::error::BoxDynError;
use sqlx::postgres::PgArguments;
use sqlx::sqlite::SqliteArguments;
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, Postgres, SqlSafeStr, SqlStr, Sqlite};
use uuid::Uuid;

use crate::db::{Connection, Engine};
use crate::error::Result;
use crate::postgres_time::PostgresTime;
use crate::row::{Reader, Row};
use crate::types::{time_text, to_microseconds};

/// A table, and the columns that its rows are read from.
pub(crate) struct Table {
    pub(crate) name: &'static str,
    pub(crate) columns: &'static str,
}

impl Table {
    /// `SELECT columns FROM table …`
    pub(crate) fn select(&self, rest: &'static str) -> Query {
        // All three parts are constants.
        query(AssertSqlSafe(format!("SELECT {} FROM {} {rest}", self.columns, self.name)))
    }

    /// `… RETURNING columns`
    pub(crate) fn returning(&self, statement: &'static str) -> Query {
        query(AssertSqlSafe(format!("{statement} RETURNING {}", self.columns)))
    }
}

/// A parameter of a statement. `None` is NULL, which has a type in PostgreSQL too.
pub(crate) enum Argument {
    Text(Option<String>),
    Integer(Option<i64>),
    Boolean(Option<bool>),
    Bytes(Option<Vec<u8>>),
    Id(Option<Uuid>),
    Time(Option<DateTime<Utc>>),
    Json(Option<Value>),
    /// A time that PostgreSQL gave, whether or not the calendar has it.
    PostgresTime(PostgresTime),
}

/// A value that can be a parameter.
pub(crate) trait Bind {
    /// NULL in a column of this type.
    const NULL: Argument;

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError>;
}

impl Bind for Argument {
    const NULL: Argument = Argument::Text(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        Ok(self)
    }
}

impl<T: Bind> Bind for Option<T> {
    const NULL: Argument = T::NULL;

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        self.map_or(Ok(T::NULL), T::into_argument)
    }
}

impl Bind for String {
    const NULL: Argument = Argument::Text(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        Ok(Argument::Text(Some(self)))
    }
}

impl Bind for &str {
    const NULL: Argument = Argument::Text(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        self.to_owned().into_argument()
    }
}

impl Bind for Cow<'_, str> {
    const NULL: Argument = Argument::Text(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        self.into_owned().into_argument()
    }
}

impl Bind for i64 {
    const NULL: Argument = Argument::Integer(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        Ok(Argument::Integer(Some(self)))
    }
}

/// The columns are signed. A number beyond their range is stored as the largest.
impl Bind for u64 {
    const NULL: Argument = Argument::Integer(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        i64::try_from(self).unwrap_or(i64::MAX).into_argument()
    }
}

impl Bind for bool {
    const NULL: Argument = Argument::Boolean(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        Ok(Argument::Boolean(Some(self)))
    }
}

impl Bind for &[u8] {
    const NULL: Argument = Argument::Bytes(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        Ok(Argument::Bytes(Some(self.to_vec())))
    }
}

impl Bind for DateTime<Utc> {
    const NULL: Argument = Argument::Time(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        Ok(Argument::Time(Some(to_microseconds(self))))
    }
}

impl<T: Serialize> Bind for Json<T> {
    const NULL: Argument = Argument::Json(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        Ok(Argument::Json(Some(serde_json::to_value(self.0)?)))
    }
}

impl Bind for Uuid {
    const NULL: Argument = Argument::Id(None);

    fn into_argument(self) -> std::result::Result<Argument, BoxDynError> {
        Ok(Argument::Id(Some(self)))
    }
}

/// A statement with its parameters.
#[must_use = "a statement does nothing until it runs"]
pub(crate) struct Query {
    sql: SqlStr,
    arguments: std::result::Result<Vec<Argument>, BoxDynError>,
}

/// A statement without parameters yet.
pub(crate) fn query(sql: impl SqlSafeStr) -> Query {
    Query { sql: sql.into_sql_str(), arguments: Ok(Vec::new()) }
}

type SqliteQuery = sqlx::query::Query<'static, Sqlite, SqliteArguments>;
type PostgresQuery = sqlx::query::Query<'static, Postgres, PgArguments>;

impl Query {
    /// Binds the next parameter.
    pub(crate) fn bind(mut self, value: impl Bind) -> Self {
        if let Ok(arguments) = &mut self.arguments {
            match value.into_argument() {
                Ok(argument) => arguments.push(argument),
                Err(error) => self.arguments = Err(error),
            }
        }
        self
    }

    fn for_sqlite(self) -> std::result::Result<SqliteQuery, sqlx::Error> {
        let arguments = self.arguments.map_err(sqlx::Error::Encode)?;
        Ok(arguments.into_iter().fold(sqlx::query(self.sql), |query, argument| match argument {
            Argument::Text(value) => query.bind(value),
            Argument::Integer(value) => query.bind(value),
            Argument::Boolean(value) => query.bind(value),
            Argument::Bytes(value) => query.bind(value),
            Argument::Id(value) => query.bind(value.map(|id| id.hyphenated().to_string())),
            Argument::Time(value) => query.bind(value.map(time_text)),
            Argument::Json(value) => query.bind(value.map(|value| value.to_string())),
            Argument::PostgresTime(time) => query.bind(time.to_utc().map(time_text)),
        }))
    }

    fn for_postgres(self) -> std::result::Result<PostgresQuery, sqlx::Error> {
        let arguments = self.arguments.map_err(sqlx::Error::Encode)?;
        Ok(arguments.into_iter().fold(sqlx::query(self.sql), |query, argument| match argument {
            Argument::Text(value) => query.bind(value),
            Argument::Integer(value) => query.bind(value),
            Argument::Boolean(value) => query.bind(value),
            Argument::Bytes(value) => query.bind(value),
            Argument::Id(value) => query.bind(value),
            Argument::Time(value) => query.bind(value),
            Argument::Json(value) => query.bind(value.map(Json)),
            Argument::PostgresTime(value) => query.bind(value),
        }))
    }

    /// Runs the statement and gives the number of rows that it changed.
    pub(crate) async fn execute(self, connection: &mut Connection) -> Result<u64> {
        let engine = connection.engine();
        let run = async {
            Ok(match engine {
                Engine::Sqlite(engine) => self.for_sqlite()?.execute(engine).await?.rows_affected(),
                Engine::Postgres(engine) => self.for_postgres()?.execute(engine).await?.rows_affected(),
            })
        };
        let result = run.await;
        connection.checked(result)
    }

    /// Runs the statement and gives its rows.
    pub(crate) async fn fetch_all(self, connection: &mut Connection) -> Result<Vec<Row>> {
        let engine = connection.engine();
        let run = async {
            Ok(match engine {
                Engine::Sqlite(engine) => {
                    self.for_sqlite()?.fetch_all(engine).await?.into_iter().map(Row::Sqlite).collect()
                }
                Engine::Postgres(engine) => {
                    self.for_postgres()?.fetch_all(engine).await?.into_iter().map(Row::Postgres).collect()
                }
            })
        };
        let result = run.await;
        connection.checked(result)
    }

    /// Runs a statement that gives at most one row.
    pub(crate) async fn fetch_optional(self, connection: &mut Connection) -> Result<Option<Row>> {
        Ok(self.fetch_all(connection).await?.pop())
    }

    /// Runs a statement that gives one row.
    pub(crate) async fn fetch_one(self, connection: &mut Connection) -> Result<Row> {
        let row = self.fetch_optional(connection).await?;
        row.ok_or_else(|| sqlx::Error::RowNotFound.into())
    }

    /// Runs a statement that gives one number, in its column `count`.
    pub(crate) async fn fetch_count(self, connection: &mut Connection) -> Result<u64> {
        let row = self.fetch_one(connection).await?;
        Reader::with_key(&row, "(result)", "(count)").unsigned("count")
    }
}
