"""A client reads every item of a list whose pages the server limits by bytes."""

import pytest

from planish import ServiceClient
from planish.client.checkpoint_records import ServerRecords

METADATA = {"key": "x" * 10_000}


@pytest.fixture
def small_pages(monkeypatch) -> None:
    for module in ("durable.records", "runs", "http.routes_sessions"):
        monkeypatch.setattr(f"planish.server.{module}.PAGE_BYTES", 25_000)


def test_clients_read_all_pages(server, small_pages):
    with ServiceClient(base_url=server.url) as service:
        client = service.create_lora_training_client("tiny", rank=2)
        saves = [client.save_state(f"c{n}", user_metadata=METADATA) for n in range(5)]
        paths = [save.result().path for save in saves][::-1]
        rest, run = service.create_rest_client(), client.model_id
        records = ServerRecords(server.url, None)
        found = (
            [item.tinker_path for item in rest.list_user_checkpoints().result().checkpoints],
            [item.tinker_path for item in rest.list_checkpoints(run).result().checkpoints],
            [row["tinker_path"] for row in records.checkpoints(None, None)],
            [row["tinker_path"] for row in records.checkpoints(run, None)],
        )
        for listed in found:
            assert [path for path in listed if run in path] == paths
        assert len(records.checkpoints(run, 3)) == 3
        assert run in {row["training_run_id"] for row in records.runs(None)}
