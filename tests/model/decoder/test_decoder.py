"""The decoder equals transformers and PEFT, on small random models of each family."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from backends import CPU, load_on
from peft import LoraConfig as PeftConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from variants import slow_after

from planish.engine.checkpoints.files import peft_config
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.choose import choose_backend, reference_backend
from planish.model.layers.lora import AdapterRange, LoraLayout, LoraWeights
from planish.model.layers.rope import RotaryEmbedding
from planish.model.sequences.prefix_tree import pack
from planish.model.sources.weights import load_weights
from planish.testing import CONFIGS, tiny_model
from planish.types import LoraConfig

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC_SCALING = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE_SCALING = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.0, 3.0, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
}
VARIANTS = [
    ("llama", {}),
    ("llama", {"tied": False, "kv_heads": 4, "shards": 2}),
    ("llama", {"rope_scaling": LLAMA3_SCALING}),
    ("llama", {"kv_heads": 1}),
    ("llama", {"rope_scaling": DYNAMIC_SCALING}),
    ("mistral", {"tied": False, "head_dim": 24}),
    ("mistral", {"window": 48}),
    ("mistral", {"rope_scaling": YARN_SCALING}),
    ("ministral3", {}),
    ("ministral3", {"tied": False, "rope_scaling": YARN_SCALING, "kv_heads": 4}),
    ("ministral3", {"window": 48}),
    ("qwen2", {}),
    ("qwen2", {"tied": False}),
    ("qwen2", {"rope_scaling": YARN_SCALING}),
    ("qwen3", {}),
    ("qwen3", {"tied": False, "head_dim": 32}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"experts_per_token": 1}),
    ("qwen3_moe", {"layers": 3, "dense_layers": [1], "tied": False, "experts_per_token": 3}),
    ("smollm3", {"layers": 4}),
    ("qwen3_5", {"layers": 4}),
    ("qwen3_5", {"tied": False, "head_dim": 32}),
    # With other seeds, a delta net may amplify the rounding of a single row beyond 1e-4.
    ("qwen3_5_moe", {"seed": 2}),
    ("qwen3_5_moe", {"tied": False, "head_dim": 32, "experts_per_token": 3, "seed": 2}),
    ("smollm3", {"layers": 4, "rope_scaling": YARN_SCALING}),
    ("olmo3", {"layers": 4}),
    ("olmo3", {"layers": 4, "tied": False, "kv_heads": 4, "rope_scaling": YARN_SCALING}),
    ("phi3", {"kv_heads": 4}),
    ("phi3", {"rope_scaling": {"partial_rotary_factor": 0.5}, "window": 48}),
    ("phi3", {"tied": False, "rope_scaling": LONGROPE_SCALING}),
    ("gpt_oss", {}),
    ("gpt_oss", {"tied": False, "experts_per_token": 3, "rope_scaling": YARN_SCALING}),
    ("gemma3", {"layers": 4}),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "head_dim": 32}),
]


class CausalAttention:
    """Causal attention of one sequence in float32, by its definition."""

    def __init__(self, windows: Sequence[int | None] = ()) -> None:
        self.windows = windows

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        repeat = q.shape[1] // k.shape[1]
        q, k, v = (
            x.float().transpose(0, 1)
            for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))
        )
        window = self.windows[layer] if self.windows else None
        position = torch.arange(q.shape[1])
        distance = position[:, None] - position
        allowed = (distance >= 0) & (distance < (window or len(position)))
        if sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(0, 1)
        scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(position), 1)), 2)
        return (scores.softmax(2)[..., :-1] @ v).transpose(0, 1)


def logits_of(
    decoder: Decoder, tokens: torch.Tensor, weights: LoraWeights | None = None, **options
) -> torch.Tensor:
    attend = CausalAttention(decoder.config.windows)

    def in_dtype(*args):
        return attend(*args).to(decoder.dtype)

    hidden = decoder.forward(
        tokens,
        torch.arange(len(tokens)),
        in_dtype,
        weights,
        recurrence=decoder.backend.tree_recurrence(pack([tokens.numpy()], len(tokens))[0]),
        **options,
    )
    logits = hidden.float() @ decoder.head.weight.float().t()
    if weights is not None and weights.head is not None:
        logits = (
            logits + (hidden @ weights.head.a.t()).float() @ weights.head.b_matrices[0].float().t()
        )
    return logits


def random_tokens(decoder: Decoder, n: int) -> torch.Tensor:
    return torch.randint(
        0, decoder.config.vocab_size, (n,), generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_logits_equal_transformers(tmp_path, family, options):
    tiny_model(tmp_path, family=family, **options)
    decoder = load_on(tmp_path, torch.float32, CPU)
    tokens = random_tokens(decoder, 200)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(
        tokens[None]
    ).logits[0]
    ours = logits_of(decoder, tokens)
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"factor": 0.5},
        {"attention_factor": 1.25},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 0.5},
        {"beta_fast": 8, "beta_slow": 2.5, "truncate": False},
        {"beta_fast": 4, "beta_slow": 4, "truncate": False},
        {"original_max_position_embeddings": 32768, "rope_theta": 1e6},
    ],
)
def test_yarn_frequencies_equal_transformers_bitwise(tmp_path, options):
    tiny_model(tmp_path, family="qwen3", head_dim=128, rope_scaling=YARN_SCALING | options)
    config = ModelConfig.from_directory(tmp_path)
    ours = RotaryEmbedding(config.rope, config.head_dim, 2048, CPU)
    theirs = Qwen3RotaryEmbedding(Qwen3Config.from_pretrained(tmp_path))
    cos, sin = theirs(torch.zeros(1), torch.arange(2048)[None])
    assert torch.equal(ours.cos, cos[0, :, :64])
    assert torch.equal(ours.sin, sin[0, :, :64])


SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    DYNAMIC_SCALING | {"factor": 1.3},
    LLAMA3_SCALING,
    LLAMA3_SCALING | {"original_max_position_embeddings": 8192, "rope_theta": 5e5},
    YARN_SCALING,
]


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        *((family, each) for family in ("llama", "smollm3", "ministral3") for each in SCALINGS),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("phi3", LONGROPE_SCALING),
    ],
)
def test_rope_tables_equal_transformers_bitwise(tmp_path, family, scaling):
    tiny_model(tmp_path, family, rope_scaling=scaling)
    config = ModelConfig.from_directory(tmp_path)
    length = min(300, config.max_context)
    ours = RotaryEmbedding(config.rope, 16, config.max_context, CPU, config.rotary_dims)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    assert torch.equal(ours.cos[:length, :half], cos[0, :, :half])
    assert torch.equal(ours.sin[:length, :half], sin[0, :, :half])
    assert (ours.cos[:, half:] == 1).all()
    assert (ours.sin[:, half:] == 0).all()


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 3.0}, YARN_SCALING])
def test_rope_tables_of_each_layer_type_equal_transformers_bitwise(tmp_path, family, scaling):
    tiny_model(tmp_path, family, rope_scaling=scaling)
    config = ModelConfig.from_directory(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    for layer, kind in enumerate(("sliding_attention", "full_attention")):
        ours = RotaryEmbedding(config.rope_of(layer), 16, 300, CPU)
        cos, sin = theirs(torch.zeros(1), torch.arange(300)[None], kind)
        assert torch.equal(ours.cos, cos[0, :, :8])
        assert torch.equal(ours.sin, sin[0, :, :8])


@pytest.mark.parametrize(  # test_experts.py has this test for mixtures of experts.
    "family",
    slow_after(
        4,
        sorted(
            CONFIGS.keys() - {"qwen3_moe", "qwen3_5_moe"},
            key=lambda family: (family not in ("gemma3", "gpt_oss", "llama", "qwen3_5"), family),
        ),
    ),
)
def test_bf16_is_as_close_to_float32_as_transformers_bf16(tmp_path, family):
    tiny_model(tmp_path, family=family, layers=4)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    decoder = load_on(tmp_path, torch.bfloat16, CPU)
    tokens = random_tokens(decoder, 200)
    # The reference reads the same rounded weights, so only the arithmetic differs.
    exact.load_state_dict({name: weight.float() for name, weight in theirs.state_dict().items()})
    reference = exact(tokens[None]).logits[0]
    our_error = (logits_of(decoder, tokens) - reference).norm() / reference.norm()
    their_error = (theirs(tokens[None]).logits[0].float() - reference).norm() / reference.norm()
    assert our_error <= 1.1 * their_error
    # The random gates of the delta nets amplify rounding, and other experts are chosen in a few
    # rows of gpt-oss, for transformers too.
    assert our_error < (0.04 if family in ("qwen3_5", "gpt_oss") else 0.02)


def peft_model(path, layout: LoraLayout, master: torch.Tensor):
    """Return the same base model and adapter in transformers and PEFT."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fields = peft_config(layout, "")
    config = PeftConfig(
        r=layout.lora_config.rank,
        lora_alpha=32,
        target_modules=fields["target_modules"],
        target_parameters=fields.get("target_parameters"),
        lora_dropout=0.0,
    )
    peft = get_peft_model(base, config)
    parameters = dict(peft.named_parameters())
    views = layout.views(master)
    for entry in layout.entries:
        name = f"base_model.model.{entry.peft_name}.default.weight"
        parameters[name].data.copy_(entry.to_peft(views[entry.name]))
    return peft


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", LoraConfig(rank=8, train_unembed=False)),
        ("llama", LoraConfig(rank=1, train_mlp=False, train_unembed=False)),
        ("mistral", LoraConfig(rank=3)),
        ("qwen2", LoraConfig(rank=5, train_attn=False, train_unembed=False)),
        ("qwen3", LoraConfig(rank=32)),
        ("qwen3_moe", LoraConfig(rank=4)),
        ("qwen3_moe", LoraConfig(rank=3, train_attn=False, train_unembed=False)),
        ("smollm3", LoraConfig(rank=6, train_mlp=False)),
        ("gemma3", LoraConfig(rank=4)),
        ("qwen3_5", LoraConfig(rank=4)),
        ("qwen3_5_moe", LoraConfig(rank=4)),
        ("qwen3_5_moe", LoraConfig(rank=3, train_attn=False, train_unembed=False)),
        ("ministral3", LoraConfig(rank=4)),
        ("olmo3", LoraConfig(rank=7)),
        ("phi3", LoraConfig(rank=5)),
    ],
)
def test_an_adapter_gives_the_logits_of_peft(tmp_path, family, lora):
    tiny_model(tmp_path, family=family, tied=False)
    decoder = load_on(tmp_path, torch.float32, CPU)
    layout = LoraLayout(decoder.config, lora)
    master = layout.init(0) + 0.02 * torch.randn(
        layout.size, generator=torch.Generator().manual_seed(1)
    )
    tokens = random_tokens(decoder, 60)
    theirs = peft_model(tmp_path, layout, master)(tokens[None]).logits[0]
    ours = logits_of(decoder, tokens, LoraWeights(layout, master, decoder.backend))
    assert (logits_of(decoder, tokens) - theirs).abs().max() > 1e-2
    assert (ours - theirs).abs().max() < 1e-4


