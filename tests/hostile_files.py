"""Files that a stranger could publish: adapters, checkpoints, model directories and templates.

`HOSTILE_FILES` maps the name of each to a function that damages a copy of good files. Each must end
in an error of planish, within bounded time and memory.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], None]
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
LINEAR = "base_model.model.model.layers.0.self_attn.q_proj"
DEEP_JSON = '{"a":' * 200_000 + "1" + "}" * 200_000
EVIL_PATTERN = "(([a-z.]*)*)*!"


def fields(name: str, **changes: Any) -> Damage:
    """Change fields of a JSON file."""

    def damage(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def text(name: str, content: str | bytes) -> Damage:
    """Replace a file."""

    def damage(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        data = content if isinstance(content, bytes) else content.encode()
        (directory / name).write_bytes(data)

    return damage


def sparse(name: str, size: int) -> Damage:
    """Make a file of `size` bytes that takes no space on the disk."""

    def damage(directory: Path) -> None:
        with open(directory / name, "wb") as file:
            file.truncate(size)

    return damage


def header(name: str, content: Any, size: int = 0) -> Damage:
    """Write a safetensors file with a header of our own and `size` bytes of data, sparsely."""

    def damage(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        with open(directory / name, "wb") as file:
            file.write(len(data).to_bytes(8, "little") + data)
            file.truncate(8 + len(data) + size)

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the adapter's tensors."""

    def damage(directory: Path) -> None:
        loaded = load_file(directory / ADAPTER)
        change(loaded)
        (directory / ADAPTER).unlink()
        save_file(
            {name: tensor.contiguous() for name, tensor in loaded.items()}, directory / ADAPTER
        )

    return damage


def pair(a: tuple[int, ...], b: tuple[int, ...], linear: str = LINEAR, **options: Any) -> Damage:
    """Replace the matrices of one linear by others of these shapes."""

    def change(loaded: dict[str, torch.Tensor]) -> None:
        for matrix, shape in (("A", a), ("B", b)):
            loaded[f"{linear}.lora_{matrix}.weight"] = torch.zeros(shape, **options)

    return tensors(change)


def extra(name: str, tensor: torch.Tensor) -> Damage:
    """Add a tensor to the adapter."""
    return tensors(lambda loaded: loaded.update({name: tensor}))


def removed(name: str) -> Damage:
    """Remove a file."""
    return lambda directory: (directory / name).unlink()


