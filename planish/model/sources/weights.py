"""Load the base weights of a Hugging Face directory, memory-mapped from its safetensors files.

Invariants: tensors keep their Hugging Face names and stored dtypes. Nothing is copied, so processes
that load the same model share its pages, and a page that is never read is never loaded. Every name
and shape is compared with the architecture before any tensor is returned. Pickled checkpoints are
rejected, because unpickling runs their code.

The mapping is private: writing to a tensor would copy its page and leave the file unchanged.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.fp8_config import SCALE_NAMES, UNUSED_SCALES
from planish.model.architecture.hf_config.json_fields import read_json
from planish.model.architecture.weight_shapes import expected_shapes

if TYPE_CHECKING:  # importing torch takes seconds, and commands that list models do not need it
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 128 << 20
FLOAT_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPE = "F8_E4M3"
_SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0")
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""The prefixes of the text model's tensors in a multimodal checkpoint, with their replacements."""
VISION_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.")
"""The beginnings of the names of a vision tower's tensors, after "model." in some checkpoints."""
_SKIPPED_PREFIXES = tuple(
    f"{outer}{part}" for outer in ("", "model.") for part in (*VISION_PARTS, "mtp.")
)
"""The prefixes of tensors that a text model does not need."""
_NUM_HASHED_BLOCKS = 64
_HASHED_BLOCK_BYTES = 4096
_log = logging.getLogger(__name__)


