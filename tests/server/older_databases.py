"""Databases as earlier versions of the server left them."""

import sqlite3
from pathlib import Path

from planish.server.durable.store import DATABASE


def downgrade_to_3(directory: Path) -> None:
    """Remove what versions 4 to 6 added."""
    connection = sqlite3.connect(directory / DATABASE)
    indexes = ("session_bytes", "open_sessions", "model_bytes", "open_models", "open_samplers")
    for index in (*indexes, "checkpoint_bytes", "failed_requests"):
        connection.execute(f"DROP INDEX {index}")
    connection.execute("DROP INDEX checkpoints_by_uptime")
    connection.execute("ALTER TABLE checkpoints DROP COLUMN expires_at_uptime")
    for table in ("sessions", "models"):
        connection.execute(f"ALTER TABLE {table} DROP COLUMN bytes")
    connection.execute("PRAGMA user_version = 3")
    connection.commit()
    connection.close()
