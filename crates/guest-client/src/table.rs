//! The calls of one channel, as a pure state machine: frames in, events out, violations named.
//!
//! ```text
//! open ──RESULT/ERROR──▶ (gone)
//!   └──dropped by its caller──▶ abandoned ──RESULT/ERROR──▶ (gone)
//! ```
//! An abandoned call keeps its credit and gets no more: the data that a guest can still send for it is bounded.
//!
//! A guest can answer a call only after the call's first frame was sent, and spend credit only after its CREDIT frame was sent.
//! So a guest that does not read can't make the host queue frames for it.
//!
//! A LISTEN and an ACCEPT call get STARTED once, before any data. An ACCEPT call gets OUTPUT_END at most once, after STARTED
//! and after all its data. Other calls get neither.

use std::collections::HashMap;
use std::fmt;

use bytes::Bytes;
use emergent_guest_protocol::{Credit, Frame, Kind, ProtocolError, data_cost};
use emergent_wire::ErrorDetail;

use crate::call::parse_json;

/// The event that a frame is for its call.
#[derive(Clone, PartialEq)]
pub(crate) enum Incoming {
    /// The call's port is open, or it has its connection.
    Started(Bytes),
    /// Output; the guest has spent credit for it.
    Data(Kind, Bytes),
    /// The connection sends no more output.
    OutputEnd,
    /// The guest grants this much credit for input.
    InputCredit(u32),
    /// The call's answer.
    Result(Bytes),
    /// The call's failure.
    Error(ErrorDetail),
}

impl Incoming {
    /// The kind of its frame.
    fn kind(&self) -> Kind {
        match self {
            Self::Started(_) => Kind::Started,
            Self::Data(kind, _) => *kind,
            Self::OutputEnd => Kind::OutputEnd,
            Self::InputCredit(_) => Kind::Credit,
            Self::Result(_) => Kind::Result,
            Self::Error(_) => Kind::Error,
        }
    }
}

impl fmt::Debug for Incoming {
    /// Names the kind without the content, which can be long, and a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind().fmt(f)
    }
}

/// The kind of a call, which decides the frames that it may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// A call that works until it answers.
    Work,
    /// A LISTEN call.
    Listen,
    /// An ACCEPT call.
    Accept,
}

/// One call.
struct Entry<S> {
    kind: CallKind,
    /// Kept until the last frame: the caller's permit is in it.
    sink: S,
    credit: Credit,
    /// Credit that the caller has given back and that no CREDIT frame has granted yet.
    unsent_credit: u32,
    is_started: bool,
    has_output_ended: bool,
    is_abandoned: bool,
}

impl<S> Entry<S> {
    /// Whether the guest owes a frame now. A listener and a parked ACCEPT call may wait for any time.
    fn is_due(&self) -> bool {
        match self.kind {
            CallKind::Work => true,
            CallKind::Listen => !self.is_started,
            CallKind::Accept => self.is_started,
        }
    }

    /// Whether the guest may send output.
    fn takes_output(&self) -> bool {
        match self.kind {
            CallKind::Work => true,
            CallKind::Listen => false,
            CallKind::Accept => self.is_started && !self.has_output_ended,
        }
    }
}

/// All calls that have not had their last frame.
pub(crate) struct Table<S> {
    open: HashMap<u32, Entry<S>>,
    newest: u32,
    /// The newest call whose first frame was sent. First frames are sent in the order of the ids.
    newest_sent: u32,
}

impl<S> Default for Table<S> {
    fn default() -> Self {
        Self { open: HashMap::new(), newest: 0, newest_sent: 0 }
    }
}

impl<S: Clone> Table<S> {
    /// Adds a call and gives it an id. None when the channel has used up its ids.
    pub(crate) fn open(&mut self, kind: CallKind, sink: S) -> Option<u32> {
        self.newest = self.newest.checked_add(1)?;
        let entry = Entry {
            kind,
            sink,
            credit: Credit::default(),
            unsent_credit: 0,
            is_started: false,
            has_output_ended: false,
            is_abandoned: false,
        };
        self.open.insert(self.newest, entry);
        Some(self.newest)
    }

    /// The first frame of a call is sent now.
    pub(crate) fn note_sent(&mut self, id: u32) {
        self.newest_sent = self.newest_sent.max(id);
    }

    /// The number of calls that have not had their last frame.
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// The number of calls for which the guest owes a frame.
    pub(crate) fn due(&self) -> usize {
        self.open.values().filter(|entry| entry.is_due()).count()
    }

    /// The caller has dropped the call. True when the guest must get a CANCEL.
    pub(crate) fn abandon(&mut self, id: u32) -> bool {
        self.open.get_mut(&id).is_some_and(|entry| !std::mem::replace(&mut entry.is_abandoned, true))
    }

