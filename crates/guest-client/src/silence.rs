//! Detects a guest that has calls to answer and sends nothing.
//!
//! ```text
//! frame ──10 s without a frame──▶ PING ──30 s without a frame──▶ the channel ends
//!   ▲                               │
//!   └──────── any frame ◀───────────┘
//! ```
//! Calls that may wait for any time (a listener, a parked ACCEPT) do not count: they must not wake an idle sandbox.

use std::time::Duration;

use emergent_guest_protocol::{Frame, Kind};
use tokio::time::Instant;

use crate::channel::Shared;

/// The time without a frame after which the guest gets a PING.
const PING_AFTER: Duration = Duration::from_secs(10);
/// The time without a frame after a PING after which the channel ends.
const PONG_WITHIN: Duration = Duration::from_secs(30);
/// The PINGs without a PONG after which no other is sent and the channel ends, also if frames came meanwhile.
const MAX_PONGS_DUE: u32 = 4;

/// The guest's last sign of life.
#[derive(Default)]
pub(crate) struct Silence {
    heard: Option<Instant>,
    /// The time of the last PING, if no frame has come since.
    asked: Option<Instant>,
    /// PINGs without a PONG. Frames that the guest sent earlier may come before the PONG.
    pongs_due: u32,
}

impl Silence {
    /// A frame has come.
    pub(crate) fn heard(&mut self) {
        self.heard = Some(Instant::now());
        self.asked = None;
    }

    /// A PONG has come. False when no PING waits for one.
    pub(crate) fn pong(&mut self) -> bool {
        self.heard();
        let left = self.pongs_due.checked_sub(1);
        self.pongs_due = left.unwrap_or(0);
        left.is_some()
    }

    /// Waits until the guest has been silent for too long while calls wait for it.
    pub(crate) async fn wait(&mut self, shared: &Shared) {
        // A notification can be older than the present calls: one is stored when a call starts while another is due.
        while shared.table.lock().due() == 0 {
            self.asked = None;
            shared.call_started.notified().await;
            self.heard = Some(Instant::now());
        }
        let until = match self.asked {
            Some(asked) => asked + PONG_WITHIN,
            None => *self.heard.get_or_insert_with(Instant::now) + PING_AFTER,
        };
        tokio::time::sleep_until(until).await;
    }

    /// After [`Silence::wait`]: the PING to send, or none when the channel must end.
    pub(crate) fn tick(&mut self) -> Option<Frame> {
        if self.asked.is_some() || self.pongs_due == MAX_PONGS_DUE {
            return None;
        }
        self.asked = Some(Instant::now());
        self.pongs_due += 1;
        Some(Frame::new(Kind::Ping, 0, 0_u64.to_be_bytes()))
    }
}
