"""The tables. Times are seconds since 1970; `ended` and `closed` rows are kept until they have aged
(retention.py), those of models for good.

A request's id is made of what identifies it: `{model}:{seq_id}` for training (the creation is
number 0), `{sampler}:{seq_id}` for sampling. Its state:

    accepted   on disk, and to be done
    started    a save whose name was free when it began, or a load whose checkpoint is pinned: done
               again without asking again
    done       has a result
    failed     was tried, and has a message
    refused    was never tried, and has a message: a body that could not be read, or one behind a
               number that never came

The body of a training request stays until a snapshot of its model covers it. Bodies and results are
the last columns, so that whoever asks for others need not read past them.
"""

VERSION = 3

_UNDER_WAY = """
CREATE TABLE under_way (
    id TEXT PRIMARY KEY, is_marked INTEGER NOT NULL, ends INTEGER NOT NULL, ends_alone INTEGER NOT NULL
) STRICT;
"""

SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, spec TEXT NOT NULL,
    created REAL NOT NULL, seen REAL NOT NULL, ended REAL, reason TEXT
) STRICT;
CREATE INDEX sessions_of_tenant ON sessions (tenant, created);

CREATE TABLE models (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL,
    base_model TEXT NOT NULL, lora TEXT NOT NULL, user_metadata TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL,
    passed INTEGER NOT NULL DEFAULT 0,
    snapshot_seq INTEGER, snapshot TEXT,
    training_bytes INTEGER NOT NULL, sampling_bytes INTEGER NOT NULL,
    arch TEXT, closed TEXT
) STRICT;
CREATE INDEX models_of_tenant ON models (tenant, created);
CREATE INDEX models_of_session ON models (session);

CREATE TABLE samplers (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL,
    base_model TEXT NOT NULL, model_path TEXT, model TEXT, seq INTEGER, source TEXT, memory_bytes INTEGER NOT NULL, bytes INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL, used REAL NOT NULL, closed TEXT
) STRICT;
CREATE INDEX samplers_of_session ON samplers (session);

CREATE TABLE requests (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL,
    state TEXT NOT NULL, digest BLOB, accepted REAL NOT NULL, finished REAL,
    body_bytes INTEGER NOT NULL DEFAULT 0, result_bytes INTEGER NOT NULL DEFAULT 0, message TEXT, category TEXT,
    error_class TEXT, body_file TEXT, result_file TEXT, body BLOB, result BLOB
) STRICT;
CREATE INDEX requests_of_owner ON requests (owner, seq);
CREATE INDEX requests_by_age ON requests (finished, result_bytes) WHERE finished IS NOT NULL;
CREATE INDEX requests_to_do ON requests (owner) WHERE finished IS NULL;

CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY, tenant TEXT NOT NULL, run TEXT NOT NULL, public INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL, made REAL NOT NULL, expires REAL, user_metadata TEXT NOT NULL
) STRICT;
CREATE INDEX checkpoints_of_tenant ON checkpoints (tenant, made);
CREATE INDEX checkpoints_of_run ON checkpoints (run, made);

CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
"""
SCHEMA += _UNDER_WAY

UPGRADES = {1: "ALTER TABLE requests ADD COLUMN error_class TEXT", 2: _UNDER_WAY}
"""By version: what makes the next one of a database."""
