-- What an MCP server is called; NULL for agent workspaces.
ALTER TABLE kb.agent_workspaces ADD COLUMN name TEXT;
CREATE UNIQUE INDEX idx_workspaces_name ON kb.agent_workspaces(name) WHERE name IS NOT NULL;
