//! Both servers, run as processes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(
    clippy::needless_pass_by_value,
    reason = "a test reads better without a reference before each `json!`"
)]

mod chaos;
mod client;
mod fixture;
mod http;
