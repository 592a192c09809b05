//! Flow control: a sender may send data only against credit that the receiver granted.
//!
//! Every call starts with [`INITIAL_CREDIT`] in each direction. A data frame costs its payload plus a fixed
//! overhead, so that a flood of tiny frames is bounded as well. The receiver grants more as it consumes.

/// The credit of a call and direction before the first CREDIT frame.
pub const INITIAL_CREDIT: u32 = 256 * 1024;
/// The most credit that may be outstanding for one call and direction.
pub const MAX_CREDIT: u32 = 16 << 20;
/// The cost of a frame besides its payload: about the memory that a receiver needs to queue it.
const FRAME_OVERHEAD: u32 = 64;

/// The cost of a data frame with a payload of `length` bytes.
pub fn data_cost(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX).saturating_add(FRAME_OVERHEAD)
}

/// The remaining credit of one call and direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit(u32);

/// The peer broke the rules of flow control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke flow control")]
pub struct CreditError;

impl Default for Credit {
    fn default() -> Self {
        Self(INITIAL_CREDIT)
    }
}

impl Credit {
    /// Subtracts the cost of a frame.
    pub fn spend(&mut self, cost: u32) -> Result<(), CreditError> {
        self.0 = self.0.checked_sub(cost).ok_or(CreditError)?;
        Ok(())
    }

    /// Adds a grant.
    pub fn grant(&mut self, amount: u32) -> Result<(), CreditError> {
        let total = self.0.checked_add(amount).filter(|total| amount > 0 && *total <= MAX_CREDIT);
        self.0 = total.ok_or(CreditError)?;
        Ok(())
    }

    /// The length of the payload that can be sent now, at most `wanted`. 0 means: wait for credit.
    pub fn sendable(&self, wanted: usize) -> usize {
        wanted.min(self.0.saturating_sub(FRAME_OVERHEAD) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_is_never_overdrawn_and_never_overflows() {
        let mut credit = Credit::default();
        assert!(credit.spend(INITIAL_CREDIT).is_ok());
        assert_eq!(credit.sendable(10), 0);
        assert_eq!(credit.spend(1), Err(CreditError));
        assert_eq!(credit.grant(0), Err(CreditError));
        assert!(credit.grant(MAX_CREDIT).is_ok());
        assert_eq!(credit.grant(1), Err(CreditError));
        assert_eq!(credit.sendable(usize::MAX), (MAX_CREDIT - FRAME_OVERHEAD) as usize);
    }

    #[test]
    fn tiny_frames_cost_more_than_their_bytes() {
        let mut credit = Credit::default();
        let sent = std::iter::from_fn(|| credit.spend(data_cost(1)).ok()).count();
        assert!(sent < 5000, "{sent}");
    }
}
