//! Damaged rows in lists.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A row of the database that can't be read. The list has all other rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UnreadableRow {
    /// Its id.
    pub id: Uuid,
    /// The table, the column and the reason, and how to repair the row.
    pub error: String,
}
