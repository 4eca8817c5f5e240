"""What `planish serve` checks and plans before it takes requests."""

import argparse
import json
import re
import socket
from dataclasses import fields, replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from planish.commands import serve as serve_command
from planish.engine import memory
from planish.engine.memory import RUNTIME_BYTES, gib
from planish.engine.settings import EngineSettings
from planish.errors import UnknownModelError, UserError
from planish.fleet.link import EngineMemory
from planish.server import serve
from planish.server.http.graceful_stop import STOP_SECONDS
from planish.server.http.origins import is_loopback
from planish.server.memory_plan import FleetMemoryPlan, MemoryPlan, device_memory, memory_plan
from planish.server.options import ServeOptions, options_of
from planish.server.settings import ServerSettings
from planish.server.tokenizer_cache import cache_tokenizer
from planish.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--host", "192.168.1.5"], "--api-key-file"),
        (["--port", "70000"], "--port"),
        (["--model", "name"], "NAME=PATH"),
        (["--model", "=path"], "NAME=PATH"),
        (["--model", "a=b", "--model", "a=c"], "twice"),
        (["--model", "a=/nothing/here"], "/nothing/here"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib"),
        (["--prefix-cache-gib", "-1"], "--prefix-cache-gib"),
        (["--dtype", "int4"], "int4"),
        (["--device", "tpu"], "tpu"),
        (["--max-batch", "0"], "max_batch"),
        (["--micro-batch-tokens", "0"], "micro_batch_tokens"),
        (["--poll-seconds", "60"], "--poll-seconds"),
        (["--set", "max_tokens_per_minute"], "NAME=VALUE"),
        (["--set", "no_such_limit=1"], "no_such_limit"),
        (["--set", "training_slots=0"], "training_slots"),
        (["--set", "training_slots=1.5"], "training_slots"),
        (["--set", "training_slots=1GiB"], "training_slots"),
        (
            ["--set", "max_storage_bytes=much"],
            "max_storage_bytes=much: give a number, or one with a unit such as 64MiB",
        ),
    ],
)
def test_an_invalid_option_is_named(options: list[str], named: str):
    with pytest.raises(UserError, match=named):
        serve_command.run(parsed(*options))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_a_local_host_needs_no_keys(host: str):
    assert ServeOptions(host=host).api_key_file is None


@pytest.mark.parametrize(
    "host", ["127.example.com", "localhost.example.com", "10.0.0.1", "", "::2"]
)
def test_a_name_that_resembles_localhost_is_not_local(host: str):
    assert not is_loopback(host)


def test_a_public_host_needs_keys(tmp_path: Path):
    assert ServeOptions(host="0.0.0.0", api_key_file=tmp_path / "keys").host == "0.0.0.0"


def test_a_port_in_use_is_named(model: Path, tmp_path: Path, kept_logging: None):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServeOptions(port=port, data_dir=tmp_path, models={"a/b": str(model)})
        with pytest.raises(UserError, match=f"--port {port}"):
            serve.serve(options)


def test_an_invalid_data_directory_is_named(model: Path, tmp_path: Path, kept_logging: None):
    (tmp_path / "file").touch()
    options = ServeOptions(port=0, data_dir=tmp_path / "file" / "data", models={"a/b": str(model)})
    with pytest.raises(UserError, match="--data-dir"):
        serve.serve(options)


def plan_of(
    models: dict[str, Path], engine: EngineSettings, settings: ServerSettings
) -> MemoryPlan:
    return memory_plan(models, device_memory(models, engine, settings), settings)


