//! What the tests of several crates share: real services that start for one test and leave nothing behind.

pub mod conformance;
pub mod engine;
pub mod git_server;
pub mod internet;
pub mod janitor;
mod keeper;
pub mod mcp;
pub mod mcp_client;
pub mod microvm;
pub mod postgres;
pub mod server;
pub mod sse;
