//! Tokens that were verified a moment ago, so that not every request asks the database.
//!
//! Whatever takes a token away through this store empties the memory. Another server on the same PostgreSQL database
//! can take one away as well: there a token is remembered for a moment only.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, TimeDelta, Utc};
use emergent_wire::access::Token;
use tokio::sync::watch;

/// As precise as the time of a token's last use.
pub(crate) const ALONE: TimeDelta = TimeDelta::minutes(1);
/// Where other servers may revoke.
pub(crate) const SHARED: TimeDelta = TimeDelta::milliseconds(400);
/// More are not remembered: then all are forgotten.
const MOST: usize = 1024;

pub(crate) struct KnownTokens {
    kept_for: TimeDelta,
    state: Mutex<State>,
    /// Tells that tokens were taken away.
    taken_away: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    tokens: HashMap<Vec<u8>, Known>,
    /// How often the memory was emptied.
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The token with this hash, if it was verified a moment before `now` and is still good.
    pub(crate) fn get(&self, hash: &[u8], now: DateTime<Utc>) -> Option<Token> {
        let state = self.state();
        let known = state.tokens.get(hash)?;
        let age = now - known.verified_at;
        let good = known.token.expires_at.is_none_or(|end| now < end);
        (good && age >= TimeDelta::zero() && age < self.kept_for).then(|| known.token.clone())
    }

    /// To be asked before a token is looked up.
    pub(crate) fn changes(&self) -> u64 {
        self.state().changes
    }

    /// Remembers a token, unless one was taken away since it was looked up.
    pub(crate) fn put(&self, changes: u64, hash: Vec<u8>, token: Token, verified_at: DateTime<Utc>) {
        let mut state = self.state();
        if state.changes != changes {
            return;
        }
        if state.tokens.len() >= MOST {
            state.tokens.clear();
        }
        state.tokens.insert(hash, Known { token, verified_at });
    }

    /// A token was taken away.
    pub(crate) fn forget(&self) {
        let mut state = self.state();
        state.changes += 1;
        state.tokens.clear();
        drop(state);
        self.taken_away.send_replace(());
    }

    /// Changes each time that tokens were taken away through this store.
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
    fn what_was_looked_up_before_a_revocation_is_not_remembered_after_it() {
        let (known, now) = (KnownTokens::new(ALONE), Utc::now());
        let looked_up = known.changes();
        known.forget();
        known.put(looked_up, b"a".to_vec(), token(None), now);
        assert!(known.get(b"a", now).is_none());
    }
}
