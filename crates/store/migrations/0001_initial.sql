-- Written once, in PostgreSQL's words; `migrate::for_sqlite` says how SQLite reads it.

CREATE TABLE core.settings (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

-- One run of an agent. Only what the foreign key needs; sessions get their columns with their endpoints.
CREATE TABLE kb.agent_sessions (
    id UUID PRIMARY KEY,
    created_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);

-- Agent workspaces and hosted MCP servers. A row is written before anything is made outside the database and
-- removed after everything is gone, so that it always says what is to be finished or undone.
CREATE TABLE kb.agent_workspaces (
    id UUID PRIMARY KEY,
    agent_session_id UUID REFERENCES kb.agent_sessions(id),
    container_type TEXT NOT NULL,
    provider TEXT NOT NULL,               -- '' until one is chosen
    provider_workspace_id TEXT NOT NULL,  -- '' until one is chosen
    repository_url TEXT,
    branch TEXT,
    deployment_mode TEXT NOT NULL,
    lifecycle TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    last_used_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    expires_at TIMESTAMPTZ,               -- NULL: never
    resource_limits JSONB,
    snapshot_id TEXT,
    mcp_config JSONB,
    metadata JSONB,
    -- Beyond the design:
    image TEXT NOT NULL,
    network TEXT NOT NULL,
    environment_sealed BYTEA,             -- AES-256-GCM, see seal.rs; NULL: no variables
    ttl_seconds BIGINT,                   -- each use moves expires_at this far ahead; NULL: never expires
    placement JSONB,                      -- why this provider; NULL until one is chosen
    error TEXT                            -- what failed last; NULL once it is ready again
);

-- Index for finding MCP servers that should be running
CREATE INDEX idx_workspaces_persistent ON kb.agent_workspaces(container_type, lifecycle, status)
    WHERE container_type = 'mcp_server' AND lifecycle = 'persistent';
-- Pages, newest first.
CREATE INDEX idx_workspaces_newest ON kb.agent_workspaces(created_at, id);
-- The concurrency limit, recovery, and counts per provider.
CREATE INDEX idx_workspaces_status ON kb.agent_workspaces(status, container_type, provider);
-- The sweep.
CREATE INDEX idx_workspaces_expiry ON kb.agent_workspaces(expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX idx_workspaces_session ON kb.agent_workspaces(agent_session_id);

CREATE TABLE core.access_tokens (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL,
    scope TEXT NOT NULL,                  -- 'admin' or 'workspace'
    workspace_id UUID REFERENCES kb.agent_workspaces(id) ON DELETE CASCADE,
    secret_hash BYTEA NOT NULL UNIQUE,    -- SHA-256 of 32 random bytes
    created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    expires_at TIMESTAMPTZ,
    last_used_at TIMESTAMPTZ,
    revoked_at TIMESTAMPTZ
);

CREATE UNIQUE INDEX idx_tokens_name ON core.access_tokens(name) WHERE revoked_at IS NULL;
CREATE INDEX idx_tokens_workspace ON core.access_tokens(workspace_id);

-- One row for each tool call or action, chained by hashes (audit.rs). No foreign keys: it outlives what it is about.
CREATE TABLE kb.tool_audit (
    seq BIGINT PRIMARY KEY,               -- 1, 2, 3, … without a gap
    at TIMESTAMPTZ NOT NULL,
    actor_token_id UUID,
    actor_name TEXT,
    workspace_id UUID,
    session_id UUID,
    tool TEXT NOT NULL,
    outcome TEXT NOT NULL,
    error_code TEXT,
    duration_ms BIGINT NOT NULL,
    request JSONB NOT NULL,               -- a summary, never contents
    request_id TEXT,
    prev_hash BYTEA NOT NULL,
    hash BYTEA NOT NULL
);

CREATE INDEX idx_audit_workspace ON kb.tool_audit(workspace_id, seq);
CREATE INDEX idx_audit_time ON kb.tool_audit(at);
