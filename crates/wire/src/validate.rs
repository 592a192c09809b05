//! Checks of a request that its types alone can't express: ranges, lengths, and fields that exclude each other.

use std::ops::Deref;

use crate::error::ErrorDetail;

/// A request with such checks.
pub trait Validate {
    /// Refuses values that are out of range, too long or contradictory.
    fn validate(&self) -> Result<(), ErrorDetail>;
}

/// A request that was validated. Functions that need a valid request take this type, so that no caller can forget the check.
#[derive(Clone, Debug, PartialEq)]
pub struct Valid<T>(T);

impl<T: Validate> Valid<T> {
    /// Validates a request.
    pub fn new(request: T) -> Result<Self, ErrorDetail> {
        request.validate()?;
        Ok(Self(request))
    }
}

impl<T> Valid<T> {
    /// The request.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> Deref for Valid<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
