"""Translate the names and shapes of an adapter's matrices to those of planish's linears.

Programs name the same update differently. These layouts are read:

    model.layers.0.self_attn.q_proj                  PEFT, TRL, Unsloth, vLLM, hosted service
    model.language_model.layers.0....                PEFT and vLLM, for a multimodal base model
    lm_head, model.unembed_tokens                    PEFT; hosted service
    model.layers.0.attn.q_proj                       hosted service, gpt-oss
    ...linear_attn.in_proj_q, _k, _v                 hosted service: rows of in_proj_qkv
    ...mlp.experts, ...mlp.experts.base_layer        PEFT: all experts in one 2-D matrix
    ...mlp.experts.7.gate_proj, .up_proj, .down_proj PEFT with transformers 4, vLLM: one expert
    ...mlp.experts.w1, .w3, .w2                      hosted service: gate, up and down in 3-D

In the hosted service's 3-D layout, A is [experts, rank, in] and B is [experts, out, rank]; a first
dimension of 1 stands for a matrix that all experts share. planish's linears join gate and up, and
q, k and v. The joint A has the rows of the parts' As, and the joint B is block-diagonal, so each
B A keeps its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from planish.errors import CheckpointError, DamagedFileError, UnsupportedError
from planish.export.adapter_config import AdapterConfig
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.linears import (
    fused_modules,
    head_name,
    linear_shape,
    trainable_linears,
)
from planish.model.layers.lora import split_expert_matrices
from planish.model.sources.weights import text_model_name

HEAD = "lm_head"
"""The name of the output head."""
_HEAD_ALIASES = ("model.unembed_tokens", "unembed_tokens", "model.lm_head")
"""Names of the output head in adapters that other programs saved."""
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.(\d{1,6})\.(gate_proj|up_proj|down_proj)")
_HOSTED_EXPERT_NAMES = {
    "mlp.experts.w1": "gate_proj",
    "mlp.experts.w2": "down_proj",
    "mlp.experts.w3": "up_proj",
}
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_IN_PROJ_QKV = "linear_attn.in_proj_qkv"
_DELTA_NET_NAMES = tuple(f"linear_attn.in_proj_{part}" for part in "qkv")
_ALL_ROWS = slice(None)


class StoredMatrix(Protocol):
    """A matrix in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape, without loading it."""
        ...

    def load(self) -> Tensor:
        """Return the matrix in float32."""
        ...


@dataclass(frozen=True)
class StoredPair:
    """The matrices A and B of one module in an adapter's file."""

    a: StoredMatrix
    b: StoredMatrix


@dataclass(frozen=True)
class LoraMatrices:
    """The matrices of one linear layer, float32. B contains the scaling factor."""

    a: Tensor
    """[rank, in]; for the linears of experts [experts, rank, in]."""
    b: Tensor
    """[out, rank]; for the linears of experts [experts, out, rank]."""


@dataclass(frozen=True)
class _Place:
    """The place of a module's matrices in planish's linears."""

    linear: str
    """The linear's name in a `LoraLayout`, such as "model.layers.0.mlp.experts.gate_up_proj"."""
    rows: slice
    """The outputs of the linear that the module computes."""
    expert: int | None = None
    """The index of the expert, for matrices of one expert."""
    layout: Literal["plain", "joint", "hosted"] = "plain"
    """"plain" for 2-D matrices of one linear, "joint" for PEFT's 2-D matrices of all experts,
    "hosted" for 3-D matrices.
    """


@dataclass(frozen=True)
class _Module:
    name: str
    """The module's name in the file."""
    place: _Place
    pair: StoredPair
    rank: int
    """The rank of the module, for experts that of one expert."""

    @property
    def pattern_name(self) -> str:
        """The name that PEFT matches with its patterns."""
        if self.place.layout != "joint":
            return self.name
        parameter = self.place.linear.rpartition(".")[2]
        return f"{self.name.removesuffix('.base_layer')}.{parameter}"


