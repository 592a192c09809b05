//! The APIs' descriptions that are checked in are those that the program has. `make openapi` renews them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[test]
fn the_descriptions_that_are_checked_in_are_current() {
    // Asked for now: clones at different places may share what was compiled.
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    for (name, current) in emergent_control_plane::openapi_documents() {
        let checked_in = std::fs::read_to_string(format!("{own}/../../openapi/{name}")).unwrap_or_default();
        assert!(
            checked_in == current,
            "the API has changed: run `make openapi` and review the diff of {name}"
        );
    }
}