    /// The caller has consumed output and gives its credit back. True when a CREDIT frame must be queued: none is queued yet.
    pub(crate) fn give_back(&mut self, id: u32, amount: u32) -> bool {
        let Some(entry) = self.open.get_mut(&id).filter(|entry| !entry.is_abandoned) else {
            return false;
        };
        let is_queued = entry.unsent_credit > 0;
        entry.unsent_credit = entry.unsent_credit.saturating_add(amount);
        !is_queued
    }

    /// Grants all credit that was given back. Returns the amount of the CREDIT frame, which is sent now. None when the call
    /// gets no more credit.
    pub(crate) fn grant(&mut self, id: u32) -> Option<u32> {
        let entry = self.open.get_mut(&id).filter(|entry| !entry.is_abandoned)?;
        let amount = std::mem::take(&mut entry.unsent_credit);
        entry.credit.grant(amount).ok().map(|()| amount)
    }

    /// Takes a frame. Returns its event and the sink of its call (none for an abandoned call), or the rule it breaks.
    pub(crate) fn take(&mut self, frame: Frame) -> Result<Option<(S, Incoming)>, ProtocolError> {
        let (kind, id) = (frame.kind, frame.call);
        let sent = self.open.get_mut(&id).filter(|_| id <= self.newest_sent);
        let entry = sent.ok_or(ProtocolError::UnknownCall(kind, id))?;
        let (event, last) = match kind {
            Kind::Started if entry.kind != CallKind::Work && !entry.is_started => {
                entry.is_started = true;
                (Incoming::Started(frame.payload.into()), false)
            }
            Kind::Stdout | Kind::Stderr if entry.takes_output() => {
                let cost = data_cost(frame.payload.len());
                entry.credit.spend(cost).map_err(|_| ProtocolError::OverCredit(id))?;
                (Incoming::Data(kind, frame.payload.into()), false)
            }
            Kind::OutputEnd if entry.kind == CallKind::Accept && entry.takes_output() => {
                entry.has_output_ended = true;
                (Incoming::OutputEnd, false)
            }
            Kind::Credit => (Incoming::InputCredit(frame.credit_amount()), false),
            Kind::Result => (Incoming::Result(frame.payload.into()), true),
            Kind::Error => {
                let bad_message = |reason| ProtocolError::BadMessage { kind, reason };
                (Incoming::Error(parse_json(&frame.payload).map_err(bad_message)?), true)
            }
            _ => return Err(ProtocolError::UnexpectedKind(kind as u8)),
        };
        let sink = (!entry.is_abandoned).then(|| entry.sink.clone());
        if last {
            self.open.remove(&id);
        }
        Ok(sink.map(|sink| (sink, event)))
    }

    /// Ends all calls and returns their sinks.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = S> {
        self.open.drain().map(|(_, entry)| entry.sink)
    }
}

#[cfg(test)]
mod tests {
    use emergent_guest_protocol::INITIAL_CREDIT;
    use proptest::prelude::*;

    use super::*;

    /// Adds a call whose first frame is sent.
    fn send<S: Clone>(table: &mut Table<S>, kind: CallKind, sink: S) -> u32 {
        let id = table.open(kind, sink).unwrap();
        table.note_sent(id);
        id
    }

    #[test]
    fn frames_go_to_the_call_they_belong_to() {
        let mut table = Table::default();
        let (a, b) = (send(&mut table, CallKind::Work, 'a'), send(&mut table, CallKind::Work, 'b'));
        assert_eq!(table.take(Frame::new(Kind::Stdout, b, *b"x")).unwrap().unwrap().0, 'b');
        assert_eq!(table.take(Frame::new(Kind::Result, a, *b"{}")).unwrap().unwrap().0, 'a');
        let late = table.take(Frame::new(Kind::Result, a, *b"{}"));
        assert_eq!(late, Err(ProtocolError::UnknownCall(Kind::Result, a)));
    }

