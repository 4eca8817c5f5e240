"""tools/run_hashes.py, which shows that a change keeps the bits of six runs."""

from concurrent.futures import Future

import numpy as np
import pytest
from run_hashes import RecordingService, hash_of, hashes

from planish.types import SampledSequence, SampleResponse


def hash_of_sample(logprob: np.float32, directory):
    sequence = SampledSequence("stop", "id", np.array([3], np.int32), np.array([logprob]))
    service, future = RecordingService(None), Future()  # pyright: ignore[reportArgumentType]
    future.set_result(SampleResponse([sequence]))
    service.futures.append(future)
    return hash_of(service, directory)


def test_one_changed_bit_of_a_logprob_or_of_a_weight_changes_the_hash(tmp_path):
    one, next_one = np.float32(-1), np.nextafter(np.float32(-1), np.float32(0))
    first = hash_of_sample(one, tmp_path)
    assert first == hash_of_sample(one, tmp_path) != hash_of_sample(next_one, tmp_path)
    (tmp_path / "final").mkdir()
    (tmp_path / "final/adapter.safetensors").write_bytes(b"\0")
    assert hash_of_sample(one, tmp_path) != first


@pytest.mark.slow
def test_runs_repeat_and_a_served_run_has_the_bits_of_its_run_in_one_process(tmp_path):
    (tmp_path / "again").mkdir()
    found = hashes(tmp_path)
    assert found == hashes(tmp_path / "again")
    assert found["served"] == found["rl_loop"]
    assert len(set(found.values())) == 5