def test_the_memory_plan_adds_up(model: Path):
    engine = EngineSettings(
        device="cpu", dtype="float32", kv_cache_bytes=1 << 20, prefix_cache_bytes=1 << 21
    )
    settings = ServerSettings(adapter_memory_bytes=1 << 40)
    whole = plan_of({"a/b": model, "same": model}, engine, settings)
    plan = whole.models["a/b"]
    # but for the file's header
    assert abs(plan.weight_bytes - (model / "model.safetensors").stat().st_size) < 1 << 14
    assert plan.cache_bytes == (9 << 17) + (1 << 21)
    assert plan.training_bytes > 0
    narrow = plan_of({"a/b": model}, replace(engine, dtype="bfloat16"), settings).models["a/b"]
    assert narrow.weight_bytes == 1.5 * plan.weight_bytes  # packed twice, beside the file
    assert narrow.training_bytes < plan.training_bytes
    assert whole.models["same"] is plan
    assert whole.computing == plan.total_bytes + (1 << 40)
    text = str(whole)
    assert "a/b: weights" in text
    assert text.startswith("memory: up to 10")
    assert "adapters up to 1024.0 GiB" in text
    assert str(MemoryPlan("cuda:0", whole.models, 1 << 30, 0)).startswith(
        "memory: up to 1.0 GiB of cuda:0, and 1.3 GiB of"
    )


