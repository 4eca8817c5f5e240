"""The tables of the server's database. Times are seconds since 1970.

Rows of ended sessions and closed samplers expire (maintenance.py). Rows of models are never
deleted.

A request's id is `{model}:{seq_id}` for training (the creation is number 0) and
`{sampler}:{seq_id}` for sampling. The states of a request:

    accepted   The request is on disk, and has not run yet.
    started    A save has checked that its name is free, or a load has copied its checkpoint. A
               repeated run after a crash skips this check or copy.
    done       The request has a result.
    failed     The request ran, and has an error message.
    refused    The request never ran, and has an error message. Its body could not be read, or a
               request with an earlier number never arrived.

`accepted`, `begun` and `finished` are when the request arrived, when its turn came, and when it was
answered. `begun` is written together with the answer, and is NULL if the request never ran.

The body of a training request is kept until a snapshot of its model includes the request. Bodies
and results are the last columns, so that a query for other columns need not read past them.

records.py documents the other columns, models/step_metrics.py the table `steps`, and crash_guard.py
the table `crash_guard`.
"""

VERSION = 1
"""The version of the tables. The database stores it, and a server opens only its own version."""

SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, spec TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, ended REAL, reason TEXT,
    bytes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX sessions_of_tenant ON sessions (tenant, created);

CREATE TABLE models (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL,
    base_model TEXT NOT NULL, lora TEXT NOT NULL, user_metadata TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL,
    skipped_below INTEGER NOT NULL DEFAULT 0,
    snapshot_seq INTEGER, snapshot TEXT,
    training_bytes INTEGER NOT NULL, sampling_bytes INTEGER NOT NULL,
    arch TEXT, closed TEXT, bytes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX models_of_tenant ON models (tenant, created);
CREATE INDEX models_of_session ON models (session);

CREATE TABLE steps (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    model TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL
) STRICT;
CREATE INDEX steps_of_model ON steps (model, id);

CREATE TABLE samplers (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL,
    base_model TEXT NOT NULL, model_path TEXT, model TEXT, seq INTEGER, source TEXT,
    memory_bytes INTEGER NOT NULL, bytes INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL, used REAL NOT NULL, closed TEXT
) STRICT;
CREATE INDEX samplers_of_session ON samplers (session);

CREATE TABLE requests (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, owner TEXT NOT NULL,
    seq INTEGER NOT NULL, state TEXT NOT NULL, digest BLOB,
    accepted REAL NOT NULL, begun REAL, finished REAL,
    body_bytes INTEGER NOT NULL DEFAULT 0, result_bytes INTEGER NOT NULL DEFAULT 0,
    message TEXT, category TEXT, error_class TEXT,
    body_file TEXT, result_file TEXT, body BLOB, result BLOB
) STRICT;
CREATE INDEX requests_of_owner ON requests (owner, seq);
CREATE INDEX requests_by_age ON requests (finished, result_bytes) WHERE finished IS NOT NULL;
CREATE INDEX requests_to_do ON requests (owner) WHERE finished IS NULL;
CREATE INDEX failed_requests ON requests (tenant, LENGTH(CAST(message AS BLOB)))
    WHERE state IN ('failed', 'refused');

CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY, tenant TEXT NOT NULL, run TEXT NOT NULL,
    public INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL, created REAL NOT NULL, expires REAL,
    user_metadata TEXT NOT NULL, alias TEXT
) STRICT;
CREATE UNIQUE INDEX checkpoint_aliases ON checkpoints (alias) WHERE alias IS NOT NULL;
CREATE INDEX checkpoints_of_tenant ON checkpoints (tenant, created);
CREATE INDEX checkpoints_of_run ON checkpoints (run, created);
CREATE INDEX checkpoints_by_expiry ON checkpoints (expires) WHERE expires IS NOT NULL;

CREATE TABLE crash_guard (
    id TEXT PRIMARY KEY, is_marked INTEGER NOT NULL,
    crashes INTEGER NOT NULL, sole_crashes INTEGER NOT NULL
) STRICT;

CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;

-- With these indexes, the sums and counts of quotas.py need not read the rows, which may be large.
CREATE INDEX session_bytes ON sessions (tenant, bytes);
CREATE INDEX open_sessions ON sessions (tenant) WHERE ended IS NULL;
CREATE INDEX model_bytes ON models (tenant, bytes);
CREATE INDEX open_models ON models (tenant, snapshot_seq, training_bytes) WHERE closed IS NULL;
CREATE INDEX open_samplers ON samplers (tenant, model, model_path, created, bytes)
    WHERE closed IS NULL;
CREATE INDEX checkpoint_bytes ON checkpoints (tenant, bytes);
"""
