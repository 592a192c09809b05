//! Checks of a request that its types alone can't express: ranges, lengths, and fields that exclude each other.

use std::ops::Deref;

use crate::error::ErrorDetail;

/// A request with such checks.
pub trait Validate {
    /// Refuses values that are out of range, too long or contradictory.
    fn validate(&self) -> Result<(), ErrorDetail>;
}

/// A request that was validated. Functions that need a valid request take this type, so that no caller can forget the check.
#[derive(Clone, Debug, PartialEq)]
pub struct Valid<T>(T);

impl<T: Validate> Valid<T> {
    /// Validates a request.
    pub fn new(request: T) -> Result<Self, ErrorDetail> {
        request.validate()?;
        Ok(Self(request))
    }
}

impl<T> Valid<T> {
    /// The request.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> Deref for Valid<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::any::type_name;
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::access::CreateToken;
    use crate::git::GitRequest;
    use crate::mcp::RegisterMcpServer;
    use crate::pool::PoolTarget;
    use crate::snapshot::{CreateSnapshot, FromSnapshot};
    use crate::tools::{BashRequest, EditRequest, GlobRequest, GrepRequest, ReadRequest, WriteRequest};
    use crate::workspace::{AttachRequest, CreateWorkspace, DetachRequest};

    fn name<T: Validate>() -> &'static str {
        type_name::<T>().rsplit("::").next().unwrap()
    }

    #[test]
    fn each_request_body_of_the_api_has_a_type_that_is_validated() {
        let validated = [
            name::<AttachRequest>(),
            name::<BashRequest>(),
            name::<CreateSnapshot>(),
            name::<CreateToken>(),
            name::<CreateWorkspace>(),
            name::<DetachRequest>(),
            name::<EditRequest>(),
            name::<FromSnapshot>(),
            name::<GitRequest>(),
            name::<GlobRequest>(),
            name::<GrepRequest>(),
            name::<PoolTarget>(),
            name::<ReadRequest>(),
            name::<RegisterMcpServer>(),
            name::<WriteRequest>(),
            // Declared in the control plane, which reads it as a `Body` and so validates it.
            "CallRequest",
        ];
        let api: Value = serde_json::from_str(include_str!("../../../openapi/emergent.json")).unwrap();
        let operations =
            api["paths"].as_object().unwrap().values().flat_map(|path| path.as_object().unwrap().values());
        let schemas: BTreeSet<&str> = operations
            .filter_map(|operation| operation.pointer("/requestBody/content/application~1json/schema"))
            // A JSON-RPC message of MCP has no type of its own.
            .filter(|schema| schema["type"] != "object")
            .map(|schema| schema["$ref"].as_str().unwrap().rsplit('/').next().unwrap())
            .collect();
        assert_eq!(schemas, BTreeSet::from(validated));
    }
}
