//! An endpoint with a server whose answers the tests give.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod legacy;
mod modern;
mod support;