def test_adapters_in_one_batch_equal_each_adapter_alone(tmp_path):
    tiny_model(tmp_path)
    decoder = load_on(tmp_path, torch.float32, CPU)
    weights: list[LoraWeights | None] = [None]
    for seed, rank in enumerate((4, 256, 7)):
        layout = LoraLayout(decoder.config, LoraConfig(rank=rank, train_mlp=rank != 7))
        master = layout.init(seed) + 0.02 * torch.randn(
            layout.size, generator=torch.Generator().manual_seed(seed)
        )
        weights.append(LoraWeights(layout, master, decoder.backend))
    tokens = random_tokens(decoder, 40)

    def itself(layer, q, k, v, sinks=None):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def run(rows, adapters):
        batch = decoder.backend.adapter_batch(adapters)
        return decoder.forward(tokens[rows], torch.arange(len(tokens))[rows], itself, batch)

    with torch.inference_mode():
        together = run(
            slice(0, 40), [AdapterRange(10 * i, 10 * i + 10, w) for i, w in enumerate(weights)]
        )
        for i, w in enumerate(weights):
            alone = run(slice(10 * i, 10 * i + 10), [AdapterRange(0, 10, w)])
            torch.testing.assert_close(together[10 * i : 10 * i + 10], alone, atol=1e-5, rtol=1e-5)


