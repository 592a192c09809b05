//! Indents JSON text. The order of keys and the form of numbers are unchanged.

/// The JSON with one value on each line. Text that is not JSON is indented too, and keeps all its characters but white space.
pub(crate) fn pretty(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let mut depth = 0_usize;
    let mut characters = text.chars().filter(insignificant_space()).peekable();
    let mut in_string = false;
    let mut escaped = false;
    while let Some(c) = characters.next() {
        if in_string {
            out.push(c);
            in_string = escaped || c != '"';
            escaped = !escaped && c == '\\';
            continue;
        }
        match c {
            '{' | '[' => {
                out.push(c);
                match characters.next_if(|next| matches!(next, '}' | ']')) {
                    Some(end) => out.push(end),
                    None => {
                        depth += 1;
                        new_line(&mut out, depth);
                    }
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                new_line(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                new_line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            c => {
                in_string = c == '"';
                out.push(c);
            }
        }
    }
    out
}

fn new_line(out: &mut String, depth: usize) {
    out.push('\n');
    out.extend(std::iter::repeat_n("  ", depth));
}

/// Keeps every character but the white space outside of strings.
fn insignificant_space() -> impl FnMut(&char) -> bool {
    let mut in_string = false;
    let mut escaped = false;
    move |c| {
        if in_string {
            in_string = escaped || *c != '"';
            escaped = !escaped && *c == '\\';
            return true;
        }
        in_string = *c == '"';
        !c.is_ascii_whitespace()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[test]
    fn pretty_keeps_the_order_of_keys() {
        let text = r#"{"z":1,"a":[],"m":{"k":"a: {\"b\\\"}, [c]\\"},"l":[1, {}]}"#;
        let expected = r#"{
  "z": 1,
  "a": [],
  "m": {
    "k": "a: {\"b\\\"}, [c]\\"
  },
  "l": [
    1,
    {}
  ]
}"#;
        assert_eq!(pretty(text), expected);
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::hash_map(".*", inner, 0..6).prop_map(|map| map.into_iter().collect()),
            ]
        })
    }

    proptest! {
        #[test]
        fn pretty_equals_the_pretty_text_of_serde_json(value in json()) {
            prop_assert_eq!(pretty(&value.to_string()), serde_json::to_string_pretty(&value).unwrap());
        }

        #[test]
        fn pretty_never_panics(text in ".*") {
            pretty(&text);
        }
    }
}
