-- Servers that work on this database. One that stops counting is dead, whatever its clock says.
CREATE TABLE core.servers (
    id UUID PRIMARY KEY,
    beat BIGINT NOT NULL,
    started_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);

-- The server that is changing the row; NULL when nobody is. What a dead server owns is finished or undone by another.
ALTER TABLE kb.agent_workspaces ADD COLUMN owner UUID;
-- Who holds the workspace for itself; NULL: nobody.
ALTER TABLE kb.agent_workspaces ADD COLUMN attached_to TEXT;
ALTER TABLE kb.agent_workspaces ADD COLUMN attached_at TIMESTAMPTZ;

-- Sandboxes that wait for a workspace. A claim moves the row to agent_workspaces in one transaction, with its id.
CREATE TABLE kb.warm_spares (
    id UUID PRIMARY KEY,
    provider TEXT NOT NULL,
    image TEXT NOT NULL,
    image_digest TEXT NOT NULL,
    network TEXT NOT NULL,
    resource_limits JSONB NOT NULL,
    status TEXT NOT NULL,                 -- 'filling', 'ready', 'leaving'
    owner UUID,
    created_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);

-- Copies of workspaces' files. They outlive the workspace.
CREATE TABLE kb.workspace_snapshots (
    id UUID PRIMARY KEY,
    workspace_id UUID NOT NULL,
    provider TEXT NOT NULL,
    description TEXT,
    image TEXT NOT NULL,
    network TEXT NOT NULL,
    resource_limits JSONB NOT NULL,
    size_bytes BIGINT,                    -- NULL until it is ready
    status TEXT NOT NULL,                 -- 'creating', 'ready', 'destroying'
    owner UUID,
    created_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);

CREATE INDEX idx_snapshots_newest ON kb.workspace_snapshots(created_at, id);
CREATE INDEX idx_snapshots_workspace ON kb.workspace_snapshots(workspace_id);