def test_a_fresh_adapter_changes_nothing_and_follows_its_seed(tmp_path):
    tiny_model(tmp_path)
    decoder = load_on(tmp_path, torch.float32, CPU)
    layout = LoraLayout(decoder.config, LoraConfig(rank=4))
    tokens = random_tokens(decoder, 20)
    fresh = LoraWeights(layout, layout.init(3), decoder.backend)
    torch.testing.assert_close(logits_of(decoder, tokens, fresh), logits_of(decoder, tokens))
    assert torch.equal(layout.init(3), layout.init(3))
    assert not torch.equal(layout.init(3), layout.init(4))
    assert not torch.equal(layout.init(None), layout.init(None))


def test_recomputing_layers_gives_the_same_gradient(tmp_path):
    """The checkpoints have one layer, two (and the last one has one), or all three."""
    tiny_model(tmp_path, layers=3)
    decoder = load_on(tmp_path, torch.float32, CPU)
    layout = LoraLayout(decoder.config, LoraConfig(rank=4))
    master = layout.init(0) + 0.05
    tokens = random_tokens(decoder, 30)
    gradients, stored = [], []
    for group_size in (0, 1, 2, 3):
        weights = LoraWeights(layout, master, decoder.backend, requires_grad=True)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: (saved.append(x), x)[1], lambda x: x
        ):
            logits = logits_of(decoder, tokens, weights, layers_per_checkpoint=group_size)
        stored.append(sum(x.shape == (30, decoder.config.hidden_size) for x in saved))
        logits.logsumexp(-1).sum().backward()
        gradients.append(weights.collect_grad())
    assert gradients[0].norm() > 0
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])
    assert stored[1] > stored[2] > stored[3]