class AdapterReader:
    """Reads the matrices of one adapter for one base model."""

    def __init__(
        self,
        config: AdapterConfig,
        model: ModelConfig,
        file: Path,
        pairs: Mapping[str, StoredPair],
        max_rank: int,
    ) -> None:
        """Check all names and shapes without loading a matrix.

        `file`: the path of the adapter's file, for messages. `pairs`: the stored matrices by the
        module's name in the file, without PEFT's prefix. `max_rank`: the maximum rank of a linear
        after its parts were joined. Raises UnsupportedError for a module that no linear of the
        model corresponds to and for a rank above the maximum, CheckpointError for a shape that does
        not fit the model, and DamagedFileError for matrices that contradict each other or the
        config.
        """
        self._config = config
        self._model = model
        self._file = file
        self._linears = trainable_linears(model)
        self._modules: dict[str, list[_Module]] = {}
        for name, pair in pairs.items():
            place = self._place(name, pair)
            module = _Module(name, place, pair, self._checked_rank(name, place, pair))
            self._check_config(module)
            self._modules.setdefault(place.linear, []).append(module)
        self.ranks: dict[str, int] = {}
        """The rank of each linear."""
        for linear, modules in self._modules.items():
            self._check_overlaps(modules)
            self.ranks[linear] = rank = sum(_ranks(modules).values())
            if rank > max_rank:
                raise UnsupportedError(
                    f"{file}: {linear} has rank {rank}, and rank {rank} is above {max_rank}, the "
                    "most that planish has"
                )

    def read(self, unit: float = 1.0) -> dict[str, LoraMatrices]:
        """Return the matrices by the linear's name in a `LoraLayout`.

        Each B is multiplied by the module's scaling factor divided by `unit`. Raises
        DamagedFileError if a number is not finite.
        """
        return {
            linear: self._join(linear, modules, unit) for linear, modules in self._modules.items()
        }

    def _place(self, module: str, pair: StoredPair) -> _Place:
        if is_head(module) or module == head_name(self._model):
            return _Place(head_name(self._model), _ALL_ROWS)
        name = text_model_name(module)
        match = _LAYER_NAME.fullmatch(name)
        if self._model.hf is not None:
            is_multimodal = self._model.hf.is_multimodal
            place = self._place_of_transformers(module if is_multimodal else name, pair)
            if place is not None:
                return place
        elif match is not None and int(match[1]) < self._model.num_layers:
            place = self._place_in_layer(int(match[1]), match[2], pair)
            if place is not None:
                return place
        remedy = (
            ". The converter of the hosted service gives this name to the matrices of a tied head: "
            "import the adapter as it was downloaded, before the conversion"
            if name.endswith("embed_tokens")
            else ""
        )
        raise UnsupportedError(
            f"{self._file} changes {module}, which has no adapter in planish; its targets are the "
            f"linears of attention and MLP and lm_head of the base model{remedy}"
        )

    def _place_in_layer(self, layer: int, name: str, pair: StoredPair) -> _Place | None:
        """Return the place of a module of a layer, or None if the layer has no such linear."""
        prefix = f"model.layers.{layer}."
        linears = {linear for group in fused_modules(self._model, layer) for linear in group}
        if self._model.family == "gpt_oss" and name.startswith("attn."):
            name = f"self_{name}"
        if name in linears and not name.startswith("mlp.experts."):
            return _Place(prefix + name, _ALL_ROWS)
        if name in _DELTA_NET_NAMES and _IN_PROJ_QKV in linears:
            return _Place(prefix + _IN_PROJ_QKV, self._delta_net_rows(name))
        if _GATE_UP not in linears:
            return None
        if name in ("mlp.experts", "mlp.experts.base_layer"):
            linear = self._linear_of_joint_matrices(pair)
            return _Place(prefix + linear, _ALL_ROWS, layout="joint") if linear else None
        match = _EXPERT_NAME.fullmatch(name)
        if match is not None and int(match[1]) < self._model.num_experts:
            linear, rows = self._rows_of_expert(match[2])
            return _Place(prefix + linear, rows, expert=int(match[1]))
        if name in _HOSTED_EXPERT_NAMES:
            linear, rows = self._rows_of_expert(_HOSTED_EXPERT_NAMES[name])
            return _Place(prefix + linear, rows, layout="hosted")
        return None

    def _place_of_transformers(self, name: str, pair: StoredPair) -> _Place | None:
        """Return the place of a module of a model of model/hf, or None if it has no such linear."""
        layer, _, last = name.removesuffix(".base_layer").rpartition(".")
        if last == "experts":
            for linear in self._linears:
                fits = (*pair.b.shape[:1], *pair.a.shape[-1:]) == self._full_shape(linear)
                if linear.startswith(f"{layer}.experts.") and fits:
                    return _Place(linear, _ALL_ROWS, layout="joint")
            return None
        is_linear = name in self._linears and ".experts." not in name
        return _Place(name, _ALL_ROWS) if is_linear else None

    def _delta_net_rows(self, name: str) -> slice:
        """Return the outputs of in_proj_qkv that in_proj_q, in_proj_k or in_proj_v stands for."""
        delta_net = self._model.delta_net
        assert delta_net is not None
        num_keys = delta_net.num_key_heads * delta_net.key_dim
        ends = (0, num_keys, 2 * num_keys, delta_net.channels)
        index = _DELTA_NET_NAMES.index(name)
        return slice(ends[index], ends[index + 1])

    def _rows_of_expert(self, projection: str) -> tuple[str, slice]:
        """Return the linear of an expert's projection, and the projection's outputs in it."""
        if projection == "down_proj":
            return _DOWN, _ALL_ROWS
        is_up = projection == "up_proj"
        if self._model.expert_biases:  # gpt-oss alternates the outputs of gate and up
            return _GATE_UP, slice(int(is_up), None, 2)
        size = self._model.expert_size
        return _GATE_UP, slice(size, None) if is_up else slice(0, size)

    def _linear_of_joint_matrices(self, pair: StoredPair) -> str | None:
        """Return the linear whose matrices of all experts have these shapes, or None.

        PEFT gives the matrices of the last adapted parameter of a layer's experts the name
        "experts", and those of the one before it "experts.base_layer". So the name does not tell
        which parameter it is.
        """
        for linear in (_GATE_UP, _DOWN):
            if (*pair.b.shape[:1], *pair.a.shape[-1:]) == linear_shape(self._model, linear):
                return linear
        return None

    def _full_shape(self, linear: str) -> tuple[int, int]:
        """Return the shape (out, in) of a linear, for experts that of one expert."""
        if linear == head_name(self._model):
            return self._model.vocab_size, self._model.hidden_size
        layer, name = self._linears[linear]
        return linear_shape(self._model, name, layer)

    def _checked_rank(self, name: str, place: _Place, pair: StoredPair) -> int:
        """Return the rank of a pair. Raises an error unless its shapes fit each other and the
        model.
        """
        shape_a, shape_b = pair.a.shape, pair.b.shape
        num_dims = 3 if place.layout == "hosted" else 2
        if len(shape_a) != num_dims or len(shape_b) != num_dims:
            raise DamagedFileError(
                f"{self._file}: lora_A and lora_B of {name} have the shapes {shape_a} and "
                f"{shape_b}, which need {num_dims} dimensions; download the adapter again"
            )
        rank, rank_of_b = shape_a[-2], shape_b[-1]
        if rank != rank_of_b or rank == 0:
            raise DamagedFileError(
                f"{self._file}: lora_A and lora_B of {name} have the ranks {rank} and {rank_of_b}, "
                "which must be equal and above 0; download the adapter again"
            )
        fan_out, fan_in = self._full_shape(place.linear)
        expected = (len(range(fan_out)[place.rows]), fan_in)
        if (shape_b[-2], shape_a[-1]) != expected:
            raise CheckpointError(
                f"{self._file}: {name} has the shape {(shape_b[-2], shape_a[-1])}, but that linear "
                f"of the base model has the shape {expected}; give the base model that the adapter "
                "was trained on"
            )
        if place.layout == "plain":
            return rank
        num_experts = self._model.num_experts
        if place.layout == "joint" and rank % num_experts == 0:
            return rank // num_experts
        counts = {shape_a[0], shape_b[0]}
        if place.layout == "hosted" and counts <= {1, num_experts} and num_experts in counts:
            return rank
        raise CheckpointError(
            f"{self._file}: lora_A and lora_B of {name} have the shapes {shape_a} and {shape_b}, "
            f"which are not those of {num_experts} experts; give the base model that the adapter "
            "was trained on"
        )

    def _check_config(self, module: _Module) -> None:
        """Raise DamagedFileError unless a module has the rank that the config gives it."""
        expected = self._config.rank_of(module.pattern_name)
        # The hosted service multiplies B A by alpha / r of the config, whatever the experts' rank.
        if module.place.layout != "hosted" and module.rank != expected:
            raise DamagedFileError(
                f"{self._file}: {module.name} lacks a matrix of rank {expected}: lora_A and lora_B "
                f"have rank {module.rank}; download the adapter and its adapter_config.json again"
            )

    def _check_overlaps(self, modules: Sequence[_Module]) -> None:
        """Raise DamagedFileError if two modules of a linear have matrices for the same outputs."""
        owners: dict[int | None, list[_Module]] = {}
        for module in modules:
            place = module.place
            is_shared = ".experts." in place.linear and place.expert is None
            for expert in range(self._model.num_experts) if is_shared else (place.expert,):
                others = owners.setdefault(expert, [])
                for other in others:
                    # The parts of a linear are disjoint unless they are equal or all of it.
                    if other.place.rows in (place.rows, _ALL_ROWS) or place.rows == _ALL_ROWS:
                        raise DamagedFileError(
                            f"{self._file} changes the same outputs of {place.linear} as "
                            f"{other.name} and as {module.name}; give an adapter with one of them"
                        )
                others.append(module)

    def _join(self, linear: str, modules: Sequence[_Module], unit: float) -> LoraMatrices:
        """Return the matrices of a linear, joined from those of its parts."""
        if modules[0].place.rows == _ALL_ROWS and modules[0].place.expert is None:
            return self._load(modules[0], unit)
        leading_dims = (self._model.num_experts,) if ".experts." in linear else ()
        fan_out, fan_in = self._full_shape(linear)
        ranks = _ranks(modules)
        joined = LoraMatrices(
            torch.zeros(*leading_dims, sum(ranks.values()), fan_in),
            torch.zeros(*leading_dims, fan_out, sum(ranks.values())),
        )
        starts = dict(zip(ranks, accumulate([0, *ranks.values()]), strict=False))
        for module in modules:
            matrices, rows = self._load(module, unit), module.place.rows
            start = starts[_rows_key(rows)]
            columns = slice(start, start + module.rank)
            expert = ... if module.place.expert is None else module.place.expert
            joined.a[expert][..., columns, :] = matrices.a
            joined.b[expert][..., rows, columns] = matrices.b
        return joined

    def _load(self, module: _Module, unit: float) -> LoraMatrices:
        """Return the scaled matrices of a module; 3-D if they are those of all experts."""
        a = module.pair.a.load()
        b = module.pair.b.load() * (self._config.scaling_of(module.pattern_name) / unit)
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise DamagedFileError(
                f"{self._file}: {module.name} contains NaN or infinity, or numbers that alpha / "
                "rank makes infinite; give another adapter"
            )
        if module.place.layout == "joint":
            a, b = split_expert_matrices(a, b, self._model.num_experts)
        elif module.place.layout == "hosted":
            a, b = (matrix.expand(self._model.num_experts, -1, -1) for matrix in (a, b))
        return LoraMatrices(a, b)


def is_head(module: str) -> bool:
    """Return whether a module's name in a file is one of the names of the output head."""
    return text_model_name(module) in (HEAD, *_HEAD_ALIASES)


def is_hosted_name(module: str) -> bool:
    """Return whether only the hosted service gives a module this name, except for the head."""
    match = _LAYER_NAME.fullmatch(text_model_name(module))
    return match is not None and (
        match[2].startswith("attn.") or match[2] in (*_HOSTED_EXPERT_NAMES, *_DELTA_NET_NAMES)
    )


def _rows_key(rows: slice) -> tuple[int, int]:
    """Return the first output and the step of `rows`, which tell the parts of a linear apart."""
    return rows.start or 0, rows.step or 1


def _ranks(modules: Iterable[_Module]) -> dict[tuple[int, int], int]:
    """Return the largest rank for each part of a linear, in the order of their first outputs."""
    ranks: dict[tuple[int, int], int] = {}
    for module in modules:
        key = _rows_key(module.place.rows)
        ranks[key] = max(ranks.get(key, 0), module.rank)
    return dict(sorted(ranks.items()))
