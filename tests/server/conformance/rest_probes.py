"""Probes of RestClient and AdminClient."""

from __future__ import annotations

import io
import json
import tarfile
import urllib.request
from collections.abc import Callable
from typing import Any

from conformance.bench import TIMEOUT, Bench, awaited, probe, value


@probe("RestClient.get_server_capabilities")
def _(bench: Bench) -> None:
    assert value(bench.rest.get_server_capabilities()).supported_models


@probe("RestClient.list_training_runs")
def _(bench: Bench) -> None:
    _ = bench.training
    page = value(bench.rest.list_training_runs(limit=1))
    assert len(page.training_runs) == 1
    assert page.cursor.total_count >= 1


@probe("RestClient.get_training_run")
def _(bench: Bench) -> None:
    run = value(bench.rest.get_training_run(bench.training.model_id))
    assert (run.base_model, run.is_lora, run.lora_rank) == (bench.base_model, True, 4)


@probe("RestClient.get_training_run_by_tinker_path")
def _(bench: Bench) -> None:
    run = value(bench.rest.get_training_run_by_tinker_path(bench.state))
    assert run.last_checkpoint is not None


@probe("RestClient.get_weights_info_by_tinker_path")
def _(bench: Bench) -> None:
    info = value(bench.rest.get_weights_info_by_tinker_path(bench.state))
    assert (info.base_model, info.lora_rank) == (bench.base_model, 4)


@probe("RestClient.list_checkpoints")
def _(bench: Bench) -> None:
    paths = [
        item.tinker_path
        for item in value(bench.rest.list_checkpoints(bench.run_of(bench.state))).checkpoints
    ]
    assert bench.state in paths


@probe("RestClient.list_user_checkpoints")
def _(bench: Bench) -> None:
    _ = bench.state, bench.weights
    page = value(bench.rest.list_user_checkpoints(limit=1, offset=1))
    assert len(page.checkpoints) == 1


def _deleted(bench: Bench, delete: Callable[[str, str, str], Any]) -> None:
    path = value(bench.training.save_state(bench.name())).path
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    delete(path, run, checkpoint)
    assert path not in [
        item.tinker_path for item in value(bench.rest.list_checkpoints(run)).checkpoints
    ]


@probe("RestClient.delete_checkpoint")
def _(bench: Bench) -> None:
    _deleted(
        bench, lambda path, run, checkpoint: value(bench.rest.delete_checkpoint(run, checkpoint))
    )


@probe("RestClient.delete_checkpoint_from_tinker_path")
def _(bench: Bench) -> None:
    _deleted(
        bench,
        lambda path, run, checkpoint: value(bench.rest.delete_checkpoint_from_tinker_path(path)),
    )


def _is_public(bench: Bench, path: str) -> bool:
    found = value(bench.rest.list_checkpoints(bench.run_of(path))).checkpoints
    return next(item.public for item in found if item.tinker_path == path)


@probe("RestClient.publish_checkpoint_from_tinker_path")
def _(bench: Bench) -> None:
    path = _saved(bench)
    value(bench.rest.publish_checkpoint_from_tinker_path(path))
    assert _is_public(bench, path)


@probe("RestClient.unpublish_checkpoint_from_tinker_path")
def _(bench: Bench) -> None:
    (path,) = _published(bench)
    value(bench.rest.unpublish_checkpoint_from_tinker_path(path))
    assert not _is_public(bench, path)


@probe("RestClient.set_checkpoint_ttl_from_tinker_path")
def _(bench: Bench) -> None:
    path = value(bench.training.save_state(bench.name())).path

    def expires() -> Any:
        found = value(bench.rest.list_checkpoints(bench.run_of(path))).checkpoints
        return next(item.expires_at for item in found if item.tinker_path == path)

    value(bench.rest.set_checkpoint_ttl_from_tinker_path(path, 7200))
    assert expires() is not None
    value(bench.rest.set_checkpoint_ttl_from_tinker_path(path, None))
    assert expires() is None


@probe("RestClient.get_external_weights_urls", "and the files")
def _(bench: Bench) -> None:
    urls = value(bench.rest.get_external_weights_urls(bench.external)).urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    with urllib.request.urlopen(urls["adapter_config.json"], timeout=TIMEOUT) as file:
        assert json.load(file)["r"] == 4


@probe("RestClient.get_checkpoint_archive_url_from_tinker_path", "and the archive")
def _(bench: Bench) -> None:
    url = value(bench.rest.get_checkpoint_archive_url_from_tinker_path(bench.weights)).url
    with (
        urllib.request.urlopen(url, timeout=TIMEOUT) as answer,
        tarfile.open(fileobj=io.BytesIO(answer.read())) as tar,
    ):
        assert {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"} <= set(
            tar.getnames()
        )


@probe("RestClient.copy_weights")
def _(bench: Bench) -> None:
    path = value(bench.rest.copy_weights(bench.weights, "archive"))
    assert bench.sample(
        sampler=value(bench.service.create_sampling_client(model_path=path))
    ).sequences


