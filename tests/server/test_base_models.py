"""Base models are those named at the start: a request loads no other, and other weights under the
same name are noticed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from server_client import Client, adam, gradient

from planish.engine import base_models
from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.errors import UnknownModelError, UserError
from planish.server.engine_client import WARMUP_SAMPLE
from planish.server.results import Failed
from planish.server.server import Server
from planish.service import CreateSampler
from planish.testing import tiny_model
from planish.types import LoraConfig


@asynccontextmanager
async def serving(
    models: Mapping[str, Path], data_dir: Path, quantize: str | None = None
) -> AsyncIterator[Server]:
    engine = Engine(
        {name: str(path) for name, path in models.items()},
        data_dir / "checkpoints",
        EngineSettings(deterministic=True, device="cpu", quantize=quantize),
        only_these_models=True,
    )
    server = Server(engine, data_dir, list(models))
    try:
        await server.start()
        yield server
    finally:
        await server.stop(20)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("other"), seed=1)


def test_a_name_that_is_not_served_is_neither_a_path_nor_downloaded(
    model_dir: Path, other_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = Engine({"tiny": str(model_dir)}, tmp_path, only_these_models=True)
    resolved = []

    def resolve(name: str, models: Mapping[str, str]) -> Path:
        resolved.append(name)
        return Path(models[name])

    monkeypatch.setattr(base_models, "resolve_model", resolve)
    for name in (str(other_dir), "HuggingFaceTB/SmolLM2-135M-Instruct", "Tiny"):
        for call in (
            lambda name=name: engine.check_sample(name, WARMUP_SAMPLE),
            lambda name=name: engine.administration.adapter_bytes(name, LoraConfig(4)),
            lambda name=name: engine.tokenizer_directory(name),
            lambda name=name: engine.submit(CreateSampler("s", name)),
        ):
            with pytest.raises(UnknownModelError, match="not served by this process.*--model"):
                call()
    assert resolved == []
    engine.check_sample("tiny", WARMUP_SAMPLE)
    assert resolved == ["tiny"]
    engine.close()


async def test_requests_of_a_base_model_that_is_no_longer_served_say_so(
    model_dir: Path, other_dir: Path, data_dir: Path
):
    both = {"tiny": model_dir, "other": other_dir}

    async with serving(both, data_dir) as server:
        client = await Client.start(server)
        model = await client.model(base_model="other")
        sampler = await client.sampler(base_model="other")
        await model.step()
    async with serving({"tiny": model_dir}, data_dir) as server:
        client.server = server
        answer = await client.answer(await model.submit(gradient(model.model_id)))
        assert isinstance(answer, Failed)
        assert "base_model='other' is not served by this process" in answer.message
        with pytest.raises(UserError, match="'other' is not served"):
            await client.sample(sampler)
    async with serving(both, data_dir) as server:  # nothing was lost
        client.server = server
        refused = await client.answer(await model.submit(adam(model.model_id)))
        assert isinstance(refused, Failed)  # the gradient before it failed
        await model.step()
        assert (await client.sample(sampler)).sequences


async def test_other_weights_under_the_same_name_are_noticed_without_a_snapshot(
    model_dir: Path, other_dir: Path, data_dir: Path
):
    async with serving({"tiny": model_dir}, data_dir) as server:
        client = await Client.start(server)
        sampler = await client.sampler(base_model="tiny")  # has no checkpoint, nor snapshot
    with pytest.raises(UserError, match="--model tiny: .*1 open models and samplers"):
        async with serving({"tiny": other_dir}, data_dir):
            pass
    async with serving({"tiny": model_dir}, data_dir) as server:
        client.server = server
        assert (await client.sample(sampler)).sequences
        await server.sessions.end(client.session_id, "it is over")
    async with serving({"tiny": other_dir}, data_dir) as server:  # nobody uses the others
        client = await Client.start(server)
        await client.sampler(base_model="tiny")
    with pytest.raises(UserError, match="--model tiny"):
        async with serving({"tiny": model_dir}, data_dir):
            pass


async def test_another_quantization_is_noticed_at_the_start(model_dir: Path, data_dir: Path):
    async with serving({"tiny": model_dir}, data_dir, "int8") as server:
        client = await Client.start(server)
        await client.sampler(base_model="tiny")
    with pytest.raises(UserError, match="--model tiny: .*earlier --quantize"):
        async with serving({"tiny": model_dir}, data_dir):
            pass
    async with serving({"tiny": model_dir}, data_dir, "int8"):
        pass
