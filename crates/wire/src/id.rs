//! Identifiers. Each kind has its own type, so that they can't be mixed up.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A new id. Ids sort by the time they were made (UUID version 7).
            pub fn generate() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }
    };
}

uuid_id!(
    /// One workspace (or hosted MCP server), for its whole life.
    WorkspaceId
);
uuid_id!(
    /// One command started by the bash tool inside a workspace.
    OperationId
);
uuid_id!(
    /// One access token. The id is public; the token's secret is not derived from it.
    TokenId
);
uuid_id!(
    /// One run of an agent.
    SessionId
);
uuid_id!(
    /// One project: a team with its quotas on an installation.
    ProjectId
);
uuid_id!(
    /// One installation of the server. All sandboxes, disks and networks that it creates carry this id.
    InstallationId
);
uuid_id!(
    /// One copy of a workspace's files.
    SnapshotId
);
uuid_id!(
    /// One run of the server.
    ServerId
);
