"""The self-test of the C++ kernels: the check of kernels (check.py) with small models of all kinds.

kernels/cpp/self_test.py runs this program once per machine, in a separate process, because a
faulty kernel may crash its process. It reads a request from its standard input
(self_test/process.py).
"""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch

from planish.engine.kernel_check.check import ModelCheck, Sizes
from planish.engine.kernel_check.mamba2_check import Mamba2Check
from planish.model.architecture.config import Mamba2Config, ModelConfig
from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig
from planish.model.architecture.hf_config.rope_config import RopeConfig
from planish.model.kernels.choose import cpp_backend
from planish.model.kernels.cpp import ops
from planish.model.kernels.cpp.matmul import supports_bf16_matmul
from planish.model.kernels.cpp.self_test import FAMILIES
from planish.model.kernels.self_test.process import (
    WrongResultError,
    check_families,
    end_with_parent,
)

_SIZES = Sizes(
    segment_lengths=(24, 10, 8),
    branches=(1, 2, 2),
    prompt_lengths=(70, 3),
    samples_per_prompt=(4, 1),
    max_sampled_tokens=40,
    lora_ranks=(16, 3),
    lora_rows=(37,),
    quantized_rows=(1, 37),
)


def _model(**changes: object) -> ModelConfig:
    """Return the config of a model with query and key norms and biases, with these changes."""
    fields = {
        "family": "qwen3",
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 1,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(10_000.0),
        "max_context": 512,
        "tied_head": False,
        "qk_norm": True,
        "qkv_bias": True,
        "eos_token_ids": (),
    }
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


_QWEN = _model()
_GEMMA = _model(
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    activation="gelu_tanh",
    output_norms=True,
    embedding_scale=1.5,
    windows=(9,),
    local_rope=RopeConfig(500.0),
    qkv_bias=False,
)
_GPT_OSS = _model(
    qk_norm=False,
    output_bias=True,
    attention_sinks=True,
    windows=(9,),
    activation="clamped_swiglu",
    swiglu_alpha=1.702,
    swiglu_limit=1.5,
)
# No size is a multiple of 16.
_ODD = _model(
    vocab_size=1003,
    hidden_size=34,
    intermediate_size=38,
    num_heads=3,
    num_kv_heads=1,
    head_dim=20,
    qk_norm=False,
)
_DELTA_NET = _model(
    num_layers=2,
    qk_norm=False,
    qkv_bias=False,
    delta_net=DeltaNetConfig(
        layers=(1,),
        num_key_heads=1,
        num_value_heads=2,
        key_dim=20,
        value_dim=80,
        conv_width=4,
    ),
)
_MAMBA2 = _model(
    qk_norm=False,
    qkv_bias=False,
    mamba2=Mamba2Config(
        layers=(0,), num_heads=4, head_dim=80, num_groups=2, state_size=20, conv_width=4
    ),
)
_DECODED = (replace(_QWEN, num_layers=2), replace(_GEMMA, num_layers=2, windows=(9, None)))
_FLOAT, _HALF, _BOTH = (torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)
_MODELS = {
    "matmul": ((_QWEN, _BOTH), (_ODD, _FLOAT)),
    "lora": ((_QWEN, _BOTH),),
    "attention": (
        (replace(_QWEN, qk_norm=False), _BOTH),
        (replace(_GEMMA, qk_norm=False), _BOTH),
        (_GPT_OSS, _HALF),
    ),
    "norms": ((_QWEN, _BOTH), (_ODD, _HALF)),
    "rope": ((_QWEN, _BOTH), (_ODD, _HALF)),
    "swiglu": ((_QWEN, _BOTH), (_GEMMA, _BOTH), (_GPT_OSS, _BOTH)),
    "log_sum_exp": ((_QWEN, _BOTH), (_ODD, _FLOAT)),
    "sampling": ((_QWEN, _HALF), (_ODD, _FLOAT)),
    "decode": tuple((config, _BOTH) for config in _DECODED),
    "delta_net": ((_DELTA_NET, _FLOAT), (_MAMBA2, _FLOAT)),
}
"""The models and dtypes that test each family.

Each kernel runs in each dtype in which it exists, and at some size that is no multiple of 16.
"""
_TRAINED = {
    "matmul", "lora", "attention", "norms", "rope", "swiglu", "log_sum_exp", "delta_net"
}  # fmt: skip
"""The families with kernels in training."""
_SAMPLED = {"lora", "attention", "norms", "sampling", "delta_net"}
"""The families with other kernels in sampling than in training, or with other arguments."""
_NEEDS = {
    "lora": {"matmul"},
    "decode": {"matmul", "lora", "attention", "norms", "rope", "swiglu"},
}
"""The other families without which a family is not used."""


def main() -> None:
    """Test the families of the request with the compiled kernels that it names."""
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    library = ops.Library(request["library"])
    library.use_amx(int(request["uses_amx"]))
    torch.set_num_threads(2)
    ops.under_test = library
    check_families(request["families"], check_family, ends_on_error=False)


def check_family(family: str) -> None:
    """Check one family with the kernels that `ops.load_library` returns.

    Raises WrongResultError if kernels and torch disagree.
    """
    library = ops.load_library()
    assert library is not None
    if family == "amx":
        if not library.amx_self_test():
            raise WrongResultError("matmuls with tiles differ from those without")
        library.use_amx(1)  # The checks of the other families then use AMX.
        return
    with _only(library, {family, *_NEEDS.get(family, ())}):
        for config, dtypes in _MODELS[family]:
            for dtype in dtypes:
                if dtype == torch.float32 or _supports_bf16(family):
                    _check_model(family, config, dtype)


@contextmanager
def _only(library: ops.Library, families: set[str]) -> Generator[None]:
    """Let torch compute all other families while the block runs."""
    before = library.torch_families
    library.torch_families = frozenset(FAMILIES) - families
    try:
        yield
    finally:
        library.torch_families = before


def _supports_bf16(family: str) -> bool:
    """Return whether this CPU uses the family in models in bf16."""
    return family not in ("matmul", "lora", "decode") or supports_bf16_matmul()


def _check_model(family: str, config: ModelConfig, dtype: torch.dtype) -> None:
    backend = cpp_backend(config, dtype, torch.device("cpu"))
    if config.mamba2 is not None:  # The decoder of `ModelCheck` has no such layers.
        Mamba2Check(backend, family).run()
        return
    check = ModelCheck(backend, family, _SIZES, is_batch_invariant=True)
    if family == "decode":
        check.decode_pass()
        return
    if family in _TRAINED:
        check.train()
    if family in _SAMPLED:
        check.sample()
    if family == "matmul":
        check.quantized()
    if family == "lora":
        check.adapt()
    if family in ("log_sum_exp", "sampling"):
        check.logits([config.vocab_size])


if __name__ == "__main__":
    main()