@probe("RestClient.export_session_trace", "and the file")
def _(bench: Bench) -> None:
    url = value(bench.rest.export_session_trace(_session(bench)))
    with urllib.request.urlopen(url, timeout=TIMEOUT) as file:
        assert bench.training.model_id.encode() in file.read()


@probe("RestClient.list_sessions")
def _(bench: Bench) -> None:
    _ = bench.training
    assert len(value(bench.rest.list_sessions(limit=1)).sessions) == 1


@probe("RestClient.get_session")
def _(bench: Bench) -> None:
    session_id = bench.training.model_id.split(":")[0]
    session = value(bench.rest.get_session(session_id))
    assert bench.training.model_id in session.training_run_ids
    assert getattr(session, "user_metadata", None) in (None, {"purpose": "conformance"})


@probe("RestClient.search_sessions")
def _(bench: Bench) -> None:
    request = bench.of("SessionSearchRequest")(user_metadata={"purpose": "conformance"}, limit=5)
    _ = bench.training
    assert value(bench.rest.search_sessions(request)).sessions


@probe("RestClient.get_sampler")
def _(bench: Bench) -> None:
    sampler_id = bench.sampler._sampling_session_id
    assert value(bench.rest.get_sampler(sampler_id)).base_model == bench.base_model


@probe("RestClient.list_training_runs", "of a project", refused=True)
def _(bench: Bench) -> None:
    value(bench.rest.list_training_runs(project_id="a-project"))


@probe("RestClient.whoami", refused=True)
def _(bench: Bench) -> None:
    value(bench.rest.whoami())


@probe("RestClient.get_telemetry")
def _(bench: Bench) -> None:
    bench.rest.get_telemetry()


@probe("AdminClient.get_telemetry")
def _(bench: Bench) -> None:
    bench.admin.get_telemetry()


def _refused(
    method: str, client: Callable[[Bench], Any], arguments: Callable[[Bench], tuple[Any, ...]]
) -> None:
    """Of a method and its async counterpart."""

    @probe(method, refused=True)
    def _(bench: Bench) -> None:
        value(getattr(client(bench), method.partition(".")[2])(*arguments(bench)))

    @probe(f"{method}_async", refused=True)
    def _(bench: Bench) -> None:
        awaited(getattr(client(bench), f"{method.partition('.')[2]}_async")(*arguments(bench)))


def _session(bench: Bench) -> str:
    return bench.training.model_id.split(":")[0]


_refused(
    "RestClient.assign_session_project",
    lambda bench: bench.rest,
    lambda bench: (_session(bench), "project"),
)
for _name, _client in (
    ("RestClient", lambda bench: bench.rest),
    ("AdminClient", lambda bench: bench.admin),
):
    _refused(f"{_name}.get_audit_log", _client, lambda bench: ())
    _refused(f"{_name}.get_billing_usage", _client, lambda bench: ("2025-01-01", "2025-02-01"))
    _refused(f"{_name}.get_current_checkpoint_storage_usage", _client, lambda bench: ())


def _rest_pair(method: str, arguments: Callable[[Bench], tuple[Any, ...]]) -> None:
    @probe(f"RestClient.{method}")
    def _(bench: Bench) -> None:
        given = arguments(bench)
        awaited(getattr(bench.rest, method)(*given))


def _saved(bench: Bench) -> str:
    return value(bench.training.save_state(bench.name())).path


def _published(bench: Bench) -> tuple[str]:
    path = _saved(bench)
    value(bench.rest.publish_checkpoint_from_tinker_path(path))
    return (path,)


_rest_pair("get_training_run_async", lambda bench: (bench.training.model_id,))
_rest_pair("get_training_run_by_tinker_path_async", lambda bench: (bench.state,))
_rest_pair("list_training_runs_async", lambda bench: ())
_rest_pair("list_checkpoints_async", lambda bench: (bench.training.model_id,))
_rest_pair("list_user_checkpoints_async", lambda bench: ())
_rest_pair("delete_checkpoint_async", lambda bench: tuple(_saved(bench)[9:].split("/", 1)))
_rest_pair("delete_checkpoint_from_tinker_path_async", lambda bench: (_saved(bench),))
_rest_pair("publish_checkpoint_from_tinker_path_async", lambda bench: (_saved(bench),))
_rest_pair("unpublish_checkpoint_from_tinker_path_async", _published)
_rest_pair("set_checkpoint_ttl_from_tinker_path_async", lambda bench: (_saved(bench), 7200))
_rest_pair("get_external_weights_urls_async", lambda bench: (bench.external,))
_rest_pair("get_checkpoint_archive_url_from_tinker_path_async", lambda bench: (bench.weights,))
_rest_pair("copy_weights_async", lambda bench: (bench.state, "archive"))
_rest_pair("list_sessions_async", lambda bench: ())
_rest_pair("export_session_trace_async", lambda bench: (_session(bench),))
_rest_pair("get_session_async", lambda bench: (_session(bench),))
_rest_pair("get_sampler_async", lambda bench: (bench.sampler._sampling_session_id,))
