"""The base weights of a Hugging Face directory, mapped into memory from its safetensors files.

Invariants: names are Hugging Face's; dtypes are as stored; nothing is copied, so every process that
loads the same model shares its pages, and a page that is never read is never loaded. Every name and
shape is compared with the architecture before the first tensor is handed out. Pickled checkpoints
are refused, because unpickling runs their code.

The mapping is private: writing to a tensor would copy its page and leave the file as it is. Nothing
here writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError
from planish.model.config import ModelConfig, read_json

if TYPE_CHECKING:  # seconds to load, which commands that list models need not wait for
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("BF16", "F16", "F32")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 4096


def load_weights(directory: str | Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Tensors by Hugging Face name, exactly those of `expected_shapes(config)`, on the CPU,
    memory-mapped.

    `lm_head.weight` is absent if the head is tied. Raises UnknownModelError (no weights),
    UnsupportedError (pickled or quantized weights), DamagedFileError (a file that is truncated, or
    tensors missing, unexpected or of another shape).
    """
    directory = Path(directory)
    with ExitStack() as stack:
        handles = {
            file: stack.enter_context(_open(directory / file)) for file in weight_files(directory)
        }
        places = _places(directory, handles)
        _check(directory, config, places)
        weights = {name: places[name].get_tensor(name) for name in expected_shapes(config)}
        if config.tied_head and "lm_head.weight" in places:
            _check_tied(directory, weights, places["lm_head.weight"].get_tensor("lm_head.weight"))
    return weights


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the architecture; matrices are (out, in)."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"self_attn.{name}.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}.bias", (rows,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


def weight_files(directory: str | Path) -> list[str]:
    """The names of the safetensors files of a model directory; a single file goes before an index."""
    directory = Path(directory)
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    if (directory / INDEX_FILE).is_file():
        return sorted(set(_weight_map(directory).values()))
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        raise UnsupportedError(
            f"{directory} has pickled weights ({pickles[0]}), which planish never loads because unpickling runs code; "
            "convert them to safetensors: AutoModelForCausalLM.from_pretrained(PATH).save_pretrained(NEW_PATH)"
        )
    raise UnknownModelError(
        f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}; finish the download"
    )


def weights_fingerprint(directory: Path) -> str:
    """16 hexadecimal digits that tell apart the weights in the files, by blocks spread over them.

    Reading everything would take a minute for a large model; two models that people train differ in
    nearly every block.
    """
    digest = hashlib.sha256()
    for name in weight_files(directory):
        with open(directory / name, "rb") as file:
            size = file.seek(0, 2)
            digest.update(size.to_bytes(8, "little"))
            for block in range(_SAMPLED_BLOCKS):
                file.seek(max(0, size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedFileError(
            f"{directory / INDEX_FILE} has no weight_map; copy it from the model again"
        )
    for file in set(weight_map.values()):
        # A name from a downloaded file must not lead out of the directory.
        if not isinstance(file, str) or Path(file).name != file:
            raise DamagedFileError(
                f"{directory / INDEX_FILE} names {file!r}, which is no file name; get it again"
            )
        if not (directory / file).is_file():
            raise DamagedFileError(
                f"{directory / file} is missing, but {INDEX_FILE} names it; finish the download"
            )
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(
            f"{path} cannot be read ({error}); it is truncated or altered, get it again"
        ) from error


def _places(directory: Path, handles: Mapping[str, Any]) -> dict[str, Any]:
    """The open file of each stored tensor."""
    places: dict[str, Any] = {}
    for file, handle in handles.items():
        names: list[str] = handle.keys()
        for name in names:
            if name in places:
                raise DamagedFileError(
                    f"{directory / file} repeats {name} of another shard; get the model again"
                )
            places[name] = handle
    return places


def _check(directory: Path, config: ModelConfig, places: Mapping[str, Any]) -> None:
    expected = expected_shapes(config)
    ignored = {name for name in places if name.endswith("rotary_emb.inv_freq")}
    if config.tied_head:
        ignored.add("lm_head.weight")
    missing = [name for name in expected if name not in places]
    unexpected = [name for name in places if name not in expected and name not in ignored]
    slices = {name: places[name].get_slice(name) for name in expected if name in places}
    mis_shaped = [
        f"{name} is {tuple(found.get_shape())}, not {expected[name]}"
        for name, found in slices.items()
        if tuple(found.get_shape()) != expected[name]
    ]
    problems = [
        f"{kind}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", mis_shaped),
        )
        if names
    ]
    if problems:
        raise DamagedFileError(
            f"the weights in {directory} do not fit its config.json ({config.family}); {'; '.join(problems)}. "
            "Get weights and config.json of the same model"
        )
    for name, found in slices.items():
        if found.get_dtype() not in FLOAT_DTYPES:
            raise UnsupportedError(
                f"{name} in {directory} is stored as {found.get_dtype()}; planish loads {', '.join(FLOAT_DTYPES)}: "
                "use the unquantized checkpoint"
            )


def _check_tied(directory: Path, weights: Mapping[str, torch.Tensor], head: torch.Tensor) -> None:
    # transformers itself has answered this both ways over its versions, so it is not ours to guess.
    if not head.equal(weights["model.embed_tokens.weight"]):
        raise UnsupportedError(
            f"{directory}: tie_word_embeddings is true, yet lm_head.weight differs from the embedding; set it to "
            "false in config.json if the head is its own, or remove lm_head.weight"
        )
