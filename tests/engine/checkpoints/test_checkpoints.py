"""Checkpoints: PEFT loads them, and damage, crashes and full disks leave no partial one."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import safetensors.torch
import torch
from backends import CPU, load_on, torch_backend
from peft import PeftModel
from transformers import AutoModelForCausalLM

import planish.engine.checkpoints.files as checkpoint_files
import planish.engine.checkpoints.store as checkpoints
from planish.engine.checkpoints import replacement
from planish.engine.checkpoints.files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MANIFEST_FILE,
    OPTIMIZER_FILE,
)
from planish.engine.checkpoints.store import (
    AdapterSnapshot,
    CheckpointStore,
    SaveRequest,
    data_directory,
)
from planish.engine.training.adapters import Adapter
from planish.errors import CheckpointError, DamagedFileError, StorageError, UserError
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.head import head_logits
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.testing import tiny_model
from planish.types import AdamParams, CheckpointPath, LoraConfig

RANK_4 = LoraConfig(rank=4)
TRAINING = CheckpointPath("run:train:0", "training", "a")
SAMPLER = CheckpointPath("run:train:0", "sampler", "a")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "data")


def trained(model_dir, lora: LoraConfig = RANK_4, steps: int = 2) -> Adapter:
    layout = LoraLayout(ModelConfig.from_directory(model_dir), lora)
    adapter = Adapter(layout, torch_backend(), layout.init(1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        adapter.add_grad(torch.randn(layout.size, generator=generator))
        adapter.optim_step(AdamParams(learning_rate=1e-2))
    return adapter


def saved(adapter: Adapter) -> AdapterSnapshot:
    return AdapterSnapshot(adapter.state(), adapter.layout, "base", "architecture", "weights")


def files_under(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.rglob("*") if p.is_file() and p.name != ".lock")


def test_a_saved_state_is_read_back_bitwise_identically(store, model_dir):
    adapter = trained(model_dir)
    store.save(SaveRequest(TRAINING), saved(adapter))
    state, _ = store.read(TRAINING, adapter.layout, with_optimizer=True)
    assert state.keys() == adapter.state().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in adapter.state().items())
    assert store.manifest(TRAINING).step == 2
    assert store.manifest(TRAINING).lora == adapter.layout.lora_config


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=4),
        LoraConfig(rank=3, train_unembed=False),
        LoraConfig(rank=2, train_attn=False, train_mlp=False),
    ],
)
def test_peft_loads_a_checkpoint_and_computes_the_same_logits(store, model_dir, lora):
    adapter = trained(model_dir, lora)
    store.save(SaveRequest(SAMPLER), saved(adapter))
    directory = store.directory / "run:train:0" / "sampler_weights" / "a"
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = torch.arange(40)
    plain = base(tokens[None]).logits[0]
    theirs = PeftModel.from_pretrained(base, directory)(tokens[None]).logits[0]
    decoder = load_on(model_dir, torch.float32, CPU)
    weights = LoraWeights(adapter.layout, adapter.master, decoder.backend)

    def attend(layer, q, k, v, sinks=None):
        mask = torch.ones(40, 40, dtype=torch.bool).tril()
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    with torch.no_grad():
        hidden = decoder.forward(tokens, tokens, attend, weights)
        ours = head_logits(
            decoder.backend,
            hidden,
            decoder.head,
            [(0, len(hidden), weights.head)] if weights.head else [],
        )
    assert (ours - plain).abs().max() > 1e-2
    assert (ours - theirs).abs().max() < 1e-4


def test_a_sampler_checkpoint_has_no_optimizer(store, model_dir):
    adapter = trained(model_dir)
    store.save(SaveRequest(SAMPLER), saved(adapter))
    assert files_under(store.directory) == sorted(
        [ADAPTER_FILE, ADAPTER_CONFIG_FILE, MANIFEST_FILE]
    )
    with pytest.raises(CheckpointError, match="save_state"):
        store.read(SAMPLER, adapter.layout, with_optimizer=True)


@pytest.mark.parametrize(
    "name", ["a/b", "../a", "", ".hidden", "-x", "a b", "ä", "x" * 201, "a\n", 7, None]
)
def test_invalid_names_are_rejected_before_anything_is_written(store, model_dir, name):
    with pytest.raises(UserError, match="name=.*slash"):
        store.save(SaveRequest(CheckpointPath("run", "training", name)), saved(trained(model_dir)))
    assert not store.directory.exists()


def test_a_checkpoint_path_cannot_leave_the_data_directory(store, tmp_path):
    (tmp_path / "weights" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="slash"):
        store.manifest(CheckpointPath.parse("tinker://../weights/a"))
    with pytest.raises(UserError, match="slash"):
        store.delete(CheckpointPath.parse("tinker://../weights/a"))


@pytest.mark.parametrize("ttl", [0, -1, 1.5, True, "60", 11 * 365 * 86400])
def test_ttl_must_be_a_whole_number_of_seconds(store, model_dir, ttl):
    with pytest.raises(UserError, match="ttl_seconds"):
        store.save(SaveRequest(TRAINING, ttl_seconds=ttl), saved(trained(model_dir)))


@pytest.mark.parametrize(
    "swapped_at", ["the adapter's check", "the moments' check", "the adapter", "the moments"]
)
def test_reading_restarts_if_the_checkpoint_is_replaced_meanwhile(
    store, model_dir, monkeypatch, swapped_at
):
    first, second = trained(model_dir, steps=1), trained(model_dir, steps=3)
    store.save(SaveRequest(TRAINING), saved(first))
    module, what, file = {
        "the adapter's check": (checkpoint_files, "check_file", ADAPTER_FILE),
        "the moments' check": (checkpoint_files, "check_file", OPTIMIZER_FILE),
        "the adapter": (safetensors.torch, "load_file", ADAPTER_FILE),
        "the moments": (safetensors.torch, "load_file", OPTIMIZER_FILE),
    }[swapped_at]
    read, swaps = getattr(module, what), []

    def read_and_swap(path: Path, *rest: object) -> object:
        found = read(path, *rest)
        if path.name == file and not swaps:
            swaps.append(store.save(SaveRequest(TRAINING, overwrite=True), saved(second)))
        return found

    monkeypatch.setattr(module, what, read_and_swap)
    state, version = store.read(TRAINING, first.layout, with_optimizer=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in second.state().items())
    assert version == store.manifest(TRAINING).files[ADAPTER_FILE].sha256


def test_a_reader_waits_while_a_checkpoint_is_being_replaced(store, model_dir, monkeypatch):
    first, second = trained(model_dir, steps=1), trained(model_dir, steps=3)
    store.save(SaveRequest(TRAINING), saved(first))
    read, is_away, go_on = checkpoints.read_manifest, threading.Event(), threading.Event()
    rename = os.rename

    def slow_rename(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name.endswith(".previous"):
            is_away.set()
            go_on.wait(60)

    def read_late(directory: Path):
        """Read the manifest after the writer has moved the old checkpoint away."""
        if not writer.is_alive():
            writer.start()
            assert is_away.wait(60)
            threading.Timer(0.05, go_on.set).start()
            monkeypatch.setattr(checkpoints, "read_manifest", read)
        return read(directory)

    writer = threading.Thread(
        target=store.save, args=(SaveRequest(TRAINING, overwrite=True), saved(second))
    )
    monkeypatch.setattr(checkpoints.os, "rename", slow_rename)
    monkeypatch.setattr(checkpoints, "read_manifest", read_late)
    assert store.manifest(TRAINING).step == 3
    writer.join()


def test_a_taken_name_is_rejected_and_the_old_checkpoint_kept(store, model_dir):
    first, second = trained(model_dir, steps=1), trained(model_dir, steps=3)
    for path in (TRAINING, SAMPLER):
        store.save(SaveRequest(path), saved(first))
        with pytest.raises(CheckpointError, match="overwrite"):
            store.save(SaveRequest(path), saved(second))
        assert store.manifest(path).step == 1
        store.save(SaveRequest(path, overwrite=True), saved(second))
        assert store.manifest(path).step == 3
        assert torch.equal(store.read(path, first.layout, False)[0]["master"], second.master)
    assert len(files_under(store.directory)) == 7


def test_equal_sampler_weights_may_be_saved_again(store, model_dir):
    adapter = trained(model_dir)
    store.save(SaveRequest(SAMPLER, ttl_seconds=60), saved(adapter))
    store.save(SaveRequest(SAMPLER), saved(adapter))
    assert store.manifest(SAMPLER).expires_at is None


def test_a_missing_checkpoint_error_names_data_dir(store):
    with pytest.raises(CheckpointError, match="data_dir"):
        store.manifest(TRAINING)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.delete(TRAINING)


@pytest.mark.parametrize("name", [ADAPTER_FILE, ADAPTER_CONFIG_FILE, OPTIMIZER_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_is_detected_and_named(store, model_dir, name, damage):
    adapter = trained(model_dir)
    store.save(SaveRequest(TRAINING), saved(adapter))
    file = store.directory / "run:train:0" / "weights" / "a" / name
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2 if name != MANIFEST_FILE else 0] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(DamagedFileError, match="a/" + name):
        store.read(TRAINING, adapter.layout, with_optimizer=True)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 2}', '{"format": 1}', "null"])
def test_an_invalid_manifest_is_detected(store, model_dir, content):
    store.save(SaveRequest(TRAINING), saved(trained(model_dir)))
    (store.directory / "run:train:0" / "weights" / "a" / MANIFEST_FILE).write_text(content)
    with pytest.raises(DamagedFileError):
        store.manifest(TRAINING)
    assert store.records() == []
    store.delete(TRAINING)


def test_reading_with_another_adapter_layout_is_rejected(store, model_dir):
    store.save(SaveRequest(TRAINING), saved(trained(model_dir, LoraConfig(rank=4))))
    other = LoraLayout(ModelConfig.from_directory(model_dir), LoraConfig(rank=8))
    with pytest.raises(CheckpointError, match="matrices differ from those of this model"):
        store.read(TRAINING, other, False)


def test_an_expired_checkpoint_is_rejected_and_removed(store, model_dir, monkeypatch):
    monkeypatch.setattr(replacement, "_EXPIRED_SECONDS", 0.0)
    adapter = trained(model_dir)
    store.save(SaveRequest(TRAINING, ttl_seconds=3600), saved(adapter))
    assert store.records()[0].expires_at is not None
    file = store.directory / "run:train:0" / "weights" / "a" / MANIFEST_FILE
    fields = json.loads(file.read_text())
    fields["expires_at"] = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    file.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="expired at .* ttl_seconds"):
        store.read(TRAINING, adapter.layout, False)
    assert files_under(store.directory) == []
    store.save(SaveRequest(TRAINING), saved(adapter))


def test_records_are_newest_first_and_can_be_limited_to_a_run(store, model_dir):
    adapter = trained(model_dir)
    for run in ("one", "two"):
        for name in ("x", "y"):
            store.save(
                SaveRequest(CheckpointPath(run, "training", name), user_metadata={"k": name}),
                saved(adapter),
            )
    assert [str(r.tinker_path)[9:] for r in store.records()] == [
        "two/weights/y",
        "two/weights/x",
        "one/weights/y",
        "one/weights/x",
    ]
    record = store.records("one")[0]
    assert (record.checkpoint_id, record.user_metadata) == ("weights/y", {"k": "y"})
    assert record.size_bytes is not None
    assert record.size_bytes > adapter.layout.size * 12


@contextmanager
def file_size_limit(size: int):
    """Let writes beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("room", ["nothing", "part of the adapter", "the adapter"])
