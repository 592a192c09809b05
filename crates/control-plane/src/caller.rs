//! The principal behind a call. Domain functions that depend on it take a [`Caller`], for calls of all fronts.

use emergent_wire::TokenId;
use emergent_wire::access::{Token, TokenScope};

/// An authenticated token with its rights.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Principal {
    pub(crate) token_id: TokenId,
    /// The token's name.
    pub(crate) name: String,
    pub(crate) scope: TokenScope,
}

impl From<Token> for Principal {
    fn from(token: Token) -> Self {
        Self { token_id: token.id, name: token.name, scope: token.scope }
    }
}

/// A principal and one call that it makes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Caller {
    pub(crate) principal: Principal,
    /// The call's id in the log and the audit log.
    pub(crate) request_id: Option<String>,
    /// Whether calls to a workspace extend its life.
    pub(crate) counts_as_use: bool,
}
