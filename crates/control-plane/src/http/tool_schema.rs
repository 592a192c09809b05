//! JSON Schemas of tools for MCP clients, made from the OpenAPI schemas of their types.
//!
//! An OpenAPI 3.1 schema is a JSON Schema, but some MCP clients support only a part of that language. So references are replaced by
//! the schemas that they name, and keywords for code generators are removed. The schema of arguments never allows null: a field that
//! is left out means the same, and some models do not support lists of types.
//!
//! The schema of an answer includes the error, because some clients also check errors against the schema.

use std::collections::BTreeMap;

use emergent_wire::ErrorDetail;
use serde_json::{Map, Value, json};

use crate::tools::{ToolEntry, TypeSchema};

type JsonObject = Map<String, Value>;

/// The limit on nested types, which ends a type that contains itself.
const MAX_DEPTH: usize = 16;
/// Keywords without a meaning for MCP clients, or that some of them refuse.
const LEFT_OUT: [&str; 2] = ["format", "propertyNames"];

/// The schema of a tool's arguments.
pub(super) fn of_arguments(tool: &ToolEntry) -> JsonObject {
    input(tool.request)
}

/// The schema of a tool's answer: that of finished work, that of work that has only started, or an error.
pub(super) fn of_answer(tool: &ToolEntry) -> JsonObject {
    let types = (tool.answers)();
    let answers: Vec<JsonObject> =
        [Some(types.finished), types.started].into_iter().flatten().map(of).collect();
    output(&answers)
}

/// A type's schema without references.
fn of(schema: TypeSchema) -> JsonObject {
    let mut parts = Vec::new();
    (schema.references)(&mut parts);
    let parts: BTreeMap<String, Value> = parts.into_iter().map(|(name, part)| (name, plain(&part))).collect();
    match inline(plain(&(schema.schema)()), &parts, MAX_DEPTH) {
        Value::Object(mut schema) => {
            // The tool has a longer description.
            schema.remove("description");
            schema
        }
        _ => JsonObject::new(),
    }
}

fn input(schema: TypeSchema) -> JsonObject {
    let mut schema = of(schema);
    schema.values_mut().for_each(without_null);
    schema
}

fn output(answers: &[JsonObject]) -> JsonObject {
    let mut error = of(TypeSchema::of::<ErrorDetail>());
    error.insert(
        "description".into(),
        "The error of the tool. An answer with an error has no other fields.".into(),
    );
    // The list of all codes would be most of the schema.
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

/// Replaces references by the schemas that they name.
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
        // The keywords beside the reference replace those of the type.
        part.extend(schema);
        return part;
    }
    // The keys of `properties` are names and not keywords: a field may be called `format`.
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
            // The documentation has the line ends of the source code.
            ("description", Value::String(text)) => *text = text.replace('\n', " "),
            (_, value) => *value = inline(std::mem::take(value), parts, depth),
        }
    }
    or_null(schema)
}

/// Replaces `oneOf` a type and null by that type with a list of types.
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

/// Removes null from lists of types.
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
    use emergent_wire::ErrorCode;
    use emergent_wire::error::ErrorBody;
    use emergent_wire::git::{GitAnswer, GitRequest};
    use emergent_wire::tools::{
        BashRequest, EditAnswer, GlobAnswer, GrepAnswer, ReadAnswer, WriteAnswer, WriteRequest,
    };
    use utoipa::ToSchema;

    use super::*;
    use crate::tools::standard;

    fn input<T: ToSchema>() -> JsonObject {
        super::input(TypeSchema::of::<T>())
    }

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
        let schema = output(&[of(TypeSchema::of::<GitAnswer>())]);
        assert_eq!(schema["anyOf"], json!([{"required": ["success", "path"]}, {"required": ["error"]}]));
        assert_eq!(schema["properties"]["status"]["type"], json!(["object", "null"]));
        assert_eq!(schema["properties"]["status"]["properties"]["branch"]["type"], json!(["string", "null"]));
        assert_eq!(schema["properties"]["error"]["required"], json!(["code", "message"]));
    }

    /// Checks that the schema names all fields of an answer, and that the answer has the required fields of one alternative.
    fn check(tool: &str, answer: &impl serde::Serialize) {
        let tool = standard().into_iter().find(|entry| entry.name == tool).unwrap();
        let (schema, answer) = (of_answer(&tool), serde_json::to_value(answer).unwrap());
        let answer = answer.as_object().unwrap();
        let unknown: Vec<_> =
            answer.keys().filter(|field| schema["properties"].get(field.as_str()).is_none()).collect();
        assert!(unknown.is_empty(), "{}: {unknown:?}", tool.name);
        let has_all = |alternative: &Value| {
            let mut required = alternative["required"].as_array().unwrap().iter();
            required.all(|field| answer.contains_key(field.as_str().unwrap()))
        };
        assert!(schema["anyOf"].as_array().unwrap().iter().any(has_all), "{}: {answer:?}", tool.name);
    }

    #[test]
    fn answers_and_errors_match_the_schema_of_their_tool() {
        check("read", &ReadAnswer::default());
        check("write", &WriteAnswer::default());
        check("edit", &EditAnswer::default());
        check("glob", &GlobAnswer::default());
        check("grep", &GrepAnswer::default());
        check("git", &GitAnswer::default());
        for tool in standard() {
            check(tool.name, &ErrorBody { error: ErrorDetail::new(ErrorCode::Internal, "") });
        }
    }
}
