"""The check that the weights of the base models have not changed since the last start.

Checkpoints and snapshots contain the fingerprint of their base weights. Requests in the journal and
models without a snapshot do not, so the data directory keeps the fingerprint of each base model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from planish.errors import PlanishError, StorageError, UserError
from planish.server.durable.records import ModelRow, SamplerRow, count
from planish.server.durable.store import Store, Transaction
from planish.server.engine_client import EngineClient

_log = logging.getLogger(__name__)


async def check(store: Store, engine: EngineClient, base_models: Sequence[str]) -> None:
    """Compare the fingerprint of each base model with the fingerprint of the last start, and record
    new fingerprints.

    Raise UserError if a fingerprint changed while models or samplers of this base model are open,
    because their requests would run on other weights. If the files of a base model cannot be read,
    log an error. Only the requests of this base model fail later.
    """
    for name in base_models:
        try:
            fingerprint = await engine.weights_fingerprint(name)
        except (PlanishError, OSError) as error:
            _log.error("--model %s: its weights cannot be read: %s", name, error)
            continue
        try:
            num_dependents = await store.write(_record_fingerprint, name, fingerprint)
        except StorageError:
            return  # a full disk must not keep the server from starting
        if num_dependents:
            raise UserError(
                f"--model {name}: the weights differ from those that this data directory was last "
                f"used with, and {num_dependents} open models and samplers depend on the earlier "
                "weights. Give the earlier weights and the earlier --quantize, or serve the new "
                "weights under another name"
            )


def _record_fingerprint(transaction: Transaction, name: str, fingerprint: str) -> int:
    """Record the fingerprint of a base model, unless open models or samplers use an earlier,
    different fingerprint. Return the number of these models and samplers.
    """
    key = f"weights of {name}"
    row = transaction.execute("SELECT value FROM meta WHERE key = ?", [key]).fetchone()
    if row is not None and bytes(row[0]).decode() == fingerprint:
        return 0
    num_dependents = 0
    if row is not None:
        num_dependents = sum(
            count(transaction, kind, "base_model = ? AND closed IS NULL", [name])
            for kind in (ModelRow, SamplerRow)
        )
    if not num_dependents:
        transaction.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [key, fingerprint.encode()],
        )
    return num_dependents
