//! The resource limits of a sandbox.

use serde::{Deserialize, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::size::{ByteSize, CpuCount};
use crate::validate::Validate;

/// The resource limits of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResourceLimits {
    /// CPUs.
    pub cpu: CpuCount,
    /// Memory.
    pub memory: ByteSize,
    /// Disk space under `/workspace`.
    pub disk: ByteSize,
}

impl Default for ResourceLimits {
    fn default() -> Self {
        Self { cpu: CpuCount::whole(2), memory: ByteSize::gib(4), disk: ByteSize::gib(10) }
    }
}

/// Limits as a request gives them: what is left out takes the installation's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RequestedLimits {
    /// CPUs, such as "2" or "0.5".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuCount>,
    /// Memory, such as "4G".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Disk, such as "10G".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<ByteSize>,
}

impl RequestedLimits {
    /// Fills in what was left out.
    pub fn or(self, defaults: ResourceLimits) -> ResourceLimits {
        ResourceLimits {
            cpu: self.cpu.unwrap_or(defaults.cpu),
            memory: self.memory.unwrap_or(defaults.memory),
            disk: self.disk.unwrap_or(defaults.disk),
        }
    }
}

/// The smallest memory a sandbox can start with.
pub const MIN_MEMORY: ByteSize = ByteSize::mib(128);
/// The smallest disk a sandbox can start with.
pub const MIN_DISK: ByteSize = ByteSize::mib(16);

/// The largest memory or disk: 16 TiB.
const MAX_SIZE: ByteSize = ByteSize::gib(16 << 10);

impl Validate for ResourceLimits {
    fn validate(&self) -> Result<(), ErrorDetail> {
        let Self { cpu, memory, disk } = *self;
        RequestedLimits { cpu: Some(cpu), memory: Some(memory), disk: Some(disk) }.validate()
    }
}

impl Validate for RequestedLimits {
    fn validate(&self) -> Result<(), ErrorDetail> {
        if let Some(cpu) = self.cpu
            && !(10..=512_000).contains(&cpu.millis())
        {
            let message = format!("resource_limits.cpu is {cpu}: it must be from 0.01 to 512");
            return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
        }
        check_size("memory", self.memory, MIN_MEMORY)?;
        check_size("disk", self.disk, MIN_DISK)
    }
}

fn check_size(field: &str, size: Option<ByteSize>, min: ByteSize) -> Result<(), ErrorDetail> {
    match size {
        Some(size) if size < min || size > MAX_SIZE => {
            let message = format!("resource_limits.{field} is {size}: it must be from {min} to {MAX_SIZE}");
            Err(ErrorDetail::new(ErrorCode::Unacceptable, message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn limits_out_of_range_are_refused_and_missing_ones_are_not() {
        let message = |limits: serde_json::Value| {
            from_value::<RequestedLimits>(limits).unwrap().validate().err().map(|error| error.message)
        };
        for good in [json!({}), json!({ "cpu": "0.01", "memory": "128M", "disk": "16T" })] {
            assert_eq!(message(good), None);
        }
        for (bad, expected) in [
            (json!({ "cpu": "0.009" }), "resource_limits.cpu is 0.009: it must be from 0.01 to 512"),
            (json!({ "cpu": "513" }), "resource_limits.cpu is 513: it must be from 0.01 to 512"),
            (json!({ "memory": "127M" }), "resource_limits.memory is 127M: it must be from 128M to 16T"),
            (json!({ "disk": "17T" }), "resource_limits.disk is 17T: it must be from 16M to 16T"),
        ] {
            assert_eq!(message(bad).as_deref(), Some(expected));
        }
        assert!(ResourceLimits { disk: ByteSize::mib(1), ..ResourceLimits::default() }.validate().is_err());
    }
}
