//! Enums whose variants have fixed names.

/// A closed set of names that is written the same in JSON, in the database and on the command line, and in the description
/// of the API (whose derive can't read a `literal` of a macro, but reads a `tt`).
macro_rules! names {
    ($(#[$doc:meta])* $type:ident { $($(#[$vdoc:meta])* $variant:ident = $text:tt),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        pub enum $type {
            $($(#[$vdoc])* #[serde(rename = $text)] $variant,)*
        }

        impl $type {
            /// All of them.
            pub const ALL: &[$type] = &[$($type::$variant),*];

            /// The name as it is written everywhere.
            pub const fn as_str(self) -> &'static str {
                match self { $($type::$variant => $text,)* }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::names::UnknownName;

            fn from_str(text: &str) -> Result<Self, $crate::names::UnknownName> {
                Self::ALL.iter().copied().find(|name| name.as_str() == text).ok_or_else(|| $crate::names::UnknownName {
                    given: text.chars().take(64).collect(),
                    known: concat!($("'", $text, "' "),*).trim_end(),
                })
            }
        }
    };
}

/// A text that is not one of a set of names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is none of {known}")]
pub struct UnknownName {
    pub(crate) given: String,
    pub(crate) known: &'static str,
}
pub(crate) use names;
