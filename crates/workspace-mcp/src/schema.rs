//! JSON Schemas out of the OpenAPI schemas of the wire types.
//!
//! An OpenAPI 3.1 schema is a JSON Schema, but not one that every client of MCP can read. So references are put in
//! place, and what only describes numbers and keys to generators of code is left out. An input never says that a
//! value may be null: leaving the field out means the same, and some models can't be given a list of types.
//!
//! An output is what the tool answers, or the error. Some clients check what they get against the schema also when
//! it is an error, so the error is part of it.

use std::collections::BTreeMap;

use emergent_wire::ErrorDetail;
use rmcp::model::JsonObject;
use serde_json::{Value, json};
use utoipa::ToSchema;

/// How deep types may be nested. A type that holds itself would never end.
const MAX_DEPTH: usize = 16;
/// Keywords that say nothing to a client of MCP, or that some refuse.
const LEFT_OUT: [&str; 2] = ["format", "propertyNames"];

/// A type's schema, with nothing to look up elsewhere.
pub(crate) fn of<T: ToSchema>() -> JsonObject {
    let mut parts = Vec::new();
    T::schemas(&mut parts);
    let parts: BTreeMap<String, Value> = parts.into_iter().map(|(name, part)| (name, plain(&part))).collect();
    match inline(plain(&T::schema()), &parts, MAX_DEPTH) {
        Value::Object(mut schema) => {
            // The tool's description says more.
            schema.remove("description");
            schema
        }
        _ => JsonObject::new(),
    }
}

/// What a tool takes.
pub(crate) fn input<T: ToSchema>() -> JsonObject {
    let mut schema = of::<T>();
    schema.values_mut().for_each(without_null);
    schema
}

/// What a tool gives: one of its answers, or the error.
pub(crate) fn output(answers: &[JsonObject]) -> JsonObject {
    let mut error = of::<ErrorDetail>();
    error.insert("description".into(), "Why the tool failed; there is nothing else then.".into());
    // All the codes there are would be most of the schema.
    if let Some(code) = error.get_mut("properties").and_then(|properties| properties.get_mut("code")) {
        code.as_object_mut().map(|code| code.remove("enum"));
    }
    let mut properties = JsonObject::new();
    let mut alternatives = Vec::new();
    for answer in answers {
        for (name, schema) in answer.get("properties").and_then(Value::as_object).into_iter().flatten() {
            properties.entry(name.clone()).or_insert_with(|| schema.clone());
        }
        alternatives
            .push(json!({ "required": answer.get("required").cloned().unwrap_or_else(|| json!([])) }));
    }
    properties.insert("error".into(), Value::Object(error));
    alternatives.push(json!({ "required": ["error"] }));
    let mut schema = JsonObject::new();
    schema.insert("type".into(), "object".into());
    schema.insert("properties".into(), Value::Object(properties));
    schema.insert("anyOf".into(), Value::Array(alternatives));
    schema
}

fn plain(schema: &impl serde::Serialize) -> Value {
    serde_json::to_value(schema).unwrap_or_default()
}

/// Puts the schemas that are referred to in their places.
fn inline(schema: Value, parts: &BTreeMap<String, Value>, depth: usize) -> Value {
    match schema {
        Value::Object(schema) => Value::Object(inline_object(schema, parts, depth)),
        Value::Array(list) => list.into_iter().map(|schema| inline(schema, parts, depth)).collect(),
        other => other,
    }
}

fn inline_object(mut schema: JsonObject, parts: &BTreeMap<String, Value>, depth: usize) -> JsonObject {
    if let Some(reference) = schema.remove("$ref") {
        let name = reference.as_str().and_then(|text| text.rsplit('/').next()).unwrap_or_default();
        let part = parts.get(name).filter(|_| depth > 0).cloned().unwrap_or_default();
        let Value::Object(mut part) = inline(part, parts, depth.saturating_sub(1)) else { return schema };
        // What is said at the place says more than what is said of the type.
        part.extend(schema);
        return part;
    }
    // `properties` holds names, not keywords: a field may be called `format`.
    if let Some(Value::Object(properties)) = schema.remove("properties") {
        let inlined =
            properties.into_iter().map(|(name, field)| (name, inline(field, parts, depth))).collect();
        schema.insert("properties".into(), Value::Object(inlined));
    }
    for keyword in LEFT_OUT {
        schema.remove(keyword);
    }
    for (keyword, value) in &mut schema {
        match (keyword.as_str(), &mut *value) {
            ("properties", _) => {}
            // The documentation's lines are as long as the code's.
            ("description", Value::String(text)) => *text = text.replace('\n', " "),
            (_, value) => *value = inline(std::mem::take(value), parts, depth),
        }
    }
    or_null(schema)
}

/// `oneOf` a type or null becomes that type with null among its types.
fn or_null(mut schema: JsonObject) -> JsonObject {
    let Some(Value::Array(alternatives)) = schema.get("oneOf") else { return schema };
    let (nulls, others): (Vec<_>, Vec<_>) = alternatives.iter().partition(|one| one["type"] == "null");
    let ([_], [Value::Object(other)]) = (nulls.as_slice(), others.as_slice()) else { return schema };
    let Some(Value::String(kind)) = other.get("type") else { return schema };
    let mut merged = other.clone();
    merged.insert("type".into(), json!([kind, "null"]));
    schema.remove("oneOf");
    merged.extend(schema);
    merged
}

/// Takes null out of lists of types.
fn without_null(schema: &mut Value) {
    match schema {
        Value::Object(schema) => {
            if let Some(Value::Array(kinds)) = schema.get_mut("type") {
                kinds.retain(|kind| kind != "null");
                if let [kind] = kinds.as_slice() {
                    let kind = kind.clone();
                    schema.insert("type".into(), kind);
                }
            }
            schema.values_mut().for_each(without_null);
        }
        Value::Array(list) => list.iter_mut().for_each(without_null),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use emergent_wire::git::{GitAnswer, GitRequest};
    use emergent_wire::tools::{BashRequest, WriteRequest};

    use super::*;

    #[test]
    fn inputs_are_closed_and_have_neither_references_nor_nulls() {
        for schema in [input::<BashRequest>(), input::<WriteRequest>(), input::<GitRequest>()] {
            assert_eq!(schema["type"], "object");
            assert_eq!(schema["additionalProperties"], false);
            let text = serde_json::to_string(&schema).unwrap();
            for absent in ["$ref", "null", "int64", "propertyNames", "\\n"] {
                assert!(!text.contains(absent), "{absent} in {text}");
            }
        }
        assert_eq!(input::<WriteRequest>()["properties"]["encoding"]["enum"], json!(["utf-8", "base64"]));
        assert_eq!(
            input::<BashRequest>()["properties"]["environment"]["additionalProperties"],
            json!({"type": "string"})
        );
    }

    #[test]
    fn an_output_is_an_answer_or_an_error() {
        let schema = output(&[of::<GitAnswer>()]);
        assert_eq!(schema["anyOf"], json!([{"required": ["success", "path"]}, {"required": ["error"]}]));
        assert_eq!(schema["properties"]["status"]["type"], json!(["object", "null"]));
        assert_eq!(schema["properties"]["status"]["properties"]["branch"]["type"], json!(["string", "null"]));
        assert_eq!(schema["properties"]["error"]["required"], json!(["code", "message"]));
    }
}
