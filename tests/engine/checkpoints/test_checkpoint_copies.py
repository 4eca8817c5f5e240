"""Copies, expiry and deletion of checkpoints, also with concurrent writers and after crashes."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
from backends import torch_backend
from filelock import FileLock

import planish.engine.checkpoints.replacement as replacement
import planish.engine.checkpoints.store as checkpoints
from planish.engine.checkpoints.files import ADAPTER_FILE, MANIFEST_FILE, OPTIMIZER_FILE, Manifest
from planish.engine.checkpoints.store import AdapterSnapshot, CheckpointStore, SaveRequest
from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.engine.training.adapters import Adapter
from planish.errors import CheckpointError, DamagedFileError, StorageError, UserError
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend
from planish.model.kernels.cpp.matmul import supports_bf16_matmul
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.service import Sample
from planish.testing import VOCAB_SIZE, tiny_model
from planish.types import AdamParams, CheckpointPath, LoraConfig, ModelInput, SamplingParams

SOURCE = CheckpointPath("run:train:0", "training", "a")
COPY = CheckpointPath("other:train:3", "training", "b")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(tmp_path, adapter) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "data")
    store.save(SaveRequest(SOURCE, user_metadata={"a": "1"}, ttl_seconds=60), saved(adapter))
    return store


@pytest.fixture
def adapter(model_dir) -> Adapter:
    layout = LoraLayout(ModelConfig.from_directory(model_dir), LoraConfig(rank=2, seed=1))
    adapter = Adapter(layout, torch_backend())
    adapter.add_grad(torch.ones(layout.size))
    adapter.optim_step(AdamParams())
    return adapter


def saved(adapter: Adapter) -> AdapterSnapshot:
    return AdapterSnapshot(adapter.state(), adapter.layout, "base", "architecture", "weights")


def test_a_copy_is_equal_and_outlives_its_source(store, adapter):
    store.copy(SOURCE, SaveRequest(COPY))
    assert os.path.samefile(store.files(SOURCE)[ADAPTER_FILE], store.files(COPY)[ADAPTER_FILE])
    store.delete(SOURCE)
    state, _ = store.read(COPY, adapter.layout, with_optimizer=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in adapter.state().items())
    manifest = store.manifest(COPY)
    assert (manifest.expires_at, manifest.user_metadata, manifest.step) == (None, {"a": "1"}, 1)


def test_a_copy_duplicates_files_where_hard_links_fail(store, adapter, monkeypatch):
    def refused(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    store.copy(SOURCE, SaveRequest(COPY))
    assert not os.path.samefile(store.files(SOURCE)[ADAPTER_FILE], store.files(COPY)[ADAPTER_FILE])
    state, _ = store.read(COPY, adapter.layout, with_optimizer=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in adapter.state().items())


def test_a_sampler_copy_has_no_optimizer_file(store):
    path = CheckpointPath("run:train:0", "sampler", "pinned")
    store.copy(SOURCE, SaveRequest(path))
    assert OPTIMIZER_FILE not in store.files(path)
    assert set(store.files(SOURCE)) - set(store.files(path)) == {OPTIMIZER_FILE}
    with pytest.raises(CheckpointError, match="no optimizer state"):
        store.copy(path, SaveRequest(COPY))


def test_copying_a_missing_source_or_onto_an_existing_name_is_rejected(store):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.copy(COPY, SaveRequest(CheckpointPath("run", "training", "c")))
    store.copy(SOURCE, SaveRequest(COPY))
    with pytest.raises(CheckpointError, match="exists"):
        store.copy(SOURCE, SaveRequest(COPY))
    store.copy(SOURCE, SaveRequest(COPY, overwrite=True))
    assert store.manifest(COPY).step == 1


def test_a_copy_that_fails_on_a_full_disk_leaves_no_files(store, monkeypatch):
    monkeypatch.setattr("planish.engine.checkpoints.store.write_manifest", full_disk)
    with pytest.raises(StorageError, match="was not saved"):
        store.copy(SOURCE, SaveRequest(COPY))
    assert [record.tinker_path for record in store.records()] == [str(SOURCE)]
    assert not any(path.name.endswith(".tmp") for path in store.directory.rglob("*"))


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_set_ttl_changes_the_expiry_time(store):
    store.set_ttl(SOURCE, None)
    assert store.manifest(SOURCE).expires_at is None
    store.set_ttl(SOURCE, 3600)
    expires_at = store.manifest(SOURCE).expires_at
    assert expires_at is not None
    assert abs(expires_at - datetime.now(UTC) - timedelta(hours=1)) < timedelta(seconds=30)
    assert store.manifest(SOURCE).files.keys() == set(store.files(SOURCE)) - {MANIFEST_FILE}


@pytest.mark.parametrize("ttl", [0, -1, True, 1.5, "3600", 10**12])
def test_an_invalid_ttl_is_rejected(store, ttl):
    with pytest.raises(UserError, match="ttl_seconds"):
        store.set_ttl(SOURCE, ttl)
    assert store.manifest(SOURCE).expires_at is not None


def test_the_engine_validates_a_sample_request_without_a_sampler(model_dir, tmp_path):
    engine = Engine({"tiny": str(model_dir)}, tmp_path)
    try:
        good = Sample("none", ModelInput.from_ints([1, 2]), 1, SamplingParams(max_tokens=3))
        engine.check_sample("tiny", good)
        with pytest.raises(ValueError, match=str(VOCAB_SIZE)):
            engine.check_sample(
                "tiny", Sample("none", ModelInput.from_ints([VOCAB_SIZE]), 1, SamplingParams())
            )
    finally:
        engine.close()


def test_adapter_bytes_grow_with_rank_and_count_training_state(model_dir, tmp_path):
    engine = Engine({"tiny": str(model_dir)}, tmp_path)
    try:
        small, large = (
            engine.administration.adapter_bytes("tiny", LoraConfig(rank=rank)) for rank in (4, 8)
        )
        layout = LoraLayout(ModelConfig.from_directory(model_dir), LoraConfig(rank=4))
        assert small.training > 4 * 4 * layout.size
        assert small.training < large.training <= 2 * small.training
        assert layout.size * 2 <= small.sampling < small.training
    finally:
        engine.close()


@pytest.mark.skipif(
    not supports_bf16_matmul(),
    reason="this CPU has no kernels of its own, so nothing is packed for them",
)
@pytest.mark.parametrize(
    "lora", [{"rank": 1}, {"rank": 8}, {"rank": 4, "train_unembed": False}, {"train_mlp": False}]
)
def test_adapter_bytes_include_the_packed_weights(model_dir, tmp_path, lora):
    """Packed weights are padded to whole vectors, several times the size of a small rank."""
    layout = LoraLayout(ModelConfig.from_directory(model_dir), LoraConfig(**lora))
    backend = choose_backend(layout.model_config, torch.bfloat16, torch.device("cpu"), False)
    weights = LoraWeights(layout, layout.init(1), backend)
    panels = (weights.packed, weights._packed_head)
    forth, back = (
        sum(part.nbytes for own in panels for part in getattr(own, name)[1])
        for name in ("_forward", "_backward")
    )
    engine = Engine(
        {"tiny": str(model_dir)}, tmp_path, EngineSettings(device="cpu", dtype="bfloat16")
    )
    try:
        found = engine.administration.adapter_bytes("tiny", layout.lora_config)
    finally:
        engine.close()
    assert found.sampling == 2 * layout.size + forth
    assert found.training == 4 * 7 * layout.size + found.sampling + back


def test_deleting_the_last_checkpoint_removes_the_run_directory(store, adapter):
    second = CheckpointPath(SOURCE.run_id, "sampler", "s")
    store.save(SaveRequest(second), saved(adapter))
    store.delete(SOURCE)
    assert store.exists(second)
    store.delete(second)
    assert list(store.directory.iterdir()) == []
    store.save(SaveRequest(SOURCE), saved(adapter))
    assert store.exists(SOURCE)


def let_it_expire(store: CheckpointStore) -> Path:
    """Let SOURCE expire, and return its directory."""
    directory = store.directory / SOURCE.run_id / "weights" / "a"
    expired = replace(store.manifest(SOURCE), expires_at=datetime.now(UTC) - timedelta(seconds=1))
    (directory / MANIFEST_FILE).write_text(expired.to_json())
    return directory


def test_replacing_an_expired_checkpoint_does_not_deadlock(store, adapter):
    let_it_expire(store)
    store.save(SaveRequest(SOURCE), saved(adapter))
    assert store.exists(SOURCE)


def test_removing_an_expired_checkpoint_spares_a_newer_one_saved_meanwhile(
    store, adapter, monkeypatch
):
    monkeypatch.setattr(replacement, "_EXPIRED_SECONDS", 0.0)
    let_it_expire(store)
    read = checkpoints.read_manifest

    def read_and_replace(directory: Path) -> Manifest:
        manifest = read(directory)
        monkeypatch.setattr(checkpoints, "read_manifest", read)
        store.save(SaveRequest(SOURCE, overwrite=True), saved(adapter))
        return manifest

    monkeypatch.setattr(checkpoints, "read_manifest", read_and_replace)
    assert store.records() == []
    assert store.exists(SOURCE)


def test_an_expired_checkpoint_is_rejected_while_its_run_is_locked(store, monkeypatch):
    monkeypatch.setattr(replacement, "_EXPIRED_SECONDS", 0.0)
    directory = let_it_expire(store)
    with FileLock(directory.parents[1] / ".lock"):
        with pytest.raises(CheckpointError, match="expired at"):
            store.manifest(SOURCE)
        assert directory.exists()
    assert not store.exists(SOURCE)
    assert not directory.exists()


def test_set_ttl_does_not_deadlock_if_the_checkpoint_expires_meanwhile(store, monkeypatch):
    lock = checkpoints.locked

    def lock_late(run: Path, make: bool = False):
        let_it_expire(store)
        return lock(run, make)

    monkeypatch.setattr(checkpoints, "locked", lock_late)
    store.set_ttl(SOURCE, None)
    assert store.manifest(SOURCE).expires_at is None


def test_delete_waits_for_the_lock_of_the_run(store, adapter):
    with ThreadPoolExecutor(1) as threads:
        with FileLock(store.directory / SOURCE.run_id / ".lock"):
            deletion = threads.submit(store.delete, SOURCE)
            with pytest.raises(TimeoutError):
                deletion.result(0.1)
            assert store.exists(SOURCE)
        deletion.result(60)
    assert list(store.directory.iterdir()) == []


def test_delete_removes_a_checkpoint_left_half_replaced_by_a_crash(store):
    directory = store.directory / SOURCE.run_id / "weights" / "a"
    directory.rename(directory.with_name(".a.previous"))
    store.delete(SOURCE)
    assert list(store.directory.iterdir()) == []


def test_deleting_a_missing_checkpoint_creates_no_directory(store):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.delete(COPY)
    assert not (store.directory / COPY.run_id).exists()


def test_temporary_files_of_crashed_writers_are_removed(store):
    segment = store.directory / SOURCE.run_id / "weights"
    other = store.directory / "gone:train:0" / "sampler_weights"
    for leftover in (segment / ".x.0a1b.tmp", other / ".y.0a1b.tmp"):
        leftover.mkdir(parents=True)
        (leftover / ADAPTER_FILE).write_bytes(b"half")
    store.clear_leftovers()
    assert [path.name for path in segment.iterdir()] == ["a"]
    assert not other.parent.exists()


def test_set_ttl_of_a_missing_checkpoint_creates_no_directory(store):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.set_ttl(COPY, 60)
    assert not (store.directory / COPY.run_id).exists()


def test_many_threads_can_save_and_delete_in_one_run(store, adapter):
    """Deleting the last checkpoint removes the directory to which other threads will write."""
    paths = [CheckpointPath("busy:train:0", "sampler", f"n{index}") for index in range(4)]

    def work(path: CheckpointPath) -> None:
        for _ in range(15):
            store.copy(SOURCE, SaveRequest(path))
            assert store.exists(path)
            store.delete(path)

    with ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(work, paths))
    assert not (store.directory / "busy:train:0").exists()


def test_copying_a_source_with_a_missing_file_names_the_file(store: CheckpointStore):
    (store.files(SOURCE)[ADAPTER_FILE]).unlink()
    with pytest.raises(DamagedFileError, match=f"a/{ADAPTER_FILE} is missing"):
        store.copy(SOURCE, SaveRequest(COPY))
    assert not store.exists(COPY)


def test_copying_a_source_deleted_meanwhile_names_the_source(store: CheckpointStore, monkeypatch):
    before_linking(monkeypatch, lambda: store.delete(SOURCE))
    with pytest.raises(CheckpointError, match=f"there is no checkpoint {SOURCE}"):
        store.copy(SOURCE, SaveRequest(COPY))
    assert not store.exists(COPY)


@pytest.mark.parametrize("linked_before", [0, 1])
def test_copying_restarts_if_the_source_is_replaced_meanwhile(
    store, adapter, monkeypatch, linked_before
):
    def replace_it() -> None:
        adapter.add_grad(torch.ones(adapter.layout.size))
        adapter.optim_step(AdamParams())
        store.save(SaveRequest(SOURCE, overwrite=True), saved(adapter))

    before_linking(monkeypatch, replace_it, linked_before)
    store.copy(SOURCE, SaveRequest(COPY))
    state, _ = store.read(COPY, adapter.layout, with_optimizer=True)
    assert store.manifest(COPY).step == 2
    assert all(torch.equal(state[name], tensor) for name, tensor in adapter.state().items())


def before_linking(monkeypatch, act: Callable[[], None], linked_before: int = 0) -> None:
    """Call `act` once in the middle of a copy, after `linked_before` files were linked."""
    link, linked = checkpoints.link_or_copy, count()

    def link_or_copy(source: Path, target: Path) -> None:
        if next(linked) == linked_before:
            act()
        link(source, target)

    monkeypatch.setattr(checkpoints, "link_or_copy", link_or_copy)


def test_a_copy_waits_for_a_writer_and_has_its_content(store, adapter, monkeypatch):
    is_writing, go_on = threading.Event(), threading.Event()
    put = checkpoints.rename_into_place

    def slow_put(aside: Path, target: Path) -> None:
        if target.name == "a":
            is_writing.set()
            go_on.wait(60)
        put(aside, target)

    monkeypatch.setattr(checkpoints, "rename_into_place", slow_put)
    newer = AdapterSnapshot(
        {**adapter.state(), "step": torch.tensor(7)},
        adapter.layout,
        "base",
        "architecture",
        "weights",
    )
    beside = replace(COPY, run_id=SOURCE.run_id)
    with ThreadPoolExecutor(2) as threads:
        writer = threads.submit(store.save, SaveRequest(SOURCE, overwrite=True), newer)
        assert is_writing.wait(60)
        copier = threads.submit(store.copy, SOURCE, SaveRequest(beside))
        time.sleep(0.1)
        go_on.set()
        writer.result(60)
        copier.result(60)
    assert int(store.read(beside, adapter.layout, with_optimizer=True)[0]["step"]) == 7
