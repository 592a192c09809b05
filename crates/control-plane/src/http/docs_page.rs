//! The description of the API as a page for people: HTML without scripts, which loads nothing from other hosts.

use serde_json::Value;

const HEAD: &str = r#"<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Emergent workspaces API</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font:14px/1.45 ui-monospace,monospace}pre{background:#8881;padding:.7rem;border-radius:6px;overflow:auto}
h2{margin-top:2.5rem;border-bottom:1px solid #8884}details{border:1px solid #8884;border-radius:6px;margin:.5rem 0;padding:.4rem .8rem}
summary{cursor:pointer}summary b{display:inline-block;min-width:4.5rem}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.25rem .6rem .25rem 0;border-top:1px solid #8883}
.get{color:#2a7ae2}.post{color:#1a8f4c}.delete{color:#c0392b}.dim{opacity:.7}</style></head><body>"#;

/// The tags of operations, in the order of the page.
const TAGS: [&str; 7] = ["workspaces", "tools", "snapshots", "pool", "mcp", "access", "operations"];

/// Renders the page. `server` is the address under which the reader reached this server.
pub(super) fn render(description: &Value, server: &str) -> String {
    let mut page = HEAD.to_owned();
    page += &format!(
        "<h1>{}</h1><p>{}</p><p>Try it, on the server's machine:</p><pre>\
         TOKEN=$(cat DATA_DIR/admin-token)   # `emergent serve` prints where\n\
         API={}/api/v1/agent/workspaces\n\
         curl -H \"Authorization: Bearer $TOKEN\" -X POST $API\n\
         curl -H \"Authorization: Bearer $TOKEN\" $API/ID/bash -d '{{\"command\":\"uname -a\"}}'</pre>",
        text(&description["info"]["title"]),
        text(&description["info"]["description"]),
        escape(server),
    );
    for tag in TAGS {
        page += &format!("<h2>{tag}</h2>");
        for (path, methods) in entries(&description["paths"]) {
            for (method, operation) in entries(methods) {
                if operation["tags"][0] == tag {
                    page += &operation_details(description, path, method, operation);
                }
            }
        }
    }
    page += "<h2>types</h2>";
    for (name, schema) in entries(&description["components"]["schemas"]) {
        page += &format!(
            "<details id=\"{0}\"><summary><code>{0}</code></summary>{1}</details>",
            escape(name),
            schema_details(schema)
        );
    }
    page + "</body></html>"
}

fn operation_details(description: &Value, path: &str, method: &str, operation: &Value) -> String {
    let body = &operation["requestBody"]["content"]["application/json"]["schema"];
    let mut details = format!(
        "<details><summary><b class=\"{method}\">{}</b> <code>{}</code> <span class=\"dim\">{}</span></summary><p>{}</p>",
        method.to_uppercase(),
        escape(path),
        text(&operation["summary"]),
        text(&operation["description"]),
    );
    let parameters: Vec<&Value> = operation["parameters"].as_array().into_iter().flatten().collect();
    if !parameters.is_empty() {
        details += "<table><tr><th>parameter</th><th>in</th><th></th></tr>";
        for parameter in parameters {
            details += &format!(
                "<tr><td><code>{}</code></td><td>{}</td><td>{}</td></tr>",
                text(&parameter["name"]),
                text(&parameter["in"]),
                text(&parameter["description"])
            );
        }
        details += "</table>";
    }
    if let Some(name) = reference(body) {
        details += &format!(
            "<p>Body: {}</p>{}",
            link(name),
            schema_details(&description["components"]["schemas"][name])
        );
    }
    details += "<p>Answers:</p><ul>";
    for (status, response) in entries(&operation["responses"]) {
        let schema = &response["content"]["application/json"]["schema"];
        let body = reference(schema).map(link).unwrap_or_default();
        details +=
            &format!("<li><code>{}</code> {body} {}</li>", escape(status), text(&response["description"]));
    }
    details + "</ul></details>"
}

fn schema_details(schema: &Value) -> String {
    let mut details = format!("<p>{}</p>", text(&schema["description"]));
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let properties: Vec<(&String, &Value)> = entries(&schema["properties"]).collect();
    if !properties.is_empty() {
        details += "<table><tr><th>field</th><th>type</th><th></th></tr>";
        for (name, property) in properties {
            let mark = if required.contains(&name.as_str()) { " *" } else { "" };
            details += &format!(
                "<tr><td><code>{}</code>{mark}</td><td>{}</td><td>{}</td></tr>",
                escape(name),
                type_of(property),
                text(&property["description"])
            );
        }
        details += "</table>";
    }
    let values: Vec<&str> =
        schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !values.is_empty() {
        details += &format!("<p>One of: <code>{}</code></p>", escape(&values.join(", ")));
    }
    details
}

fn type_of(schema: &Value) -> String {
    if let Some(name) = reference(schema) {
        return link(name);
    }
    if let Some(options) = schema["oneOf"].as_array() {
        return options
            .iter()
            .filter(|option| option["type"] != "null")
            .map(type_of)
            .collect::<Vec<_>>()
            .join(" or ");
    }
    match &schema["type"] {
        Value::String(name) if name == "array" => format!("list of {}", type_of(&schema["items"])),
        Value::String(name) => escape(name),
        Value::Array(names) => {
            let names: Vec<&str> =
                names.iter().filter_map(Value::as_str).filter(|name| *name != "null").collect();
            escape(&names.join(" or "))
        }
        _ => String::new(),
    }
}

fn reference(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.rsplit('/').next()
}

fn link(name: &str) -> String {
    format!("<a href=\"#{0}\"><code>{0}</code></a>", escape(name))
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

/// A description as HTML. Text in backticks becomes code.
fn text(value: &Value) -> String {
    let escaped = escape(value.as_str().unwrap_or_default());
    let parts = escaped.split('`').enumerate();
    parts
        .map(|(index, part)| if index % 2 == 1 { format!("<code>{part}</code>") } else { part.to_owned() })
        .collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_operations_are_on_the_page() {
        let description = serde_json::to_value(crate::http::openapi()).unwrap();
        let page = render(&description, "http://localhost");
        for (path, methods) in entries(&description["paths"]) {
            for (method, operation) in entries(methods) {
                let details = operation_details(&description, path, method, operation);
                assert!(page.contains(&details), "{method} {path}: {}", operation["tags"]);
            }
        }
    }

    #[test]
    fn descriptions_are_text_and_not_markup() {
        assert_eq!(text(&Value::from("a `b<c>` & d")), "a <code>b&lt;c&gt;</code> &amp; d");
        let page = render(&serde_json::json!({}), "http://\"><script>");
        assert!(!page.contains("<script>"));
    }
}