def load_weights(directory: str | Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of `expected_shapes(config)` by Hugging Face name, memory-mapped on CPU.

    The tensors of a model of model/hf are those of the files, and transformers checks them when it
    loads the model. `lm_head.weight` is absent if the head is tied. The text model's tensors in a multimodal
    checkpoint get the names of a text model, and all other tensors are skipped. A weight in fp8,
    such as "model.layers.0.mlp.up_proj.weight", is float8_e4m3fn, and its scales are in the result
    under `scale_name` of its name.

    Raises UnknownModelError (no weights), UnsupportedError (pickled or quantized weights), or
    DamagedFileError (a truncated file, or tensors that are missing, unexpected or of the wrong
    shape).
    """
    directory = Path(directory)
    if (directory / SINGLE_FILE).is_file() and (directory / INDEX_FILE).is_file():
        _log.warning(
            "%s: %s is read, as in transformers, and not the files that %s names; remove one of "
            "the two",
            directory,
            SINGLE_FILE,
            INDEX_FILE,
        )
    with ExitStack() as stack:
        handles = {
            file: stack.enter_context(_open_safetensors(directory / file))
            for file in weight_files(directory)
        }
        if config.hf is not None:
            return {
                name: _StoredTensor(handle, name).load()
                for handle in handles.values()
                for name in handle.keys()  # noqa: SIM118 - a handle is no mapping
            }
        tensors = _stored_tensors(directory, handles, config)
        is_under_other_name = config.tied_head and "model.embed_tokens.weight" not in tensors
        if is_under_other_name and "lm_head.weight" in tensors:
            # Some programs store a shared tensor under its last name.
            tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
        scales = _pop_scales(directory, config, tensors)
        _check_names_and_shapes(directory, config, tensors)
        _check_scales(directory, config, tensors, scales)
        weights = {name: tensors[name].load() for name in expected_shapes(config)}
        weights |= {scale_name(name): stored.load() for name, stored in scales.items()}
        if config.tied_head and "lm_head.weight" in tensors:
            _check_tied_head(directory, weights, tensors["lm_head.weight"].load())
    return weights


def weight_files(directory: str | Path) -> list[str]:
    """Return the names of a model directory's safetensors files.

    A single file takes precedence over an index. Raises UnknownModelError if there are no weights,
    UnsupportedError if the weights are pickled, and DamagedFileError if the index is damaged.
    """
    directory = Path(directory)
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    if (directory / INDEX_FILE).is_file():
        return sorted(set(_weight_map(directory).values()))
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in directory.glob(pattern))
    if pickles:
        raise UnsupportedError(
            f"{directory} has pickled weights ({pickles[0]}), which planish never loads, because "
            "unpickling runs code; convert them to safetensors: "
            "AutoModelForCausalLM.from_pretrained(PATH).save_pretrained(NEW_PATH)"
        )
    raise UnknownModelError(
        f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}; finish the download"
    )


def weights_fingerprint(directory: Path) -> str:
    """Return a hash, in 16 hexadecimal digits, of blocks spread evenly over the weight files.

    Hashing everything would take a minute for a large model. A sample suffices, because two trained
    models differ in nearly every block.
    """
    digest = hashlib.sha256()
    for name in weight_files(directory):
        with open(directory / name, "rb") as file:
            size = file.seek(0, 2)
            digest.update(size.to_bytes(8, "little"))
            for block in range(_NUM_HASHED_BLOCKS):
                file.seek(max(0, size - _HASHED_BLOCK_BYTES) * block // (_NUM_HASHED_BLOCKS - 1))
                digest.update(file.read(_HASHED_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedFileError(
            f"{directory / INDEX_FILE} has no weight_map; copy it from the model again"
        )
    # The index was downloaded, so a name in it must not point outside the directory.
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise DamagedFileError(
                f"{directory / INDEX_FILE} names {file!r}, which must be a file name without a "
                "directory; download the index again"
            )
    for file in set(weight_map.values()):
        if not (directory / file).is_file():
            raise DamagedFileError(
                f"{directory / file} is missing, but {INDEX_FILE} names it; finish the download"
            )
    return weight_map


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it cannot be mapped
        raise DamagedFileError(
            f"{path} cannot be read ({error}): the file is truncated or damaged. Download it again"
        ) from error


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor of an open safetensors file, or one expert's part of it."""

    handle: Any
    name: str
    """The tensor's name in the file."""
    expert: int | None = None
    """The index of the expert in a tensor with the weights of all experts."""
    row_range: tuple[int, int] | None = None
    """The first row of the expert's part, and the row after its last one; None for all rows."""
    is_transposed: bool = False
    """Whether the stored matrix is (in, out)."""

    def load(self) -> torch.Tensor:
        """Return the tensor, memory-mapped."""
        tensor: torch.Tensor = self.handle.get_tensor(self.name)
        if self.expert is not None:
            tensor = tensor[self.expert]
        if self.is_transposed:
            tensor = tensor.t()
        return tensor if self.row_range is None else tensor[slice(*self.row_range)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        shape = list(self.handle.get_slice(self.name).get_shape())
        if self.expert is not None:
            shape = shape[1:]
        if self.is_transposed:
            shape.reverse()
        if self.row_range is not None:
            shape[0] = self.row_range[1] - self.row_range[0]
        return tuple(shape)

    @property
    def dtype(self) -> str:
        """The dtype in which the tensor is stored, as safetensors names it."""
        return str(self.handle.get_slice(self.name).get_dtype())


def _split_by_expert(name: str, stored: _StoredTensor) -> Iterator[tuple[str, _StoredTensor]]:
    """Yield a tensor, or its part for each expert, under the names of `expected_shapes`.

    In checkpoints on the hub, each expert has its own tensors. transformers 5 instead stores two
    tensors for all experts of a layer: gate_up_proj [experts, 2 * inner, hidden] and down_proj
    [experts, hidden, inner]. This function splits them.
    """
    layer, separator, linear = name.rpartition(".experts.")
    if not separator or linear not in ("gate_up_proj", "down_proj") or len(stored.shape) != 3:
        yield name, stored
        return
    num_experts, num_rows, _ = stored.shape
    for expert in range(num_experts):
        prefix = f"{layer}.experts.{expert}."
        if linear == "down_proj":
            yield f"{prefix}down_proj.weight", replace(stored, expert=expert)
            continue
        for projection, row_range in (
            ("gate", (0, num_rows // 2)),
            ("up", (num_rows // 2, num_rows)),
        ):
            yield (
                f"{prefix}{projection}_proj.weight",
                replace(stored, expert=expert, row_range=row_range),
            )


_BIASED_EXPERT_PARTS = {
    f"{linear}_proj{suffix}": f"{linear}_proj{expert_suffix}"
    for linear in ("gate_up", "down")
    for suffix, expert_suffix in (
        ("", ".weight"),
        ("_bias", ".bias"),
        ("_blocks", ".blocks"),
        ("_scales", ".scales"),
    )
}
"""Maps the names of gpt-oss's tensors, each for all experts of a layer, to the names of one
expert's parts in `expected_shapes`.
"""


def _split_by_biased_expert(
    name: str, stored: _StoredTensor
) -> Iterator[tuple[str, _StoredTensor]]:
    """Yield a tensor of gpt-oss, or its part for each expert, under the names of `expected_shapes`.

    The matrices in bf16 are [experts, in, out]. Those in mxfp4 are [experts, out, blocks, ...].
    """
    layer, separator, part = name.rpartition(".experts.")
    if not separator or part not in _BIASED_EXPERT_PARTS:
        yield name, stored
        return
    expert_part = _BIASED_EXPERT_PARTS[part]
    is_matrix = expert_part.endswith(".weight") and len(stored.shape) == 3
    for expert in range(stored.shape[0]):
        yield (
            f"{layer}.experts.{expert}.{expert_part}",
            replace(stored, expert=expert, is_transposed=is_matrix),
        )


def _stored_tensors(
    directory: Path, handles: Mapping[str, Any], config: ModelConfig
) -> dict[str, _StoredTensor]:
    """Return the stored tensors of the text model by name, without the prefixes of a multimodal
    checkpoint.

    Raises DamagedFileError if two files contain the same tensor.
    """
    tensors: dict[str, _StoredTensor] = {}
    split_experts = _split_by_biased_expert if config.expert_biases else _split_by_expert
    skipped: list[str] = []
    for file, handle in handles.items():
        stored_names: list[str] = handle.keys()
        for stored_name in stored_names:
            if stored_name.startswith(_SKIPPED_PREFIXES):
                skipped.append(stored_name)
                continue
            for name, tensor in split_experts(
                text_model_name(stored_name), _StoredTensor(handle, stored_name)
            ):
                if name in tensors:
                    raise DamagedFileError(
                        f"{directory / file} contains {name}, which another file contains too; "
                        "download the model again"
                    )
                tensors[name] = tensor
    if skipped:
        _log.info(
            "%s: skipped %d tensors that the text model does not need (%s and others)",
            directory,
            len(skipped),
            skipped[0],
        )
    return tensors


def scale_name(weight_name: str) -> str:
    """Return the name of the scales of a weight in fp8 in the result of `load_weights`."""
    return f"{weight_name}_scale"


def _pop_scales(
    directory: Path, config: ModelConfig, tensors: dict[str, _StoredTensor]
) -> dict[str, _StoredTensor]:
    """Remove the scales of an fp8 checkpoint from `tensors`, and return them by their weight's
    name.

    Scales that planish does not use are only removed.
    """
    scales: dict[str, _StoredTensor] = {}
    if config.fp8 is None:
        return scales
    for name in list(tensors):
        module, _, part = name.rpartition(".")
        if part in SCALE_NAMES:
            weight = f"{module}.weight"
            if weight in scales:
                raise DamagedFileError(
                    f"{directory} has two kinds of scales for {weight}; download the model again"
                )
            scales[weight] = tensors.pop(name)
        elif part in UNUSED_SCALES:
            del tensors[name]
    return scales


def _check_scales(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, _StoredTensor],
    scales: Mapping[str, _StoredTensor],
) -> None:
    """Raise an error unless exactly the weights in fp8 have scales, of a shape that fits."""
    fp8_names = {name for name, stored in tensors.items() if stored.dtype == FP8_DTYPE}
    for name in sorted(fp8_names.symmetric_difference(scales)):
        problem = "is fp8 but has no scales" if name in fp8_names else "has scales but is not fp8"
        raise DamagedFileError(f"{name} in {directory} {problem}; download the model again")
    for name, scale in scales.items():
        if scale.dtype not in _SCALE_DTYPES:
            raise UnsupportedError(
                f"the scales of {name} in {directory} are {scale.dtype}; planish reads "
                f"{', '.join(_SCALE_DTYPES)}. Use another fp8 checkpoint or the unquantized one"
            )
        fan_out, fan_in = tensors[name].shape
        allowed = [(), (1,), (1, 1), (fan_out,), (fan_out, 1)]
        block = config.fp8.block if config.fp8 is not None else None
        if block is not None:
            block_grid = (-(-fan_out // block[0]), -(-fan_in // block[1]))
            allowed += [block_grid, (block_grid[0], 1, block_grid[1], 1)]
        if scale.shape not in allowed:
            raise UnsupportedError(
                f"the scales of {name} in {directory} have the shape {scale.shape}; planish reads "
                f"{', '.join(map(str, allowed))} for a weight ({fan_out}, {fan_in}). Use another "
                "fp8 checkpoint or the unquantized one"
            )


def text_model_name(checkpoint_name: str) -> str:
    """Return the name of a tensor or module without the prefix of a multimodal model.

    `checkpoint_name`: its name in a multimodal or text model.
    """
    for prefix, replacement in _TEXT_PREFIXES.items():
        if checkpoint_name.startswith(prefix):
            return replacement + checkpoint_name[len(prefix) :]
    return checkpoint_name


def _check_names_and_shapes(
    directory: Path, config: ModelConfig, tensors: Mapping[str, _StoredTensor]
) -> None:
    expected = expected_shapes(config)
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.tied_head:
        ignored.add("lm_head.weight")
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected and name not in ignored]
    present = {name: tensors[name] for name in expected if name in tensors}
    wrong_shape = [
        f"{name} is {stored.shape}, not {expected[name]}"
        for name, stored in present.items()
        if stored.shape != expected[name]
    ]
    problems = [
        f"{problem}: {', '.join(names[:5])}"
        f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for problem, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of the wrong shape", wrong_shape),
        )
        if names
    ]
    if problems:
        raise DamagedFileError(
            f"the weights in {directory} do not match its config.json ({config.family}); "
            f"{'; '.join(problems)}. Download the weights and config.json of one model"
        )
    for name, stored in present.items():
        if name.endswith((".blocks", ".scales")):
            if stored.dtype != "U8":
                raise UnsupportedError(f"{name} in {directory} is {stored.dtype}; mxfp4 needs U8")
        elif stored.dtype not in (*FLOAT_DTYPES, *((FP8_DTYPE,) if config.fp8 else ())):
            raise UnsupportedError(
                f"{name} in {directory} is stored as {stored.dtype}; planish loads only "
                f"{', '.join(FLOAT_DTYPES)}. Use the unquantized checkpoint"
            )


def _check_tied_head(
    directory: Path, weights: Mapping[str, torch.Tensor], head: torch.Tensor
) -> None:
    # Versions of transformers disagree on whether such a head is used, so reject it.
    if not head.equal(weights["model.embed_tokens.weight"]):
        raise UnsupportedError(
            f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from the "
            "embedding. Set tie_word_embeddings to false in config.json if the model has its own "
            "head; otherwise remove lm_head.weight"
        )
