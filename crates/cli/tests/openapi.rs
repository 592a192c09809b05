//! The API's description that is checked in is the one that the server has. `make openapi` renews it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[test]
fn the_description_that_is_checked_in_is_current() {
    // Asked for now: clones at different places may share what was compiled.
    let path = format!("{}/../../openapi/emergent.json", std::env::var("CARGO_MANIFEST_DIR").unwrap());
    let checked_in = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        checked_in == emergent_control_plane::openapi_json(),
        "the API has changed: run `make openapi` and review the diff"
    );
}
