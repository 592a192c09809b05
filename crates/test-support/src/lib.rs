//! Support for the tests of several crates: real services that start for one test and leave nothing on the host.

pub mod collector;
pub mod command;
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
pub mod wait;
