//! Amounts that people write as text: memory and disk sizes ("4G", "512M") and CPU counts ("2", "0.5").
//!
//! They are parsed once, at the edge, into exact integers. Text that parses is kept in a canonical form, so
//! that what a user reads back is what the system enforces.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes, written as `512M`, `4G`, `1.5G`, `1048576` and the like.
///
/// Units are binary and case-insensitive: K, M, G, T, optionally followed by `B` or `iB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

/// A number of CPUs in thousandths, written as `2` or `0.5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuCount {
    millis: u32,
}

/// Why a text is not a size or a CPU count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AmountError {
    /// Not a number with an optional unit.
    #[error("'{0}' is not a size: write a number with an optional unit, such as \"512M\" or \"4G\"")]
    NotASize(String),
    /// Zero, or more than 64 bits can hold.
    #[error("'{0}' is out of range")]
    OutOfRange(String),
    /// Not a number of CPUs.
    #[error("'{0}' is not a number of CPUs: write for example \"2\" or \"0.5\" (at most three decimals)")]
    NotACpuCount(String),
}

impl ByteSize {
    /// The size of `bytes` bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// `count` GiB.
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// `count` MiB.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        let trimmed = text.trim();
        let not_a_size = || AmountError::NotASize(shorten(text));
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(not_a_size()),
        };
        let (units, fraction, scale) = decimal(number).ok_or_else(not_a_size)?;
        let out_of_range = || AmountError::OutOfRange(shorten(text));
        let whole = u128::from(units) << shift;
        let part = (u128::from(fraction) << shift) / u128::from(scale);
        let bytes = u64::try_from(whole + part).map_err(|_| out_of_range())?;
        if bytes == 0 || bytes > i64::MAX as u64 {
            return Err(out_of_range());
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if self.0 != 0 && self.0 & ((1 << shift) - 1) == 0 {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl CpuCount {
    /// Thousandths of a CPU.
    pub const fn from_millis(millis: u32) -> Self {
        Self { millis }
    }

    /// `count` whole CPUs.
    pub const fn whole(count: u32) -> Self {
        Self { millis: count * 1000 }
    }

    /// The count in thousandths of a CPU.
    pub const fn millis(self) -> u32 {
        self.millis
    }
}

impl FromStr for CpuCount {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        let not_a_count = || AmountError::NotACpuCount(shorten(text));
        let (units, fraction, scale) = decimal(text.trim()).ok_or_else(not_a_count)?;
        if scale > 1000 {
            return Err(not_a_count());
        }
        let millis = units
            .checked_mul(1000)
            .and_then(|whole| whole.checked_add(fraction * (1000 / scale)))
            .and_then(|millis| u32::try_from(millis).ok())
            .filter(|millis| *millis > 0)
            .ok_or_else(|| AmountError::OutOfRange(shorten(text)))?;
        Ok(Self { millis })
    }
}

impl fmt::Display for CpuCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.millis / 1000, self.millis % 1000);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        let decimals = format!("{rest:03}");
        write!(f, "{whole}.{}", decimals.trim_end_matches('0'))
    }
}

/// Splits `12.5` into (12, 5, 10): whole part, fraction digits, and the power of ten under them.
fn decimal(text: &str) -> Option<(u64, u64, u64)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits =
        |part: &str| !part.is_empty() && part.len() <= 19 && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let scale = 10_u64.pow(u32::try_from(fraction.len()).ok()?);
    Some((whole.parse().ok()?, fraction.parse().ok()?, scale))
}

/// Text quoted in a message must not make the message long.
fn shorten(text: &str) -> String {
    text.chars().take(32).collect()
}

macro_rules! text_serde {
    ($type:ty, $what:literal, $example:literal) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Amount;
                impl de::Visitor<'_> for Amount {
                    type Value = $type;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str(concat!($what, " as text, such as ", $example))
                    }

                    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                        text.parse().map_err(E::custom)
                    }

                    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
                        self.visit_str(&number.to_string())
                    }

                    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
                        self.visit_str(&number.to_string())
                    }
                }
                deserializer.deserialize_any(Amount)
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::PartialSchema for $type {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .description(Some(concat!($what, " as text, such as ", $example)))
                    .into()
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::ToSchema for $type {}
    };
}

text_serde!(ByteSize, "a size", "\"4G\" or \"512M\"");
text_serde!(CpuCount, "a number of CPUs", "\"2\" or \"0.5\"");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_parsed_with_and_without_units() {
        for (text, bytes) in [
            ("4G", 4 << 30),
            ("4g", 4 << 30),
            ("4GB", 4 << 30),
            ("4GiB", 4 << 30),
            ("512M", 512 << 20),
            ("0.5G", 512 << 20),
            ("1.5K", 1536),
            ("10", 10),
            (" 10 k ", 10 << 10),
            ("2T", 2 << 40),
        ] {
            assert_eq!(text.parse::<ByteSize>().unwrap().bytes(), bytes, "{text}");
        }
    }

    #[test]
    fn texts_that_are_no_size_are_refused() {
        for text in [
            "",
            "G",
            "-1",
            "+1",
            "1e9",
            "0",
            "0.0G",
            "4X",
            "4 G B",
            "1..5G",
            ".5",
            "1.",
            "99999999T",
            "0x10",
            "４G",
            "NaN",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn cpu_counts_are_parsed_to_three_decimals() {
        for (text, millis) in [("2", 2000), ("0.5", 500), ("1.25", 1250), ("0.001", 1), ("16", 16000)] {
            assert_eq!(text.parse::<CpuCount>().unwrap().millis(), millis, "{text}");
        }
        for text in ["", "0", "0.0", "-1", "0.0001", "two", "1,5", "5000000", "1e1"] {
            assert!(text.parse::<CpuCount>().is_err(), "{text}");
        }
    }

    #[test]
    fn json_takes_text_and_plain_numbers() {
        assert_eq!(serde_json::from_str::<CpuCount>("0.5").unwrap().millis(), 500);
        assert_eq!(serde_json::from_str::<CpuCount>("2").unwrap().millis(), 2000);
        assert_eq!(serde_json::from_str::<ByteSize>("1048576").unwrap(), ByteSize::mib(1));
        assert_eq!(serde_json::to_string(&ByteSize::gib(4)).unwrap(), "\"4G\"");
        assert!(serde_json::from_str::<ByteSize>("-5").is_err());
        assert!(serde_json::from_str::<ByteSize>("true").is_err());
    }

    proptest! {
        #[test]
        fn a_size_survives_its_text(bytes in 1..=i64::MAX as u64) {
            let size = ByteSize::from_bytes(bytes);
            prop_assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
        }

        #[test]
        fn whole_units_are_exact(count in 1_u64..1000, unit in 0_usize..5) {
            let text = format!("{count}{}", ["", "K", "M", "G", "T"][unit]);
            prop_assert_eq!(text.parse::<ByteSize>().unwrap().bytes(), count << (10 * unit));
        }

        #[test]
        fn a_cpu_count_survives_its_text(millis in 1_u32..1_000_000) {
            let count = CpuCount { millis };
            prop_assert_eq!(count.to_string().parse::<CpuCount>().unwrap(), count);
        }

        #[test]
        fn any_text_gives_an_answer(text in "\\PC{0,40}") {
            let _ = text.parse::<ByteSize>();
            let _ = text.parse::<CpuCount>();
        }
    }
}
