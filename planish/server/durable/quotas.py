"""The quotas of one tenant: bytes on disk, and numbers of sessions, models and samplers.

Numbers are checked in the transaction that adds a row, so simultaneous requests cannot exceed a
limit together. `check_storage` cannot know the size of a save, a copy or an upload, so it runs
before it: what begins below `max_storage_bytes` is completed.

Each check raises BadRequest, a status that clients do not retry. A retry would be rejected again,
until the client deletes or closes something.
"""

from __future__ import annotations

from planish.server.durable.records import ModelRow, SamplerRow, SessionRow, Source, count
from planish.server.results import BadRequest
from planish.server.settings import TenantSettings

ROW_BYTES = 512
"""Estimated size of a row and its index entries, without the texts that the client sent."""

_STORED_BYTES = """
SELECT (SELECT COALESCE(SUM(bytes), 0) FROM sessions WHERE tenant = ?1)
     + (SELECT COALESCE(SUM(bytes), 0) FROM models WHERE tenant = ?1)
     + (SELECT COALESCE(SUM(training_bytes), 0) FROM models
        WHERE tenant = ?1 AND closed IS NULL AND snapshot_seq IS NOT NULL)
     + (SELECT COALESCE(SUM(bytes), 0) FROM checkpoints WHERE tenant = ?1)
     + (SELECT COALESCE(SUM(bytes), 0) FROM samplers
        WHERE tenant = ?1 AND closed IS NULL AND model IS NULL AND NOT EXISTS
          (SELECT 1 FROM checkpoints
           WHERE path = model_path AND checkpoints.created <= samplers.created))
"""
"""A sampler has hard links to the files of its checkpoint. So the sampler's files count only if the
checkpoint was deleted or replaced.
"""


def stored_bytes(source: Source, tenant: str) -> int:
    """Return the number of bytes that a tenant stores.

    The sum includes named checkpoints with their manifests, snapshots of open models, and the rows
    of sessions and runs. It includes the files of a sampler only if the sampler's checkpoint was
    deleted or replaced. It does not include unnamed samplers, because `max_unnamed_sampler_bytes`
    limits them.
    """
    return source.execute(_STORED_BYTES, [tenant]).fetchone()[0]


def check_storage(source: Source, tenant: str, settings: TenantSettings) -> None:
    """Raise BadRequest if a tenant stores `max_storage_bytes` or more."""
    used = stored_bytes(source, tenant)
    if used >= settings.max_storage_bytes:
        raise BadRequest(
            f"this tenant stores {used:,} bytes, and may store {settings.max_storage_bytes:,} "
            "(max_storage_bytes); delete some checkpoints, or give ttl_seconds when you save"
        )


def check_models(source: Source, tenant: str, settings: TenantSettings) -> None:
    """Raise BadRequest if a tenant cannot open another model."""
    check_storage(source, tenant, settings)
    _check_count(
        count(source, ModelRow, "tenant = ? AND closed IS NULL", [tenant]),
        ("models", "max_models"),
        settings.max_models,
        "unload some, or end their sessions (close their ServiceClient)",
    )


def check_samplers(source: Source, tenant: str, settings: TenantSettings) -> None:
    """Raise BadRequest if a tenant cannot open another sampler of a base model or a checkpoint."""
    where = "tenant = ? AND closed IS NULL AND model IS NULL"
    _check_count(
        count(source, SamplerRow, where, [tenant]),
        ("samplers", "max_samplers"),
        settings.max_samplers,
        "use one sampling client several times, or end sessions (close their ServiceClient)",
    )


def check_sessions(source: Source, tenant: str, settings: TenantSettings) -> None:
    """Raise BadRequest if a tenant cannot open another session."""
    _check_count(
        count(source, SessionRow, "tenant = ? AND ended IS NULL", [tenant]),
        ("sessions", "max_sessions"),
        settings.max_sessions,
        "close each ServiceClient after its work, or wait until unused sessions end "
        "(session_timeout)",
    )


def _check_count(num_open: int, names: tuple[str, str], limit: int, remedy: str) -> None:
    plural, setting = names
    if num_open >= limit:
        raise BadRequest(
            f"this tenant has {num_open:,} open {plural}, which is the limit ({setting}); {remedy}"
        )


def row_bytes(*texts: str) -> int:
    """Return the estimated size of a row with these texts, in bytes."""
    return ROW_BYTES + sum(len(text.encode()) for text in texts)
