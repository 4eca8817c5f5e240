"""Adapters that clients load into a running server."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_thread import serving_app

from planish import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from planish.client.checkpoint_records import ServerRecords
from planish.commands.cli import main
from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.export.importing import import_adapter
from planish.server.durable.store import Store
from planish.server.http import routes_sampling, routes_uploads
from planish.server.http.app import create_app
from planish.server.openai import routes
from planish.server.openai.adapter_requests import LOAD_PATH, UNLOAD_PATH
from planish.server.openai.lora_adapters import MAX_REQUESTS, LoraAdapters
from planish.server.openai.models import OpenAIModels
from planish.server.openai.openapi import openapi
from planish.server.server import Server
from planish.server.settings import HttpSettings, ServerSettings
from planish.server.uploads import MAX_TENANT_UPLOADS, Uploads

BASE = "tiny/base"
KEYS = {"tml-first": "first", "tml-second": "second", "tml-operator": "operator"}
WAIT = 60.0
put = partial(httpx.put, timeout=WAIT)


@dataclass(frozen=True)
class Served:
    url: str
    server: Server
    uploads: Uploads
    adapter: Path
    """An adapter that was trained on the server and downloaded."""
    trained_path: str

    def http(self, key: str | None = "tml-first", **headers: str) -> httpx.Client:
        sent = headers | ({} if key is None else {"x-api-key": key})
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=sent, timeout=WAIT)

    def logprobs(self, path: str, key: str = "tml-first") -> list[float | None]:
        with ServiceClient(base_url=self.url, api_key=key) as service:
            sampler = service.create_sampling_client(path)
            return sampler.compute_logprobs(ModelInput.from_ints([5, 6, 7, 8])).result(WAIT)


@contextmanager
def serving(data: Path, model_dir: Path, adapters: Path) -> Iterator[tuple[str, Server, Uploads]]:
    """Run a server for the length of a block. `adapters` is the directory of
    adapters that the operator can load.
    """
    engine = Engine({BASE: str(model_dir)}, data, EngineSettings(dtype="float32"))
    server = Server(engine, data, [BASE])
    models = {BASE: model_dir}
    uploads = Uploads(server, models, import_adapter)
    app = create_app(
        server,
        HttpSettings(tokenizer_directories=models, tenants_by_key=KEYS),
        [
            *routes_sampling.PLANISH_ROUTES,
            *routes_uploads.routes(uploads),
            *routes.routes(
                OpenAIModels(server, models, {"fixed": "run/latest"}), has_adapter_routes=True
            ),
            *LoraAdapters(server, uploads, adapters, {"fixed": "run/latest"}).routes(),
        ],
    )
    with serving_app(app, lifespan="on") as url:
        yield url, server, uploads
        app.state.http.ending.set()


@pytest.fixture(scope="module")
def served(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    adapter = tmp_path_factory.mktemp("adapters") / "adapter"
    adapter.mkdir()
    with serving(tmp_path_factory.mktemp("data"), model_dir, adapter.parent) as served:
        url, server, uploads = served
        with ServiceClient(base_url=url, api_key="tml-first") as service:
            client = service.create_lora_training_client(BASE, rank=4, seed=1)
            datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [97, 97, 97]})
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=0.1)).result(WAIT)
            path = client.save_weights_for_sampler("trained").result(WAIT).path
        ServerRecords(url, "tml-first").download(path, adapter)
        yield Served(url, server, uploads, adapter, path)


def import_into(served: Served, directory: Path, *options: str) -> int:
    return main(
        [
            *("checkpoints", "import", str(directory), "--base-url", served.url),
            *("--api-key", "tml-first", "--json", *options),
        ]
    )


def start(served: Served, **options: Any) -> dict[str, Any]:
    with served.http() as http:
        answer = http.post("/planish/import_start", json={"base_model": BASE, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def send(served: Served, upload: dict[str, Any], directory: Path) -> None:
    for name, url in upload["urls"].items():
        file = directory / name
        assert put(url, content=file.read_bytes()).status_code == 200


def test_an_adapter_is_imported_into_a_running_server(served: Served, capsys):
    assert import_into(served, served.adapter, "--name", "mine") == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["base_model"], row["rank"]) == (BASE, 4)
    assert row["path"].endswith("/weights/mine")
    assert served.logprobs(row["path"]) == pytest.approx(served.logprobs(served.trained_path))
    [listed] = [
        item
        for item in ServerRecords(served.url, "tml-first").checkpoints(None, None)
        if item["tinker_path"] == row["path"]
    ]
    assert listed["size_bytes"] > 1000, "it counts in the quota"
    assert listed["user_metadata"] == {"imported": served.adapter.name}
    with ServiceClient(base_url=served.url, api_key="tml-first") as service:
        client = service.create_training_client_from_state_with_optimizer(row["path"])
        datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [97, 97, 97]})
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=0.1)).result(WAIT)
        sampler = client.save_weights_and_get_sampling_client()
        sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1)).result(WAIT)
    with served.http("tml-second") as http:
        assert http.post("/weights_info", json={"tinker_path": row["path"]}).status_code == 404


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "mine"], "--run"),
        (["--overwrite"], "--overwrite"),
        (["--base-model", "other/model"], "not served here"),
        (["--name", "_planish.x"], "reserved"),
        (["--quantize", "int8"], "quantize"),
    ],
)
def test_an_import_that_the_server_cannot_do_is_rejected(served: Served, capsys, options, message):
    assert import_into(served, served.adapter, *options) != 0
    assert message in capsys.readouterr().err


def test_a_damaged_adapter_is_rejected_and_leaves_nothing(served: Served, tmp_path: Path, capsys):
    directory = shutil.copytree(served.adapter, tmp_path / "adapter")
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    before = ServerRecords(served.url, "tml-first").checkpoints(None, None)
    assert import_into(served, directory) != 0
    error = capsys.readouterr().err
    assert "adapter_model.safetensors" in error
    assert str(served.server.store.directory) not in error
    assert ServerRecords(served.url, "tml-first").checkpoints(None, None) == before


def test_the_sdks_calls_make_external_weights(served: Served):
    """The wire of SDK 0.39, from its documentation."""
    config = {"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True}
    body = {"base_model": BASE, "lora_config": config, "destination_project_id": "default"}
    with served.http(**{"x-stainless-package-version": "0.39.0"}) as http:
        upload = http.post("/external_weights_upload_start", json=body).json()
        assert set(upload) == {"upload_id", "urls", "expires"}
        send(served, upload, served.adapter)
        finish = {"upload_id": upload["upload_id"]}
        paths = [http.post("/external_weights_upload_finish", json=finish).json() for _ in range(2)]
        assert paths[0] == paths[1]
        path = paths[0]["tinker_path"]
        assert "/external_weights/" in path
        [listed] = [
            item
            for item in http.get("/checkpoints?limit=1000").json()["checkpoints"]
            if item["tinker_path"] == path
        ]
        assert listed["checkpoint_type"] == "external"
        wrong = {**body, "lora_config": {**config, "rank": 8}}
        upload = http.post("/external_weights_upload_start", json=wrong).json()
        send(served, upload, served.adapter)
        answer = http.post(
            "/external_weights_upload_finish", json={"upload_id": upload["upload_id"]}
        )
        assert (answer.status_code, "rank=8" in answer.json()["detail"]) == (400, True)
    with served.http(**{"x-stainless-package-version": "0.40.0"}) as http:
        upload = http.post("/external_weights_upload_start", json=body).json()
        assert all(set(entry) == {"url", "headers"} for entry in upload["urls"].values())


def test_uploads_belong_to_their_tenant_and_are_checked(served: Served):
    upload = start(served)
    finish = {"upload_id": upload["upload_id"]}
    with served.http("tml-second") as http:
        assert http.post("/planish/import_finish", json=finish).status_code == 404
    with served.http() as http:
        answer = http.post("/planish/import_finish", json=finish)
        assert (answer.status_code, "was not uploaded" in answer.json()["detail"]) == (400, True)
        url = upload["urls"]["adapter_config.json"]
        secret = url.split("/")[-2]
        assert put(url.replace(secret, "x" * len(secret)), content=b"{}").status_code == 404
        other = url.replace("adapter_config.json", "other.json")
        assert put(other, content=b"{}").status_code == 404
        assert put(url, content=b"x" * (5 << 20)).status_code == 400
        assert put(url, content=iter([b"{}"])).status_code == 400, "without Content-Length"
        for files in (["adapter_config.json"], ["../x", "adapter_config.json"], [1]):
            body = {"base_model": BASE, "files": files}
            assert http.post("/planish/import_start", json=body).status_code == 400


def test_the_number_of_uploads_and_the_storage_are_limited(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    body = {"base_model": BASE}
    with served.http("tml-second") as http:
        for _ in range(MAX_TENANT_UPLOADS):
            assert http.post("/planish/import_start", json=body).status_code == 200
        assert http.post("/planish/import_start", json=body).status_code == 429
    limited = ServerSettings(max_storage_bytes=1)
    monkeypatch.setattr(served.server.checkpoints, "_settings", limited)
    with served.http() as http:
        answer = http.post("/planish/import_start", json=body)
        assert (answer.status_code, "max_storage_bytes" in answer.json()["detail"]) == (400, True)


def test_an_import_into_the_directory_of_a_server_is_rejected(
    served: Served, tmp_path: Path, capsys
):
    Store(tmp_path).close()
    options = ["checkpoints", "import", str(served.adapter), "--data-dir", str(tmp_path)]
    assert main(options) != 0
    assert "data directory of a server" in capsys.readouterr().err


def call(served: Served, path: str, key: str = "tml-operator", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{served.url}/v1/{path}", json=body, headers=headers, timeout=WAIT)


def complete(served: Served, model: str, key: str = "tml-second") -> httpx.Response:
    options = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1, "logprobs": 0}
    return call(served, "completions", key, model=model, **options)


def test_the_operator_loads_and_unloads_an_adapter(served: Served):
    loaded = call(served, "load_lora_adapter", lora_name="tutor", lora_path="adapter")
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'tutor' added successfully.",
    )
    answer, expected = complete(served, "tutor"), complete(served, served.trained_path, "tml-first")
    assert (answer.status_code, expected.status_code) == (200, 200), (answer.text, expected.text)
    assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        expected.json()["choices"][0]["logprobs"]["token_logprobs"]
    )
    assert models_of(served.url) == {"tutor": BASE}
    again = call(served, "load_lora_adapter", lora_name="tutor", lora_path="adapter")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    options = {"lora_name": "tutor", "lora_path": "adapter", "load_inplace": True}
    assert call(served, "load_lora_adapter", **options).status_code == 200
    assert complete(served, "tutor").status_code == 200
    unloaded = call(served, "unload_lora_adapter", lora_name="tutor")
    assert unloaded.text == "Success: LoRA adapter 'tutor' removed successfully."
    assert complete(served, "tutor").status_code == 404
    assert call(served, "unload_lora_adapter", lora_name="tutor").status_code == 404
    assert ServerRecords(served.url, "tml-operator").checkpoints(None, None) == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"lora_name": "a", "lora_path": "nothing"}, 404),
        ({"lora_name": "a", "lora_path": "."}, 404),
        ({"lora_name": "a", "lora_path": "../../etc"}, 404),
        ({"lora_name": "a", "lora_path": "/etc"}, 404),
        ({"lora_name": "a", "lora_path": "x" * 4096}, 404),
        ({"lora_name": "a", "lora_path": "a\0b"}, 404),
        ({"lora_name": BASE, "lora_path": "adapter"}, 400),
        ({"lora_name": "fixed", "lora_path": "adapter"}, 400),
        ({"lora_name": "fixed", "lora_path": "adapter", "load_inplace": True}, 400),
        ({"lora_name": "a b", "lora_path": "adapter"}, 400),
        ({"lora_name": "a", "lora_path": "adapter", "base_model_name": "x"}, 400),
        ({"lora_name": "a", "lora_path": "adapter", "other": 1}, 400),
        ({"lora_name": "a"}, 400),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_rejected(served: Served, body: Any, status: int):
    answer = call(served, "load_lora_adapter", **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def models_of(url: str, key: str = "tml-second") -> dict[str, str]:
    """Return the names of the models that are not base models, with their base models."""
    headers = {"authorization": f"Bearer {key}"}
    listed = httpx.get(f"{url}/v1/models", headers=headers, timeout=WAIT).json()["data"]
    return {entry["id"]: entry["parent"] for entry in listed if entry["parent"]}


@pytest.mark.slow
def test_loaded_adapters_outlast_a_restart(served: Served, model_dir: Path, tmp_path: Path):
    """They keep their names, and the operator can replace and unload them."""

    def post(url: str, path: str, key: str = "tml-operator", **body: Any) -> httpx.Response:
        return call(replace(served, url=url), path, key, **body)

    options = {"lora_path": "adapter", "load_inplace": True}
    with serving(tmp_path, model_dir, served.adapter.parent) as (url, *_):
        for name in ("tutor", "other"):
            assert post(url, "load_lora_adapter", lora_name=name, **options).status_code == 200
        before = complete(replace(served, url=url), "tutor").json()["choices"]
    with serving(tmp_path, model_dir, served.adapter.parent) as (url, *_):
        assert models_of(url) == {"tutor": BASE, "other": BASE}
        assert complete(replace(served, url=url), "tutor").json()["choices"] == before
        taken = post(url, "load_lora_adapter", lora_name="tutor", lora_path="adapter")
        assert taken.status_code == 400
        assert post(url, "load_lora_adapter", lora_name="tutor", **options).status_code == 200
        assert post(url, "unload_lora_adapter", lora_name="other").status_code == 200
        [row] = ServerRecords(url, "tml-operator").checkpoints(None, None)
        assert row["tinker_path"].endswith("/sampler_weights/tutor")
        assert row["public"]
    with serving(tmp_path, model_dir, served.adapter.parent) as (url, *_):
        assert models_of(url) == {"tutor": BASE}
        # A deletion by the path removes the name too.
        path = httpx.URL(url).copy_with(
            path="/api/v1/training_runs/{0}/checkpoints/{2}".format(
                *row["tinker_path"].removeprefix("tinker://").partition("/")
            )
        )
        headers = {"x-api-key": "tml-operator"}
        assert httpx.delete(path, headers=headers, timeout=WAIT).status_code < 300
        assert models_of(url) == {}
        assert post(url, "unload_lora_adapter", lora_name="tutor").status_code == 404
        assert post(url, "load_lora_adapter", lora_name="tutor", **options).status_code == 200


@pytest.mark.slow
def test_a_replaced_adapter_is_used_at_once(served: Served):
    """Other servers kept cached prefixes of the replaced weights under the same name. A request
    that runs keeps the weights with which it began.
    """
    other = served.adapter.parent / "other"
    with ServiceClient(base_url=served.url, api_key="tml-first") as service:
        client = service.create_lora_training_client(BASE, rank=4, seed=2)
        datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [98, 98, 98]})
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=0.1)).result(WAIT)
        path = client.save_weights_for_sampler("other").result(WAIT).path
    other.mkdir()
    ServerRecords(served.url, "tml-first").download(path, other)
    options = {"prompt": [5] * 100, "max_tokens": 60, "seed": 1, "logprobs": 0}

    def answer(model: str, key: str) -> Any:
        return call(served, "completions", key, model=model, **options).json()["choices"]

    first, second = answer(served.trained_path, "tml-first"), answer(path, "tml-first")
    assert first != second
    loading = {"lora_name": "tutor", "load_inplace": True}
    assert call(served, "load_lora_adapter", lora_path="adapter", **loading).status_code == 200
    assert answer("tutor", "tml-second") == first
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(answer, "tutor", "tml-second") for _ in range(4)]
        assert call(served, "load_lora_adapter", lora_path="other", **loading).status_code == 200
        assert answer("tutor", "tml-second") == second
        assert all(one.result() in (first, second) for one in running)
    assert call(served, "unload_lora_adapter", lora_name="tutor").status_code == 200


def test_unanswered_requests_to_load_adapters_are_limited(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    """The first import lasts until one of the requests has been rejected."""
    may_import = threading.Event()

    def waiting_import(*arguments: Any, **options: Any) -> Any:
        assert may_import.wait(WAIT)
        return import_adapter(*arguments, **options)

    monkeypatch.setattr(served.uploads, "_import_adapter", waiting_import)
    with ThreadPoolExecutor(MAX_REQUESTS + 1) as pool:
        loads = [
            pool.submit(call, served, "load_lora_adapter", lora_name=f"a{n}", lora_path="adapter")
            for n in range(MAX_REQUESTS + 1)
        ]
        done, _ = wait(loads, WAIT, FIRST_COMPLETED)
        may_import.set()
        [rejected] = [load.result() for load in done]
    assert rejected.status_code == 429
    assert rejected.headers["retry-after"]
    assert [load.result().status_code for load in loads].count(200) == MAX_REQUESTS
    for name in models_of(served.url):
        assert call(served, "unload_lora_adapter", lora_name=name).status_code == 200


@pytest.mark.parametrize("has_routes", [False, True])
def test_the_description_lists_the_adapter_endpoints_of_a_server_that_has_them(has_routes: bool):
    description = openapi(has_routes)
    for path in (LOAD_PATH, UNLOAD_PATH):
        assert (path in description["paths"]) == has_routes


def test_the_server_describes_its_adapter_endpoints(served: Served):
    description = httpx.get(f"{served.url}/openapi.json", timeout=WAIT).json()
    assert set(description["components"]["schemas"]["LoadAdapterRequest"]["properties"]) >= {
        "lora_name",
        "lora_path",
        "load_inplace",
        "base_model_name",
    }


def test_only_the_operator_loads_adapters(served: Served):
    for path in ("load_lora_adapter", "unload_lora_adapter"):
        answer = call(served, path, "tml-first", lora_name="tutor", lora_path="adapter")
        assert answer.status_code == 401
        assert "operator" in answer.json()["error"]["message"]
