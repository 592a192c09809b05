//! Versions of the protocol.

/// The versions with `initialize` and sessions, oldest first.
pub const LEGACY: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];
/// The newest version with `initialize`.
pub const NEWEST_LEGACY: &str = LEGACY[3];
/// The version without `initialize` and sessions.
pub const MODERN: &str = "2026-07-28";
/// All supported versions, oldest first.
pub const ALL: [&str; 5] = [LEGACY[0], LEGACY[1], LEGACY[2], LEGACY[3], MODERN];
/// From this version on clients accept events without a message.
const EMPTY_EVENTS_FROM: &str = "2025-11-25";

/// Whether a version belongs to the modern era. Versions are dates: their order is that of their texts.
pub fn is_modern(version: &str) -> bool {
    version >= MODERN
}

/// Whether clients of a version accept events without a message.
pub fn accepts_empty_events(version: &str) -> bool {
    version >= EMPTY_EVENTS_FROM
}
