//! A cache of verified tokens, so that not every request reads the database.
//!
//! A revocation through this store empties the cache. Other servers on the same PostgreSQL database revoke without this
//! store's knowledge, so entries live only briefly there.

use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};
use emergent_wire::access::Token;
use parking_lot::Mutex;
use tokio::sync::watch;

/// The lifetime of an entry when this server is alone. The time of a token's last use is as precise.
pub(crate) const ALONE: TimeDelta = TimeDelta::minutes(1);
/// The lifetime of an entry when other servers may revoke tokens.
pub(crate) const SHARED: TimeDelta = TimeDelta::milliseconds(400);
/// The most entries. One more empties the cache.
const MOST: usize = 1024;

pub(crate) struct KnownTokens {
    kept_for: TimeDelta,
    state: Mutex<State>,
    /// Signals revocations.
    taken_away: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    tokens: HashMap<Vec<u8>, Known>,
    /// The number of times that the cache was emptied.
    changes: u64,
}

struct Known {
    token: Token,
    verified_at: DateTime<Utc>,
}

impl KnownTokens {
    pub(crate) fn new(kept_for: TimeDelta) -> Self {
        Self { kept_for, state: Mutex::default(), taken_away: watch::Sender::default() }
    }

    /// The token with this hash, if it was verified a moment before `now` and is still good.
    pub(crate) fn get(&self, hash: &[u8], now: DateTime<Utc>) -> Option<Token> {
        let state = self.state.lock();
        let known = state.tokens.get(hash)?;
        let age = now - known.verified_at;
        let good = known.token.expires_at.is_none_or(|end| now < end);
        (good && age >= TimeDelta::zero() && age < self.kept_for).then(|| known.token.clone())
    }

    /// The number of revocations. A caller reads it before it looks a token up.
    pub(crate) fn changes(&self) -> u64 {
        self.state.lock().changes
    }

    /// Adds a token, unless a revocation came after its lookup.
    pub(crate) fn put(&self, changes: u64, hash: Vec<u8>, token: Token, verified_at: DateTime<Utc>) {
        let mut state = self.state.lock();
        if state.changes != changes {
            return;
        }
        if state.tokens.len() >= MOST {
            state.tokens.clear();
        }
        state.tokens.insert(hash, Known { token, verified_at });
    }

    /// Empties the cache because a token was revoked.
    pub(crate) fn forget(&self) {
        let mut state = self.state.lock();
        state.changes += 1;
        state.tokens.clear();
        drop(state);
        self.taken_away.send_replace(());
    }

    /// Changes at each revocation through this store.
    pub(crate) fn watch(&self) -> watch::Receiver<()> {
        self.taken_away.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use emergent_wire::TokenId;
    use emergent_wire::access::TokenScope;

    use super::*;

    fn token(expires_at: Option<DateTime<Utc>>) -> Token {
        Token {
            id: TokenId::generate(),
            name: "t".into(),
            scope: TokenScope::Admin,
            created_at: Utc::now(),
            expires_at,
            last_used_at: None,
        }
    }

    #[test]
    fn a_token_is_known_for_its_time_and_not_after_its_own_end() {
        let (known, now) = (KnownTokens::new(ALONE), Utc::now());
        known.put(known.changes(), b"a".to_vec(), token(None), now);
        known.put(known.changes(), b"b".to_vec(), token(Some(now + TimeDelta::seconds(5))), now);
        for hash in [b"a", b"b"] {
            assert!(known.get(hash, now + TimeDelta::seconds(4)).is_some());
            assert!(known.get(hash, now + ALONE).is_none());
            assert!(known.get(hash, now - TimeDelta::seconds(1)).is_none(), "the clock was set back");
        }
        assert!(known.get(b"b", now + TimeDelta::seconds(5)).is_none());
    }

    #[test]
    fn a_token_looked_up_before_a_revocation_is_not_cached_after_it() {
        let (known, now) = (KnownTokens::new(ALONE), Utc::now());
        let looked_up = known.changes();
        known.forget();
        known.put(looked_up, b"a".to_vec(), token(None), now);
        assert!(known.get(b"a", now).is_none());
    }
}