def test_a_failed_save_keeps_the_old_checkpoint_and_no_temporary_files(store, model_dir, room):
    adapter = trained(model_dir, steps=1)
    store.save(SaveRequest(TRAINING), saved(adapter))
    sizes = {name: file.size for name, file in store.manifest(TRAINING).files.items()}
    size = {
        "nothing": 0,
        "part of the adapter": sizes[ADAPTER_FILE] // 2,
        "the adapter": sizes[ADAPTER_FILE],
    }[room]
    before = files_under(store.directory)
    newer = trained(model_dir, steps=2)
    with file_size_limit(size), pytest.raises(StorageError, match="free space"):
        store.save(SaveRequest(TRAINING, overwrite=True), saved(newer))
    assert files_under(store.directory) == before
    assert torch.equal(store.read(TRAINING, adapter.layout, True)[0]["master"], adapter.master)
    store.save(SaveRequest(TRAINING, overwrite=True), saved(newer))
    assert store.manifest(TRAINING).step == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_save_on_a_full_file_system_raises_storage_error(tmp_path, model_dir):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("no right to mount here")
    try:
        store = CheckpointStore(disk)
        adapter = trained(model_dir, LoraConfig(rank=16))
        with pytest.raises(StorageError, match="No space left|free space"):
            store.save(SaveRequest(TRAINING), saved(adapter))
        assert files_under(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_files_are_on_disk_before_the_checkpoint_gets_its_name(store, model_dir, monkeypatch):
    adapter, done = trained(model_dir), []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle: int) -> None:
        fsync(handle)
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}"))))

    def noted_rename(source: Path, target: Path) -> None:
        rename(source, target)
        done.append(("rename", Path(source)))

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    store.save(SaveRequest(TRAINING), saved(adapter))
    target = store.directory / "run:train:0" / "weights" / "a"
    (renamed,) = (number for number, (kind, _) in enumerate(done) if kind == "rename")
    aside = done[renamed][1]
    synced = {path for kind, path in done[:renamed] if kind == "fsync"}
    assert {aside, *(aside / name for name in files_under(target))} <= synced
    assert ("fsync", target.parent) in done[renamed:]


