//! Lists whose damaged rows are shown instead of hidden.
//!
//! A list with a damaged row still gives all other rows. The damaged row is in [`Rows::unreadable`] with its id and
//! error, because:
//! - an operator needs the id to repair the row, and the other rows in the meantime;
//! - recovery must not take the sandbox of such a row for one without a row.
//!
//! A row whose id can't be read fails the list: nothing else tells its sandbox from one without a row.

use emergent_wire::unreadable::UnreadableRow;
use uuid::Uuid;

use crate::error::{Result, StoreError};
use crate::query::Table;
use crate::row::{Reader, Row};

/// The rows of a list.
#[derive(Debug)]
pub struct Rows<T> {
    /// The rows that were read.
    pub readable: Vec<T>,
    /// The damaged rows.
    pub unreadable: Vec<Unreadable>,
}

/// A damaged row.
#[derive(Debug)]
pub struct Unreadable {
    /// Its id.
    pub id: Uuid,
    /// [`StoreError::Corrupt`], which names the column.
    pub error: StoreError,
}

impl<T> Rows<T> {
    pub(crate) fn read(table: &Table, rows: &[Row], read: impl Fn(&Row) -> Result<T>) -> Result<Self> {
        let mut list = Self { readable: Vec::with_capacity(rows.len()), unreadable: Vec::new() };
        for row in rows {
            match read(row) {
                Ok(value) => list.readable.push(value),
                Err(error @ StoreError::Corrupt { .. }) => {
                    let id = Reader::by_id(row, table.name).id_in_any_form()?;
                    list.unreadable.push(Unreadable { id, error });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(list)
    }

    /// Whether there is no row at all.
    pub fn is_empty(&self) -> bool {
        self.readable.is_empty() && self.unreadable.is_empty()
    }
}

impl From<Unreadable> for UnreadableRow {
    fn from(row: Unreadable) -> Self {
        Self { id: row.id, error: row.error.to_string() }
    }
}

/// The damaged rows of a list as callers see them.
pub(crate) fn to_wire(rows: Vec<Unreadable>) -> Vec<UnreadableRow> {
    rows.into_iter().map(UnreadableRow::from).collect()
}
