"""The names of checkpoints for OpenAI clients, and the list of models."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import BASE, CHAT, WAIT, Served, serving

from planish import ServiceClient
from planish.client.training_client import TrainingClient
from planish.errors import UserError
from planish.server.openai.model_names import check_aliases

ALIASES = {"tutor": "placeholder"}


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    models: dict[str, Path] = dict.fromkeys((BASE, CHAT), model_dir)
    with serving(models, tmp_path_factory.mktemp("openai"), ALIASES) as served:
        yield served


@pytest.fixture(scope="module")
def trained(served: Served) -> Iterator[TrainingClient]:
    with ServiceClient(base_url=served.url, api_key="tml-first") as service:
        yield service.create_lora_training_client(CHAT, rank=4, seed=1)


def listed(served: Served, key: str = "tml-first") -> dict[str, dict[str, Any]]:
    with served.http(key) as http:
        entries = http.get("/v1/models").json()["data"]
        for entry in entries:
            assert http.get(f"/v1/models/{entry['id']}").json() == entry
    return {entry["id"]: entry for entry in entries}


def status_of(served: Served, model: str, key: str = "tml-first") -> int:
    body = {"model": model, "prompt": [1, 2], "max_tokens": 1}
    with served.http(key) as http:
        return http.post("/v1/completions", json=body).status_code


def test_models_have_their_context_parent_and_time(served: Served, trained: TrainingClient):
    path = trained.save_weights_for_sampler("listed").result(WAIT).path
    models = listed(served)
    assert models[BASE]["max_model_len"] == models[path]["max_model_len"] == 2048
    assert (models[BASE]["parent"], models[path]["parent"]) == (None, CHAT)
    assert (models[BASE]["root"], models[path]["root"]) == (BASE, path)
    for name in (BASE, path):
        assert abs(models[name]["created"] - time.time()) < 3600


def test_latest_is_the_newest_checkpoint_of_a_run(served: Served, trained: TrainingClient):
    run = trained.model_id
    names = [f"{run}/latest", f"tinker://{run}/latest"]
    for save in ("first", "second"):
        path = trained.save_weights_for_sampler(save).result(WAIT).path
        for name in names:
            body = {"model": name, "prompt": [1, 2], "max_tokens": 1}
            with served.http() as http:
                assert http.post("/v1/completions", json=body).json()["model"] == path
    state = trained.save_state("third").result(WAIT).path
    with served.http() as http:
        assert http.get(f"/v1/models/{names[0]}").json()["root"] == state
    assert status_of(served, names[0], "tml-second") == 404
    assert status_of(served, "nobody:train:0/latest") == 404


def test_an_alias_stands_for_a_checkpoint_that_the_tenant_may_read(
    served: Served, trained: TrainingClient, monkeypatch: pytest.MonkeyPatch
):
    path = trained.save_weights_for_sampler("alias").result(WAIT).path
    assert status_of(served, "tutor") == 404
    assert "tutor" not in listed(served)
    monkeypatch.setitem(ALIASES, "tutor", path)
    assert status_of(served, "tutor") == 200
    assert listed(served)["tutor"] == {**listed(served)[path], "id": "tutor"}
    assert status_of(served, "tutor", "tml-second") == 404
    assert "tutor" not in listed(served, "tml-second")
    monkeypatch.setitem(ALIASES, "tutor", f"{trained.model_id}/latest")
    assert status_of(served, "tutor") == 200


def test_aliases_are_checked():
    path = "tinker://s:train:0/sampler_weights/a"
    check_aliases({"tutor": path, "me/tutor": "s:train:0/latest"}, {})
    for alias, target in (
        ("tutor", "sampler_weights/a"),
        ("tutor", ""),
        ("a b", path),
        ("x/latest", path),
        (BASE, path),
    ):
        with pytest.raises(UserError, match="--model-alias"):
            check_aliases({alias: target}, {BASE: "directory"})


def test_health_and_version_need_no_key(served: Served):
    assert httpx.get(f"{served.url}/health", timeout=60).json() == {"status": "ok"}
    assert set(httpx.get(f"{served.url}/version", timeout=60).json()) == {"version"}