def test_a_crash_between_the_two_renames_loses_no_checkpoint(store, model_dir, monkeypatch):
    old, new = trained(model_dir, steps=1), trained(model_dir, steps=2)
    store.save(SaveRequest(TRAINING), saved(old))
    renames = []
    rename = os.rename

    def killed_at_the_second(source, target):
        renames.append(target)
        if len(renames) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "rename", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            store.save(SaveRequest(TRAINING, overwrite=True), saved(new))
    assert not (store.directory / "run:train:0" / "weights" / "a").exists()
    assert store.manifest(TRAINING).step == 1
    assert torch.equal(store.read(TRAINING, old.layout, True)[0]["master"], old.master)
    store.save(SaveRequest(TRAINING, overwrite=True), saved(new))
    assert store.manifest(TRAINING).step == 2
    assert len(files_under(store.directory)) == 4


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_save_whose_last_sync_fails_leaves_its_name_as_it_was(
    store, model_dir, monkeypatch, is_replaced
):
    old, new = trained(model_dir, steps=1), trained(model_dir, steps=2)
    if is_replaced:
        store.save(SaveRequest(TRAINING), saved(old))
    target = store.directory / "run:train:0" / "weights"

    def failing(path):
        if path == target:
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(replacement, "sync", failing)
        with pytest.raises(StorageError):
            store.save(SaveRequest(TRAINING, overwrite=is_replaced), saved(new))
    assert [path.name for path in target.iterdir()] == (["a"] if is_replaced else [])
    if is_replaced:
        assert store.manifest(TRAINING).step == 1
    store.save(SaveRequest(TRAINING, overwrite=is_replaced), saved(new))
    assert store.manifest(TRAINING).step == 2