def test_gradients_are_with_respect_to_the_master_weights(tmp_path):
    """Finite differences of the master vector include the scaling that the compute copy applies to
    B.
    """
    tiny_model(tmp_path, layers=1)
    decoder = load_on(tmp_path, torch.float32, CPU)
    layout = LoraLayout(decoder.config, LoraConfig(rank=2))
    master = layout.init(0) + 0.05
    tokens = random_tokens(decoder, 10)
    weights = LoraWeights(layout, master, decoder.backend, requires_grad=True)

    def loss(weights: LoraWeights) -> torch.Tensor:
        return logits_of(decoder, tokens, weights).log_softmax(-1)[:, 0].sum()

    loss(weights).backward()
    gradient = weights.collect_grad()
    direction = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    step = 1e-3 * direction
    plus, minus = (
        loss(LoraWeights(layout, master + s * step, decoder.backend)).item() for s in (1, -1)
    )
    assert (plus - minus) / 2 == pytest.approx(float(gradient @ step), rel=0.02)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_loading_on_a_device_allocates_only_the_weights(tmp_path, family):
    """torch caches the freed memory of a GPU. If weights were joined there, the parts would leave
    as much again in blocks that no other tensor fits into.
    """
    tiny_model(tmp_path, family=family)
    config = ModelConfig.from_directory(tmp_path)
    weights = load_weights(tmp_path, config)
    made: dict[int, torch.UntypedStorage] = {}

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if (
                isinstance(out, torch.Tensor)
                and out.dtype == torch.bfloat16
                and out.device.type == "meta"
            ):
                storage = out.untyped_storage()
                made[storage._cdata] = storage
            return out

    with Noted():
        Decoder(weights, reference_backend(config, torch.bfloat16, torch.device("meta")))
    assert sum(storage.nbytes() for storage in made.values()) == sum(
        2 * weight.numel() for weight in weights.values()
    )


def test_weights_already_in_dtype_are_not_copied(tmp_path):
    tiny_model(tmp_path, dtype="bfloat16")
    config = ModelConfig.from_directory(tmp_path)
    weights = load_weights(tmp_path, config)
    decoder = Decoder(weights, choose_backend(config, torch.bfloat16, CPU, False))
    assert decoder.head.weight.data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
