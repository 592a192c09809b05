//! Reads of nested objects that refuse lists. A derived struct takes a JSON list for its fields in their order, which no caller means.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// A value that is read from an object only.
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Object)
    }
}

/// Reads an object, or null.
pub(crate) fn one_or_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Ok(Option::<Object<T>>::deserialize(deserializer)?.map(|object| object.0))
}

/// Reads a list of objects.
pub(crate) fn list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Ok(Vec::<Object<T>>::deserialize(deserializer)?.into_iter().map(|object| object.0).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use crate::mcp::RegisterMcpServer;
    use crate::pool::PoolTarget;
    use crate::snapshot::FromSnapshot;
    use crate::workspace::CreateWorkspace;

    fn is_read(kind: &str, limits: &Value) -> bool {
        let id = "01890000-0000-7000-8000-000000000000";
        match kind {
            "create" => from_value::<CreateWorkspace>(json!({ "resource_limits": limits })).is_ok(),
            "restore" => {
                from_value::<FromSnapshot>(json!({ "snapshot_id": id, "resource_limits": limits })).is_ok()
            }
            "register" => {
                from_value::<RegisterMcpServer>(json!({ "name": "a", "resource_limits": limits })).is_ok()
            }
            _ => {
                let shapes = json!([{ "size": 1, "resource_limits": limits }]);
                from_value::<PoolTarget>(json!({ "shapes": shapes })).is_ok()
            }
        }
    }

    #[test]
    fn a_list_is_not_taken_for_the_fields_of_an_object() {
        for kind in ["create", "restore", "register", "pool"] {
            for good in [json!({}), json!({ "cpu": "0.5" }), json!(null)] {
                assert!(is_read(kind, &good), "{kind} {good}");
            }
            for bad in [json!([]), json!(["0.5"]), json!([null, null, null]), json!("x"), json!(1)] {
                assert!(!is_read(kind, &bad), "{kind} {bad}");
            }
        }
        assert!(from_value::<PoolTarget>(json!({ "shapes": [[1]] })).is_err());
        let volumes = |volume: Value| {
            from_value::<RegisterMcpServer>(json!({ "name": "a", "volumes": [volume] })).is_ok()
        };
        assert!(volumes(json!("a:/b")) && volumes(json!({ "name": "a", "path": "/b" })));
        assert!(!volumes(json!(["a", "/b"])));
    }
}
