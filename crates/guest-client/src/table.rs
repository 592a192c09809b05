//! The calls of one channel, as a pure state machine: frames in, events out, violations named.
//!
//! ```text
//! open ──RESULT/ERROR──▶ (gone)
//!   └──dropped by its caller──▶ abandoned ──RESULT/ERROR──▶ (gone)
//! ```
//! An abandoned call keeps the credit it had, and gets no more: what a guest can still send for it is bounded.

use std::collections::HashMap;

use bytes::Bytes;
use emergent_guest_protocol::{Credit, Frame, Kind, ProtocolError, data_cost};
use emergent_wire::ErrorDetail;

/// What a frame means for its call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Incoming {
    /// Output; it was paid for with this much credit.
    Data(Kind, Bytes),
    /// The guest takes this much more input.
    InputCredit(u32),
    /// The call's answer.
    Result(Bytes),
    /// The call's failure.
    Error(ErrorDetail),
}

/// One call.
struct Entry<S> {
    /// Where its events go; none once its caller is gone.
    sink: Option<S>,
    credit: Credit,
}

/// All calls that have not had their last frame.
pub(crate) struct Table<S> {
    open: HashMap<u32, Entry<S>>,
    newest: u32,
}

impl<S> Default for Table<S> {
    fn default() -> Self {
        Self { open: HashMap::new(), newest: 0 }
    }
}

impl<S: Clone> Table<S> {
    /// Adds a call and gives it an id. None when the channel has used up its ids.
    pub(crate) fn open(&mut self, sink: S) -> Option<u32> {
        self.newest = self.newest.checked_add(1)?;
        self.open.insert(self.newest, Entry { sink: Some(sink), credit: Credit::default() });
        Some(self.newest)
    }

    /// How many calls have not had their last frame.
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// The caller is gone. True when the guest must be told.
    pub(crate) fn abandon(&mut self, id: u32) -> bool {
        self.open.get_mut(&id).is_some_and(|entry| entry.sink.take().is_some())
    }

    /// The caller has consumed output. True when the guest may be told so.
    pub(crate) fn grant(&mut self, id: u32, amount: u32) -> bool {
        self.open.get_mut(&id).is_some_and(|entry| entry.sink.is_some() && entry.credit.grant(amount).is_ok())
    }

    /// Takes a frame: where its event goes (none for an abandoned call), or the rule it breaks.
    pub(crate) fn take(&mut self, frame: Frame) -> Result<Option<(S, Incoming)>, ProtocolError> {
        let (kind, id) = (frame.kind, frame.call);
        let entry = self.open.get_mut(&id).ok_or(ProtocolError::UnknownCall(kind, id))?;
        let (event, last) = match kind {
            Kind::Stdout | Kind::Stderr => {
                let cost = data_cost(frame.payload.len());
                entry.credit.spend(cost).map_err(|_| ProtocolError::OverCredit(id))?;
                (Incoming::Data(kind, frame.payload.into()), false)
            }
            Kind::Credit => (Incoming::InputCredit(frame.credit_amount()), false),
            Kind::Result => (Incoming::Result(frame.payload.into()), true),
            Kind::Error => (Incoming::Error(frame.parse()?), true),
            _ => return Err(ProtocolError::UnexpectedKind(kind as u8)),
        };
        let sink = if last { self.open.remove(&id).and_then(|entry| entry.sink) } else { entry.sink.clone() };
        Ok(sink.map(|sink| (sink, event)))
    }

    /// Whether a call has not had its last frame.
    pub(crate) fn is_open(&self, id: u32) -> bool {
        self.open.contains_key(&id)
    }

    /// Ends all calls.
    pub(crate) fn clear(&mut self) {
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use emergent_guest_protocol::INITIAL_CREDIT;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_go_to_the_call_they_belong_to() {
        let mut table = Table::default();
        let (a, b) = (table.open('a').unwrap(), table.open('b').unwrap());
        assert_eq!(table.take(Frame::new(Kind::Stdout, b, *b"x")).unwrap().unwrap().0, 'b');
        assert_eq!(table.take(Frame::new(Kind::Result, a, *b"{}")).unwrap().unwrap().0, 'a');
        let late = table.take(Frame::new(Kind::Result, a, *b"{}"));
        assert_eq!(late, Err(ProtocolError::UnknownCall(Kind::Result, a)));
    }

    #[test]
    fn an_abandoned_call_gets_no_more_credit_and_ends_quietly() {
        let mut table = Table::default();
        let id = table.open(()).unwrap();
        assert!(table.abandon(id));
        assert!(!table.abandon(id));
        assert!(!table.grant(id, 1000));
        assert_eq!(table.take(Frame::new(Kind::Stdout, id, *b"late")), Ok(None));
        assert_eq!(table.take(Frame::new(Kind::Result, id, *b"{}")), Ok(None));
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn a_guest_can_not_send_more_than_it_was_granted() {
        let mut table = Table::default();
        let id = table.open(()).unwrap();
        let sent: usize = std::iter::from_fn(|| {
            let frame = Frame::new(Kind::Stdout, id, vec![0; 60_000]);
            table.take(frame).ok().map(|_| 60_000)
        })
        .sum();
        assert!(sent <= INITIAL_CREDIT as usize, "{sent}");
    }

    proptest! {
        /// Whatever a hostile guest sends, what its calls are handed stays within the credit granted.
        #[test]
        fn hostile_frames_are_bounded(
            frames in prop::collection::vec((0_u32..6, 0_usize..6, 1_usize..40_000), 0..60),
        ) {
            let mut table = Table::default();
            for _ in 0..3 {
                table.open(());
            }
            let mut handed = 0;
            for (id, kind, length) in frames {
                let kind = [Kind::Stdout, Kind::Stderr, Kind::Credit, Kind::Result, Kind::Error, Kind::Pong][kind];
                if let Ok(Some(((), Incoming::Data(_, bytes)))) = table.take(Frame::new(kind, id, vec![b'x'; length])) {
                    handed += bytes.len();
                }
                prop_assert!(table.len() <= 3);
            }
            prop_assert!(handed <= 3 * INITIAL_CREDIT as usize);
        }
    }
}
