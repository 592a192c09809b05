//! The checked-in OpenAPI documents are those of the program. `make openapi` writes them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[test]
fn checked_in_openapi_documents_are_current() {
    // The variable is read at run time, because clones in different directories may share the compiled test.
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    for (name, current) in emergent_control_plane::openapi_documents() {
        let checked_in = std::fs::read_to_string(format!("{own}/../../openapi/{name}")).unwrap_or_default();
        assert!(
            checked_in == current,
            "the API has changed: run `make openapi` and review the diff of {name}"
        );
    }
}

#[test]
fn enum_values_in_openapi_documents_are_lower_case() {
    fn check(name: &str, part: &serde_json::Value) {
        if let Some(names) = part["enum"].as_array() {
            for text in names.iter().filter_map(|text| text.as_str()) {
                assert_eq!(text, text.to_lowercase(), "{name}: {part}");
            }
        }
        if let Some(parts) = part.as_object() {
            parts.values().for_each(|part| check(name, part));
        }
        part.as_array().into_iter().flatten().for_each(|part| check(name, part));
    }
    for (name, text) in emergent_control_plane::openapi_documents() {
        check(name, &serde_json::from_str(&text).unwrap());
    }
}