def as_directory(name: str) -> Damage:
    """Replace a file by a directory."""

    def damage(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return damage


def linked_to(name: str, target: str) -> Damage:
    """Replace a file by a link."""

    def damage(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(target)

    return damage


def huge_matrices(dtype: str, rank: int) -> dict[str, Any]:
    """Return the header of an adapter with a rank that no model has."""
    bytes_a, bytes_b = 4 * rank * 64, 4 * 64 * rank
    return {
        f"{LINEAR}.lora_A.weight": {
            "dtype": dtype, "shape": [rank, 64], "data_offsets": [0, bytes_a],
        },
        f"{LINEAR}.lora_B.weight": {
            "dtype": dtype, "shape": [64, rank], "data_offsets": [bytes_a, bytes_a + bytes_b],
        },
    }  # fmt: skip


HUGE_RANK = 1 << 30
ADAPTERS: dict[str, Damage] = {
    **{
        f"r is {value!r}": fields(ADAPTER_CONFIG, r=value)
        for value in (0, -1, 2.5, 1e308, True, "4", None, [4], 10**30, float("nan"), 7)
    },
    **{
        f"lora_alpha is {value!r}": fields(ADAPTER_CONFIG, lora_alpha=value)
        for value in (0, -1, "8", None, 1e300, float("inf"), float("nan"), {}, True)
    },
    **{
        f"a pattern of {type(value).__name__}": fields(ADAPTER_CONFIG, alpha_pattern=value)
        for value in ([1], "x", 3, {"q_proj": "x"})
    },
    "an exponential pattern": fields(ADAPTER_CONFIG, alpha_pattern={r"(?=.*)" + EVIL_PATTERN: 1}),
    "a pattern with a back-reference": fields(ADAPTER_CONFIG, rank_pattern={r"(.*)\1": 4}),
    "an invalid pattern": fields(ADAPTER_CONFIG, rank_pattern={"([": 4}),
    "a long pattern": fields(ADAPTER_CONFIG, rank_pattern={"a" * 100_000: 4}),
    "a nested pattern": fields(ADAPTER_CONFIG, alpha_pattern={"(" * 900 + "a" + ")*" * 900: 4}),
    "many patterns": fields(ADAPTER_CONFIG, alpha_pattern={f"{n}.*": 4 for n in range(5000)}),
    "a pattern of rank 0": fields(ADAPTER_CONFIG, rank_pattern={"q_proj": 0}),
    "a pattern of another rank": fields(ADAPTER_CONFIG, rank_pattern={"q_proj": 5}),
    "an infinite alpha in a pattern": fields(ADAPTER_CONFIG, alpha_pattern={"q": float("inf")}),
    "a base model of another type": fields(ADAPTER_CONFIG, base_model_name_or_path=["x"]),
    "a peft_type of another type": fields(ADAPTER_CONFIG, peft_type=["LORA"]),
    "a use_rslora of another type": fields(ADAPTER_CONFIG, use_rslora="yes"),
    "a deeply nested adapter_config": text(ADAPTER_CONFIG, DEEP_JSON),
    "a deep list in adapter_config": text(ADAPTER_CONFIG, "[" * 500_000),
    "an adapter_config of bytes": text(ADAPTER_CONFIG, b"\xff\xfe\x00"),
    "an adapter_config that is a list": text(ADAPTER_CONFIG, "[]"),
    "an empty adapter_config": text(ADAPTER_CONFIG, ""),
    "a number with a million digits": text(ADAPTER_CONFIG, '{"r": ' + "9" * 1_000_000 + "}"),
    "an adapter_config of 100 GB": sparse(ADAPTER_CONFIG, 100 << 30),
    "an adapter_config that is a directory": as_directory(ADAPTER_CONFIG),
    "an adapter_config that is a device": linked_to(ADAPTER_CONFIG, "/dev/zero"),
    "a matrix file that is a device": linked_to(ADAPTER, "/dev/zero"),
    "a matrix file that is a directory": as_directory(ADAPTER),
    "no matrix file": removed(ADAPTER),
    "an empty matrix file": text(ADAPTER, ""),
    "a matrix file of zeros": sparse(ADAPTER, 100 << 30),
    "a header of 2**63 bytes": text(ADAPTER, (2**63).to_bytes(8, "little") + b"{}"),
    "a header that is no JSON": header(ADAPTER, b"{{{{"),
    "a deeply nested header": header(ADAPTER, DEEP_JSON.encode()),
    "a shape that overflows": header(
        ADAPTER, {"x": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, 4
    ),
    "offsets beyond the file": header(
        ADAPTER, {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 4
    ),
    "a rank of 2**30": header(
        ADAPTER, huge_matrices("F32", HUGE_RANK), 8 * 64 * HUGE_RANK
    ),
    "matrices of integers": pair((4, 64), (64, 4), dtype=torch.int64),
    "matrices of complex numbers": pair((4, 64), (64, 4), dtype=torch.complex64),
    "rank 0 in the matrices": pair((0, 64), (64, 0)),
    "no inputs": pair((4, 0), (64, 4)),
    "ranks that differ": pair((4, 64), (64, 3)),
    "another shape": pair((4, 65), (64, 4)),
    "one dimension": pair((256,), (256,)),
    "four dimensions": pair((1, 1, 4, 64), (1, 1, 64, 4)),
    "no dimensions": pair((), ()),
    "a layer that is not there": pair((4, 64), (64, 4), LINEAR.replace("layers.0", "layers.9")),
    "layer 10**9": pair((4, 64), (64, 4), LINEAR.replace("layers.0", f"layers.{10**9}")),
    "layer 10**5000": pair((4, 64), (64, 4), LINEAR.replace("layers.0", "layers.1" + "0" * 5000)),
    "a negative layer": pair((4, 64), (64, 4), LINEAR.replace("layers.0", "layers.-1")),
    "experts of a dense model": pair((4, 64), (64, 4), "base_model.model.model.layers.0.mlp.experts"),
    "a vision tower": pair((4, 64), (64, 4), "base_model.model.vision_tower.fc1"),
    "a name without a model": pair((4, 64), (64, 4), "x"),
    "a matrix twice": extra(
        f"{LINEAR.removeprefix('base_model.model.')}.lora_A.weight", torch.zeros(4, 64)
    ),
    "a bias": extra(f"{LINEAR}.lora_B.bias", torch.zeros(64)),
    "DoRA's magnitudes": extra(f"{LINEAR}.lora_magnitude_vector", torch.zeros(64)),
    "a weight of a linear": extra("base_model.model.model.layers.0.mlp.up_proj.weight", torch.zeros(96, 64)),
    "a name of 100,000 characters": extra("a" * 100_000, torch.zeros(1)),
    "NaN": tensors(lambda t: t.update({f"{LINEAR}.lora_A.weight": torch.full((4, 64), torch.nan)})),
    "infinity": tensors(lambda t: t.update({f"{LINEAR}.lora_B.weight": torch.full((64, 4), torch.inf)})),
    "half of a pair": tensors(lambda t: t.pop(f"{LINEAR}.lora_A.weight")),
    "no matrices": tensors(lambda t: t.clear() or t.update(x=torch.zeros(1))),
}  # fmt: skip

MANIFEST = "planish.json"
CHECKPOINTS: dict[str, Damage] = {
    "a deeply nested planish.json": text(MANIFEST, DEEP_JSON),
    "a deep list in planish.json": text(MANIFEST, "[" * 300_000 + "]" * 300_000),
    "a planish.json of 100 GB": sparse(MANIFEST, 100 << 30),
    "a planish.json that is a list": text(MANIFEST, "[]"),
    "a planish.json that is text": text(MANIFEST, '"format"'),
    "a planish.json of bytes": text(MANIFEST, b"\xff\x00"),
    **{
        f"{name} of planish.json is {value!r}": fields(MANIFEST, **{name: value})
        for name, value in (
            ("format", 99), ("lora", None), ("lora", {"rank": 0}), ("lora", {"rank": 10**9}),
            ("lora", {"colour": 1}), ("files", []), ("files", {"adapter_config.json": 1}),
            ("files", {}), ("time", "yesterday"), ("time", 3), ("expires_at", [1]),
            ("unknown", 1), ("base_model", 3), ("quantize", "int3"), ("quantize", [1]),
        )
    },
    "a changed matrix": extra(f"{LINEAR}.lora_A.weight", torch.ones(4, 64)),
    "a changed adapter_config": fields(ADAPTER_CONFIG, lora_alpha=64),
}  # fmt: skip

CONFIG = "config.json"
MODELS: dict[str, Damage] = {
    **{
        f"{name} is {value!r}"[:80]: fields(CONFIG, **{name: value})
        for name, value in (
            ("num_hidden_layers", 10**9), ("num_hidden_layers", 10**30), ("num_hidden_layers", -1),
            ("num_hidden_layers", 2.0), ("num_hidden_layers", "2"), ("num_hidden_layers", None),
            ("num_hidden_layers", 1025), ("num_hidden_layers", 3), ("hidden_size", 10**18),
            ("hidden_size", 0), ("vocab_size", 10**12), ("vocab_size", [1]),
            ("max_position_embeddings", 10**15), ("max_position_embeddings", 10**9),
            ("intermediate_size", 10**400), ("num_attention_heads", 10**9),
            ("num_attention_heads", 3), ("num_key_value_heads", 0), ("head_dim", 10**9),
            ("rms_norm_eps", 0), ("rms_norm_eps", 10**400), ("rms_norm_eps", "1e-6"), ("rope_parameters", {"rope_theta": float("nan")}), ("rope_parameters", "yarn"),
            ("rope_parameters", {"rope_type": "yarn", "factor": 1e30}),
            ("rope_parameters", {"rope_type": "yarn", "factor": 1e308,
                                 "original_max_position_embeddings": 4096}),
            ("rope_parameters", {"rope_type": "llama3", "factor": "8"}),
            ("rope_parameters", {"rope_type": ["yarn"]}), ("rope_parameters", {"rope_type": "x"}),
            ("architectures", "LlamaForCausalLM"), ("architectures", 7), ("architectures", True),
            ("architectures", [[]]), ("architectures", [{}]), ("architectures", [None]),
            ("architectures", {"LlamaForCausalLM": 1}), ("architectures", ["Unknown"]),
            ("architectures", ["LlamaForCausalLM"] * 2 + [3]), ("model_type", ["llama"]),
            ("model_type", {}), ("model_type", "gemma3"),
            ("quantization_config", True),
            ("quantization_config", "awq"), ("quantization_config", {"quant_method": ["fp8"]}),
            ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": [1],
                                     "format": "float-quantized"}),
            ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": {"a": 1},
                                     "format": "float-quantized"}),
            ("quantization_config", {"quant_method": "fp8", "weight_block_size": [0, 128]}),
            ("hidden_act", ["silu"]), ("pretraining_tp", "2"),
            ("num_experts", 10**9), ("tie_word_embeddings", False),
        )
    },
    **{
        f"eos_token_id is {value!r}": fields("generation_config.json", eos_token_id=value)
        for value in ("x", 10**9, -1, [[1]], {}, True, 1.5)
    },
    "a deeply nested config": text(CONFIG, DEEP_JSON),
    "a config of 100 GB": sparse(CONFIG, 100 << 30),
    "a config of bytes": text(CONFIG, b"\xff"),
    "a deeply nested generation_config": text("generation_config.json", DEEP_JSON),
    "weights of zeros": sparse("model.safetensors", 100 << 30),
    "truncated weights": text("model.safetensors", b"\x10\0\0\0\0\0\0\0{}"),
    "one tensor": header(
        "model.safetensors", {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4
    ),
    "no weights": removed("model.safetensors"),
    **{
        f"an index with {name}": lambda directory, content=content: (
            (directory / "model.safetensors").unlink(),
            text("model.safetensors.index.json", content)(directory),
        )[0]
        for name, content in {
            "a path": '{"weight_map": {"x": "../../etc/passwd"}}',
            "a list": '{"weight_map": ["x"]}',
            "a list as a file": '{"weight_map": {"x": ["y"]}}',
            "a null byte": '{"weight_map": {"x": "a\\u0000b"}}',
            "a missing file": '{"weight_map": {"x": "missing.safetensors"}}',
            "a deep nesting": DEEP_JSON,
        }.items()
    },
}  # fmt: skip


def copied(source: Path, target: Path) -> Path:
    """Copy a directory of files."""
    shutil.copytree(source, target)
    return target
