-- Whether a snapshot holds the memory of the workspace too.
ALTER TABLE kb.workspace_snapshots ADD COLUMN memory BOOLEAN NOT NULL DEFAULT FALSE;