    #[test]
    fn an_abandoned_call_gets_no_more_credit_and_ends_quietly() {
        let mut table = Table::default();
        let id = send(&mut table, CallKind::Work, ());
        assert!(table.abandon(id));
        assert!(!table.abandon(id));
        assert!(!table.give_back(id, 1000));
        assert_eq!(table.grant(id), None);
        assert_eq!(table.take(Frame::new(Kind::Stdout, id, *b"late")), Ok(None));
        assert_eq!(table.take(Frame::new(Kind::Result, id, *b"{}")), Ok(None));
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn a_guest_can_not_send_more_than_it_was_granted() {
        let mut table = Table::default();
        let id = send(&mut table, CallKind::Work, ());
        let sent: usize = std::iter::from_fn(|| {
            let frame = Frame::new(Kind::Stdout, id, vec![0; 60_000]);
            table.take(frame).ok().map(|_| 60_000)
        })
        .sum();
        assert!(sent <= INITIAL_CREDIT as usize, "{sent}");
    }

    #[test]
    fn a_call_that_was_not_sent_takes_no_frame() {
        let mut table = Table::default();
        let sent = send(&mut table, CallKind::Work, ());
        let queued = table.open(CallKind::Work, ()).unwrap();
        let early = table.take(Frame::new(Kind::Result, queued, *b"{}"));
        assert_eq!(early, Err(ProtocolError::UnknownCall(Kind::Result, queued)));
        assert!(table.take(Frame::new(Kind::Result, sent, *b"{}")).is_ok());
        table.note_sent(queued);
        assert!(table.take(Frame::new(Kind::Result, queued, *b"{}")).is_ok());
    }

    #[test]
    fn credit_that_was_given_back_is_queued_once_and_counts_when_it_is_sent() {
        let mut table = Table::default();
        let id = send(&mut table, CallKind::Work, ());
        let mut output = || table.take(Frame::new(Kind::Stdout, id, vec![0; 60_000])).map(drop);
        while output().is_ok() {}
        assert!(table.give_back(id, 60_100));
        assert!(!table.give_back(id, 60_100), "a CREDIT frame is queued already");
        let mut output = || table.take(Frame::new(Kind::Stdout, id, vec![0; 60_000])).map(drop);
        assert_eq!(output(), Err(ProtocolError::OverCredit(id)));
        assert_eq!(table.grant(id), Some(120_200));
        let mut output = || table.take(Frame::new(Kind::Stdout, id, vec![0; 60_000])).map(drop);
        assert_eq!((output(), output()), (Ok(()), Ok(())));
        assert_eq!(table.grant(id), None);
        assert!(table.give_back(id, 1));
    }

    #[test]
    fn started_and_output_end_come_once_in_order_and_only_for_the_calls_that_have_them() {
        let started = |id| Frame::new(Kind::Started, id, *b"{}");
        let output = |id| Frame::new(Kind::Stdout, id, *b"x");
        let end = |id| Frame::new(Kind::OutputEnd, id, []);
        let refused = |kind: Kind| Err(ProtocolError::UnexpectedKind(kind as u8));
        let mut table = Table::default();
        let work = send(&mut table, CallKind::Work, ());
        assert_eq!(table.take(started(work)), refused(Kind::Started));
        assert_eq!(table.take(end(work)), refused(Kind::OutputEnd));
        let listen = send(&mut table, CallKind::Listen, ());
        assert!(table.take(started(listen)).is_ok());
        assert_eq!(table.take(started(listen)), refused(Kind::Started));
        assert_eq!(table.take(output(listen)), refused(Kind::Stdout));
        let accept = send(&mut table, CallKind::Accept, ());
        assert_eq!(table.take(output(accept)), refused(Kind::Stdout));
        assert_eq!(table.take(end(accept)), refused(Kind::OutputEnd));
        assert!(table.take(started(accept)).is_ok());
        assert!(table.take(output(accept)).is_ok());
        assert!(table.take(end(accept)).is_ok());
        assert_eq!(table.take(end(accept)), refused(Kind::OutputEnd));
        assert_eq!(table.take(output(accept)), refused(Kind::Stdout));
    }

    #[test]
    fn listeners_and_parked_accepts_owe_no_frame() {
        let mut table = Table::default();
        let listen = send(&mut table, CallKind::Listen, ());
        assert_eq!(table.due(), 1);
        table.take(Frame::new(Kind::Started, listen, *b"{}")).unwrap();
        let accept = send(&mut table, CallKind::Accept, ());
        assert_eq!(table.due(), 0);
        table.take(Frame::new(Kind::Started, accept, *b"{}")).unwrap();
        assert_eq!(table.due(), 1);
    }

    proptest! {
        /// Calls never get more data from a hostile guest than they granted credit for.
        #[test]
        fn hostile_frames_are_bounded(
            frames in prop::collection::vec((0_u32..6, 0_usize..8, 1_usize..40_000), 0..60),
        ) {
            let mut table = Table::default();
            for kind in [CallKind::Work, CallKind::Listen, CallKind::Accept] {
                send(&mut table, kind, ());
            }
            let mut handed = 0;
            for (id, kind, length) in frames {
                let kind = [
                    Kind::Stdout, Kind::Stderr, Kind::Credit, Kind::Result, Kind::Error, Kind::Pong, Kind::Started,
                    Kind::OutputEnd,
                ][kind];
                if let Ok(Some(((), Incoming::Data(_, bytes)))) = table.take(Frame::new(kind, id, vec![b'x'; length])) {
                    handed += bytes.len();
                }
                prop_assert!(table.len() <= 3);
            }
            prop_assert!(handed <= 3 * INITIAL_CREDIT as usize);
        }
    }
}