def test_the_plan_of_replicas_has_their_devices_and_memory(model: Path):
    own = plan_of({"a/b": model}, EngineSettings(device="cpu"), ServerSettings()).models
    budget = own["a/b"]
    smaller = {"a/b": replace(budget, cache_bytes=budget.cache_bytes // 2)}
    gpus = {number: EngineMemory("cuda:0", own) for number in range(3)}
    plan = FleetMemoryPlan({**gpus, 3: EngineMemory("cuda:0", smaller)}, 0, 1 << 30, 1 << 20)
    whole, half, last = (line for line in str(plan).splitlines() if line[0] != " ")
    assert whole.startswith(
        f"replicas 0, 1, 2, each: memory: up to {gib(budget.total_bytes + (1 << 30))} of c"
    )
    assert half.startswith("replicas 3, each: memory: up to ")
    assert "requests" not in str(plan)
    assert last == f"the server's process: up to {gib(plan.main_memory)} of main memory"
    assert plan.main_memory == RUNTIME_BYTES + (1 << 20)
    # On a CPU, the replicas of the server's machine share its main memory.
    cpus = {number: EngineMemory("cpu", own) for number in range(3)}
    here = FleetMemoryPlan(cpus, 2, 1 << 30, 1 << 20)
    each = RUNTIME_BYTES + budget.total_bytes + (1 << 30)
    assert here.main_memory == plan.main_memory + 2 * each


def test_replicas_on_other_machines_need_no_memory_of_the_server_s(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = ServeOptions(port=0, data_dir=tmp_path / "data", models={"a/b": str(model)})
    monkeypatch.setattr(memory, "usable_bytes", lambda device: 1)
    with pytest.raises(UserError, match="does not fit into main memory"):
        serve._check_options(options)
    monkeypatch.setattr(serve, "plan_fleet", lambda *_: None)
    checked = serve._check_options(replace(options, replicas=2))
    assert (checked.memory, checked.plan) == (None, None)
    assert checked.requests > 0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_memory_limit_below_the_plan_is_a_warning(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    missing: int,
):
    options = options_of(parsed("--data-dir", str(tmp_path / "data"), "--model", f"a/b={model}"))
    plan = serve._check_options(options).plan
    assert plan is not None
    assert plan.main_memory == plan.computing + plan.serving
    assert MemoryPlan("cuda:0", {}, 1 << 40, 0).main_memory < 1 << 40
    monkeypatch.setattr(serve, "main_memory_bytes", lambda: plan.main_memory - missing)
    with caplog.at_level("INFO", serve._log.name):
        serve._log_plan(plan)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == missing
    assert all("raise the limit (MemoryMax" in warning for warning in warnings)
    named = {option for warning in warnings for option in re.findall(r"--[a-z-]+", warning)}
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    named -= {"--memory"}  # an option of podman
    assert all(option in parser.format_help() for option in named)


def test_the_unit_and_the_container_give_options_that_exist():
    deploy = Path(__file__).parents[2] / "deploy"
    unit = (deploy / "planish.service").read_text()
    (start,) = re.findall(r"^ExecStart=/opt/planish/bin/planish serve (.+)$", unit, re.M)
    service = options_of(parsed(*start.split()))
    container_file = (deploy / "Containerfile").read_text()
    lists = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.+\])$", container_file, re.M)
    program, command, *arguments = [word for words in lists for word in json.loads(words)]
    assert (program, command) == ("planish", "serve")
    container = options_of(parsed(*arguments))
    assert is_loopback(service.host)
    assert not is_loopback(container.host)
    assert service.api_key_file
    assert container.api_key_file
    assert f"http://127.0.0.1:{container.port}/healthz" in container_file
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert int(stop) > STOP_SECONDS
    (restart,) = re.findall(r"^Restart=(.+)$", unit, re.M)
    assert restart == "on-failure"
    assert serve.ENGINE_FAULT_STATUS != 0


def test_a_model_without_weights_is_rejected_at_the_start(model: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(UnknownModelError, match=r"model\.safetensors"):
        plan_of({"a/b": tmp_path}, EngineSettings(), ServerSettings())


def test_the_docs_page_lists_every_setting_with_its_default():
    page = Path(__file__).parents[2] / "docs" / "operators" / "server.md"
    table = page.read_text().partition("| setting | default | |")[2].partition("\n\n")[0]
    told = {}
    for names, defaults in re.findall(r"^\| (`.+?`) \| (.+?) \|", table, re.MULTILINE):
        told |= zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=True)
    assert told.keys() == {field.name for field in fields(ServerSettings)}
    unlimited = {name for name, default in told.items() if default == "no limit"}
    assert unlimited == {"max_tokens_per_minute", "max_storage_bytes", "max_checkpoints_per_run"}
    given = [f"--set={name}={default}" for name, default in told.items() if name not in unlimited]
    assert options_of(parsed(*given)).settings == ServerSettings()


def test_the_prefix_cache_can_be_disabled():
    assert options_of(parsed("--prefix-cache-gib", "0")).engine.prefix_cache_bytes == 0


def test_limits_are_given_by_name():
    settings = options_of(
        parsed(
            "--set",
            "max_storage_bytes=1.5GiB",
            "--set",
            "adapter_idle_timeout=2.5",
            "--set",
            "training_slots=1_0",
        )
    ).settings
    assert settings == ServerSettings(
        max_storage_bytes=3 << 29, adapter_idle_timeout=2.5, training_slots=10
    )


def test_a_tokenizer_in_the_hubs_cache_is_found_without_a_network(
    model: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kept = cache_tokenizer("planish/some-model", model, tmp_path)
    assert kept is not None
    tokenizer = AutoTokenizer.from_pretrained(
        "planish/some-model", cache_dir=tmp_path, local_files_only=True
    )
    assert tokenizer.encode("hello") == AutoTokenizer.from_pretrained(model).encode("hello")
    assert cache_tokenizer("planish/some-model", model, tmp_path) is None


def test_the_hubs_cache_keeps_existing_tokenizers(model: Path, tmp_path: Path):
    reference = tmp_path / "models--org--model" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("abc")
    assert cache_tokenizer("org/model", model, tmp_path) is None
    assert reference.read_text() == "abc"
    assert cache_tokenizer("no-name-of-the-hub", model, tmp_path) is None


def test_the_guide_names_every_setting_and_option():
    guide = (Path(__file__).parents[2] / "docs" / "operators" / "server.md").read_text()
    assert [field.name for field in fields(ServerSettings) if f"`{field.name}`" not in guide] == []
    parser = argparse.ArgumentParser(add_help=False)
    serve_command.add_arguments(parser)
    options = [action.option_strings[0] for action in parser._actions]
    assert [option for option in options if option not in guide] == []


def test_connections_send_without_delay():
    """Otherwise the body of an answer waits 40 ms for the client's delayed acknowledgement."""
    with (
        serve._listener("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
