"""A decoding step in one native call equals separate calls bitwise, in hidden states, keys and
values.
"""

import pytest
import torch
from backends import CPU, load_on
from test_cpp_attention import Prompt, Sample
from torch import Tensor

from planish.model.decoder.decoder import Decoder
from planish.model.kernels.cpp.attention import CppDecodeAttention
from planish.model.kernels.cpp.decode_pass import DecodePass
from planish.model.layers.lora import AdapterRange, LoraLayout, LoraWeights
from planish.model.sequences.kv_cache import KVPools, SlotOwner
from planish.model.sequences.positions import SPAN, capacity_for
from planish.testing import tiny_model
from planish.types import LoraConfig

PADDING = 5
"""A padding row in each step."""


pytestmark = pytest.mark.usefixtures("products")


class Running:
    """Samples of two prompts, one shorter than a span, with random keys and values."""

    def __init__(self, decoder: Decoder) -> None:
        torch.manual_seed(3)
        shape = decoder.backend.kv_spec
        self.prompts, self.samples = KVPools(shape), KVPools(shape)
        self.owners = []
        for length, answers in ((2 * SPAN + 3, 4), (SPAN - 1, 9)):
            prompt = Prompt(length)
            self.prompts.pool_for(capacity_for(length)).allocate(prompt)
            self.owners += [Sample(prompt, length % SPAN + n) for n in range(answers)]
        for sample in self.owners:
            self.samples.pool_for(256).allocate(sample)
        for pool in (*self.prompts.pools_in_use(), *self.samples.pools_in_use()):
            for stored in (*pool.keys, *pool.values):
                stored.normal_()

    def attention(self) -> CppDecodeAttention:
        places = [row for row in range(len(self.owners) + 1) if row != PADDING]
        rows: dict[SlotOwner, int] = dict(zip(self.owners, places, strict=True))
        return CppDecodeAttention(rows, self.prompts, self.samples)

    def stored(self) -> list[Tensor]:
        (pool,) = self.samples.pools_in_use()
        return [*pool.keys, *pool.values]


def adapters(decoder: Decoder, dtype: torch.dtype) -> list[AdapterRange]:
    """Return rows of adapters of two shapes; the other rows have no adapter."""
    found, stop = [], 2
    for seed, rank in enumerate((4, 16)):
        layout = LoraLayout(decoder.config, LoraConfig(rank=rank, train_mlp=rank == 16))
        master = layout.init(seed) + 0.05 * torch.randn(
            layout.size, generator=torch.Generator().manual_seed(seed)
        )
        found.append(AdapterRange(stop, stop + 4, LoraWeights(layout, master, decoder.backend)))
        stop += 4
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_decoding_call_equals_separate_calls_bitwise(
    family, adapted, dtype, tmp_path, monkeypatch
):
    decoder = load_on(tiny_model(tmp_path, family, kv_heads=1, head_dim=32), dtype, CPU)
    running = Running(decoder)
    given = decoder.backend.adapter_batch(adapters(decoder, dtype) if adapted else ())
    decode_pass = decoder.backend.decode_pass(decoder)
    assert decode_pass is not None
    tokens, positions = torch.arange(14) * 7, torch.arange(14) * 3
    calls = []
    whole = DecodePass.forward
    monkeypatch.setattr(
        DecodePass, "forward", lambda *arguments: calls.append(1) or whole(*arguments)
    )
    with torch.inference_mode():
        attention = running.attention()
        slow = decoder.forward(tokens, positions, lambda *qkv: attention(*qkv), given)
        kept = [x.clone() for x in running.stored()]
        assert not calls
        for stored, sample in [
            (stored, sample) for stored in running.stored() for sample in running.owners
        ]:
            stored[sample.slot, :, sample.num_stored] = (
                0  # the positions that the call stores again
            )
        fast = decode_pass(tokens, positions, running.attention(), given)
    assert calls
    assert torch.equal(fast, slow)
    assert all(
        torch.equal(again, before) for again, before in zip(running.stored(), kept, strict=True)
    )
    assert slow.isfinite().all()