def test_a_checkpoint_that_the_disk_fails_to_find_is_not_reported_as_missing(
    store, model_dir, monkeypatch
):
    store.save(SaveRequest(TRAINING), saved(trained(model_dir)))
    found, target = Path.stat, store.directory / "run:train:0" / "weights" / "a"

    def failing(path, **options):
        if path == target:
            raise OSError(errno.EIO, "Input/output error")
        return found(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", failing)
        with pytest.raises(OSError, match="Input/output error"):
            store.exists(TRAINING)
        with pytest.raises(StorageError):
            store.delete(TRAINING)
    assert store.exists(TRAINING)


WRITER = """
import sys, torch
from planish.engine.training.adapters import Adapter
from planish.engine.checkpoints.store import CheckpointStore, SaveRequest, AdapterSnapshot
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import reference_backend
from planish.model.layers.lora import LoraLayout
from planish.types import CheckpointPath, LoraConfig
from pathlib import Path
layout = LoraLayout(ModelConfig.from_directory(sys.argv[1]), LoraConfig(rank=64))
adapter = Adapter(layout, reference_backend(layout.model_config, torch.float32, torch.device("cpu")))
store = CheckpointStore(Path(sys.argv[2]))
print("ready", flush=True)
while True:
    adapter.step += 1
    adapter.master = torch.full_like(adapter.master, adapter.step)
    saved = AdapterSnapshot(adapter.state(), layout, "base", "architecture", "weights")
    store.save(SaveRequest(CheckpointPath("run", "training", "a"), overwrite=True), saved)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_complete_checkpoint(store, model_dir):
    layout = LoraLayout(ModelConfig.from_directory(model_dir), LoraConfig(rank=64))
    path = CheckpointPath("run", "training", "a")
    steps = []
    for delay in (0.05, 0.11, 0.17):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(model_dir), str(store.directory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not store.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        state, _ = store.read(path, layout, with_optimizer=True)
        steps.append(store.manifest(path).step)
        assert bool((state["master"] == int(state["step"])).all())
    assert min(steps) >= 1
    store.save(SaveRequest(path, overwrite=True), saved(trained(model_dir)))
    assert len(files_under(store.directory)) == 4


def test_concurrent_saves_to_one_name_all_succeed(store, model_dir):
    adapter = trained(model_dir)
    errors = []

    def write() -> None:
        try:
            for _ in range(5):
                store.save(SaveRequest(TRAINING, overwrite=True), saved(adapter))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.manifest(TRAINING).step == 2
    assert len(files_under(store.directory)) == 4


def test_data_directory_follows_argument_then_environment_then_home(monkeypatch, tmp_path):
    monkeypatch.delenv("PLANISH_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_directory(None) == tmp_path / ".local/share/planish/runs"
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "elsewhere"))
    assert data_directory(None) == tmp_path / "elsewhere"
    assert data_directory("~/x") == tmp_path / "x"


def test_a_copied_data_directory_can_be_read(store, model_dir, tmp_path):
    adapter = trained(model_dir)
    store.save(SaveRequest(TRAINING), saved(adapter))
    shutil.copytree(store.directory, tmp_path / "copy")
    other = CheckpointStore(tmp_path / "copy")
    assert torch.equal(other.read(TRAINING, adapter.layout, False)[0]["master"], adapter.master)
