-- Whose tokens there are besides admins and workspaces. Projects get their other columns with their endpoints.
CREATE TABLE core.projects (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    created_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);

-- A token has the columns of its scope: 'admin' none, 'project' project_id, 'session' session_id and, where the session has
-- one, workspace_id, 'workspace' workspace_id.
ALTER TABLE core.access_tokens ADD COLUMN project_id UUID REFERENCES core.projects(id) ON DELETE CASCADE;
ALTER TABLE core.access_tokens ADD COLUMN session_id UUID REFERENCES kb.agent_sessions(id) ON DELETE CASCADE;

CREATE INDEX idx_tokens_project ON core.access_tokens(project_id);
CREATE INDEX idx_tokens_session ON core.access_tokens(session_id);
