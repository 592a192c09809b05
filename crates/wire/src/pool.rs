//! The warm pool: sandboxes that are started ahead of requests.

use serde::{Deserialize, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::names::names;
use crate::object;
use crate::unreadable::UnreadableRow;
use crate::validate::Validate;
use crate::workspace::{
    CreateWorkspace, NetworkMode, ProviderChoice, ProviderName, RequestedLimits, ResourceLimits,
};

names!(
    /// The status of a spare.
    SpareStatus {
        /// It is being made.
        Filling = "filling",
        /// It can be claimed.
        Ready = "ready",
        /// It is being removed.
        Leaving = "leaving",
    }
);

/// The most spares of all shapes together.
pub const MAX_SPARES: u32 = 200;
/// The most shapes.
pub const MAX_SHAPES: usize = 32;

/// A kind of spare and its target count. A field that is left out has the installation's default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PoolShape {
    /// The target count.
    pub size: u32,
    /// The provider; the one that `auto` would choose unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderChoice>,
    /// The image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The resource limits of each.
    #[serde(default, deserialize_with = "object::one_or_null", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<RequestedLimits>,
    /// The network mode of each; `nat` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkMode>,
}

/// The target of the pool. An empty list turns the pool off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PoolTarget {
    /// The kinds of spares.
    #[serde(deserialize_with = "object::list")]
    pub shapes: Vec<PoolShape>,
}

impl Validate for PoolTarget {
    fn validate(&self) -> Result<(), ErrorDetail> {
        let bad = |message: String| Err(ErrorDetail::new(ErrorCode::BadRequest, message));
        if self.shapes.len() > MAX_SHAPES {
            return bad(format!("{} shapes: at most {MAX_SHAPES} are possible", self.shapes.len()));
        }
        let all = self.shapes.iter().try_fold(0_u32, |sum, shape| sum.checked_add(shape.size));
        if all.is_none_or(|all| all > MAX_SPARES) {
            return bad(format!("the sizes add up to more than {MAX_SPARES} spares"));
        }
        for shape in &self.shapes {
            // A shape is what a request for a workspace can ask for.
            let PoolShape { image, resource_limits, .. } = shape.clone();
            CreateWorkspace { image, resource_limits, ..CreateWorkspace::default() }.validate()?;
        }
        Ok(())
    }
}

/// The state of one kind of spare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ShapeStatus {
    /// Its provider; null while none can be used.
    pub provider: Option<ProviderName>,
    /// The image.
    pub image: String,
    /// The resource limits of each.
    pub resource_limits: ResourceLimits,
    /// The network mode of each.
    pub network: NetworkMode,
    /// The target count.
    pub size: u32,
    /// The number of spares that are ready.
    pub ready: u32,
    /// The number of spares that are being made.
    pub filling: u32,
    /// Why spares are missing; null if nothing is wrong.
    pub problem: Option<String>,
}

/// The state of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolStatus {
    /// Whether the sizes were set at run time (and hold until they are reset), or are the configuration's.
    pub set_at_run_time: bool,
    /// The kinds of spares.
    pub shapes: Vec<ShapeStatus>,
    /// Spares of kinds that are no longer in the target. They are being removed.
    pub leaving: u32,
    /// Spares that can't be read. Nothing is done with them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableRow>,
}
