"""An error that quotes what a client sent is short wherever it is kept or sent."""

import pytest
from server_client import Client, gradient, running

from planish.errors import MAX_MESSAGE, StorageError, UserError, shortened
from planish.server.durable import journal
from planish.server.results import Failed
from planish.types import check_metadata


def test_messages_keep_their_beginning_and_their_remedy():
    message = shortened(f"user_metadata={'x' * 100_000}: give strings")
    assert len(message) == MAX_MESSAGE
    assert message.startswith("user_metadata=xxx")
    assert message.endswith("xxx: give strings")
    assert "characters left out" in message
    edge = "x" * MAX_MESSAGE
    assert shortened(edge) == edge
    assert len(shortened(edge + "y")) == MAX_MESSAGE


def test_every_error_of_planish_is_short():
    with pytest.raises(UserError) as refused:
        check_metadata({"key": list(range(1_000_000))})
    assert len(str(refused.value)) == MAX_MESSAGE
    assert len(str(StorageError("x" * 100_000))) == MAX_MESSAGE
    assert len(Failed("x" * 100_000, "user").message) == MAX_MESSAGE


async def test_a_rejected_request_leaves_little_in_the_journal(model_dir, data_dir):
    """The error of another library has no limit of its own."""
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await server.models.reject(client.tenant, model.model_id, 1, ValueError("k" * 10_000_000))
        row = await server.store.read(journal.request_row, f"{model.model_id}:1")
        assert row is not None
        assert row.message is not None
        assert len(row.message) == MAX_MESSAGE
        await client.done(await model.submit(gradient(model.model_id), 2))
