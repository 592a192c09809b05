-- Requests that a client may send again: the second one gets the resource that the first one made.
CREATE TABLE kb.idempotency_keys (
    token_id UUID NOT NULL,               -- no foreign key: the key outlives a token that is removed
    key_hash BYTEA NOT NULL,              -- SHA-256 of the client's key
    operation TEXT NOT NULL,              -- such as 'workspace.create'
    request_hash BYTEA NOT NULL,          -- SHA-256 of the body
    resource_id UUID,                     -- NULL until it is known
    status TEXT NOT NULL,                 -- 'in_progress', 'done'
    owner UUID,                           -- the server that works on it; NULL when it is done
    created_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (token_id, key_hash)
);

CREATE INDEX idx_idempotency_age ON kb.idempotency_keys(created_at);
