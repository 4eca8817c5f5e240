"""A backend whose operations are compared with torch in float64, for the check of kernels.

`Comparison.backend` computes each operation of the decoder with the kernels under test. It also
computes the operation with the reference implementation, in float64, from the same inputs. So a
difference is the error of this one operation, and the tolerance can be close to its rounding. The
results of both are compared, and so are the arguments that the operation changes in place.

Operations that return an object, such as an `Attend`, return a pair of the two objects, whose calls
are compared too. In the backward pass, the gradients of attention and recurrence are compared.
"""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import ExactLogits
from planish.model.kernels.self_test.process import WrongResultError
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import HeadAdapterRange, LayerLora, LoraMatrices, LoraWeights
from planish.model.layers.quantization import QuantizedWeight
from planish.model.layers.recurrence import RecurrentState
from planish.model.sequences.kv_cache import KVPool, KVPools

TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 2e-4, torch.float64: 2e-4}
"""The maximum difference of one element, by the dtype of the result.

It is relative to the largest magnitude in the reference.
"""
_MEAN_TOLERANCE = {torch.bfloat16: 0.0067, torch.float32: 4e-5, torch.float64: 4e-5}
"""The maximum root mean square of all differences.

It is relative to the root mean square of the reference. For comparison: rounding the output to bf16
gives 0.0017, and two more roundings of intermediate results give 0.003.
"""
_GRADIENT_FACTOR = 2
"""The factor of the tolerances for gradients of the attention, whose weights are rounded too."""
_SINKS_FACTOR = 2
"""The factor of these tolerances for models with attention sinks. A sink makes the gradients of
scores smaller, but not their error, which comes from the rounding of the output.
"""
_UNCOMPARED = ("can_pack", "packs_dequantized", "packed_adapter_sizes", "can_stack", "pack_adapter")
"""Operations that do not compute."""
_IN_PLACE = (
    "add_lora_",
    "lora_backward_",
    "log_sum_exp",
    "log_sum_exp_backward_",
    "add_",
    "add_single_",
    "top_logits",
    "filter_",
    "__call__",
)
"""Operations that change arguments. "__call__" is that of an `Attend`, which stores keys and
values.
"""
_ROW_BY_ROW = (
    "matmul",
    "add_lora_",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "swiglu",
    "swiglu_backward",
    "geglu",
    "geglu_backward",
    "clamped_swiglu",
    "clamped_swiglu_backward",
    "log_sum_exp",
)
"""Operations whose result for a row must not depend on the other rows, if a backend is
batch-invariant.
"""


def compare(
    what: str,
    actual: Tensor,
    reference: Tensor,
    factor: float = 1.0,
    *,
    dtype: torch.dtype | None = None,
    exact: bool = False,
) -> None:
    """Raise WrongResultError if `actual` and `reference` differ by more than rounding errors.

    `what` names the result in the error message. `factor`: the factor of the tolerances. `dtype`:
    the dtype that the tolerances belong to; None: that of `actual`. Integers must be equal, and
    with `exact` all numbers.
    """
    if reference.shape == (*actual.shape, 1):  # the scale of a norm
        reference = reference.squeeze(-1)
    if actual.shape != reference.shape:
        raise WrongResultError(f"{what}: {tuple(actual.shape)} for {tuple(reference.shape)}")
    if exact or not actual.is_floating_point():
        num_wrong = int((actual != reference).sum())
        if num_wrong:
            raise WrongResultError(f"{what}: {num_wrong} of {actual.numel()} entries are wrong")
        return
    if not actual.numel():
        return
    expected = reference.detach().double()
    difference = (actual.detach().double() - expected).abs_()
    largest, scale = float(difference.max()), max(float(expected.abs().max()), 1e-30)
    mean, mean_scale = _rms(difference), max(_rms(expected), 1e-30)
    dtype = actual.dtype if dtype is None else dtype
    tolerance, mean_tolerance = factor * TOLERANCE[dtype], factor * _MEAN_TOLERANCE[dtype]
    if not (largest <= tolerance * scale and mean <= mean_tolerance * mean_scale):
        raise WrongResultError(
            f"{what} differs from torch: the largest difference is {largest / scale:.2g} of the "
            f"largest value, and the mean one {mean / mean_scale:.2g} of the mean value; "
            f"{tolerance:.2g} and {mean_tolerance:.2g} are allowed"
        )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


class Comparison:
    """The pairs of objects of a backend under test and of its reference implementation."""

    def __init__(
        self,
        tested: Backend,
        reference: Backend,
        parts: Collection[str],
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        """`parts`: the names of the parts that are compared, fields of `Parts`.

        `reference`: computes in float64. `is_batch_invariant`: whether to check that, too.
        """
        self.reference, self._is_batch_invariant = reference, is_batch_invariant
        self._linears: dict[int, tuple[PackedLinear, PackedLinear]] = {}
        """The linears under test by their id, each with the same linear in float64."""
        self.compared_parts = parts
        pairs = {}
        for name in {"matmuls", *parts}:
            part, reference_part = getattr(tested.parts, name), getattr(reference.parts, name)
            # torch's recurrence computes in float32 even with wider inputs.
            dtype = torch.float32 if name == "recurrences" else torch.float64
            pairs[name] = Pair(self, part, reference_part, dtype)
        self.backend = tested.with_parts(replace(tested.parts, **pairs))
        """The backend under test, with compared operations."""

    def call(
        self, pair: Pair, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Call an operation of both objects of a pair, and compare. Return the tested result."""
        given = (arguments, options)
        differentiates = name == "__call__" and torch.is_grad_enabled()
        wide = _Widening(self._linears, pair.dtype, keeps_grad=differentiates)(given)
        alone = self._single_row(name, given)
        tested, reference = getattr(pair.tested, name), getattr(pair.reference, name)
        if name == "rms_norm_backward":
            reference = self._rms_norm_backward
        tested_given = _unpaired(given)
        found = tested(*tested_given[0], **tested_given[1])
        expected: Any
        if name == "top_logits":
            expected = self._expected_top_logits(found[0], wide)
        else:
            expected = reference(*wide[0], **wide[1])
        if isinstance(found, PackedLinear):
            self._linears[id(found)] = (found, expected)
            return found
        if name == "head_adapters":
            _share_lora_hidden(given[0][0], found, expected)
        if found is not None and not list(_tensors(found)):
            return Pair(self, found, expected, pair.dtype, (given, wide))
        what = pair.name if name == "__call__" else name
        # The gradients of A and B are float32 sums of products that are rounded.
        dtype = self.backend.dtype if name == "lora_backward_" else None
        _compare_all(what, found, expected, dtype=dtype)
        if name in _IN_PLACE:
            _compare_all(f"{what} (in place)", given, wide)
        if name == "__call__":
            _compare_all(f"{what} (stored)", *pair.states)
        if alone is not None:
            self._compare_row(name, tested, alone, (found, given))
        if differentiates and isinstance(found, Tensor) and found.requires_grad:
            factor = _SINKS_FACTOR if self.reference.config.attention_sinks else 1
            _compare_gradients(what, found, expected, given, wide, factor)
        return found

    def _single_row(self, name: str, given: Any) -> Any:
        """Return a copy of the arguments for the row in the middle of the batch, or None."""
        if not self._is_batch_invariant or name not in _ROW_BY_ROW:
            return None
        # torch computes what has no kernel.
        operands = given[0]
        if name == "matmul" and not operands[1].is_batch_invariant:
            return None
        if name == "add_lora_" and operands[3].packed is None:
            return None
        num_rows = len(next(_tensors(given)))
        row = num_rows // 2

        def select(x: Tensor) -> Tensor:
            return x[row : row + 1].clone() if x.ndim and len(x) == num_rows else x

        return _map(_unpaired(given), select)

    def _compare_row(self, name: str, tested: Callable[..., Any], alone: Any, batch: Any) -> None:
        found = tested(*alone[0], **alone[1])
        num_rows = len(next(_tensors(batch[1])))
        row = num_rows // 2
        in_batch = batch if name in _IN_PLACE else batch[0]
        of_row = (found, alone) if name in _IN_PLACE else found
        for actual, whole in zip(_tensors(of_row), _tensors(in_batch), strict=True):
            if len(whole) == num_rows and not torch.equal(actual, whole[row : row + 1]):
                raise WrongResultError(f"{name}: a row's bits depend on the other rows")

    def _rms_norm_backward(
        self, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
    ) -> Tensor:
        """Do the same as `Norms.rms_norm_backward`, for a scale with or without a last dimension."""
        scale = scale.view(*total.shape[:-1], 1)
        return self.reference.rms_norm_backward(grad, total, weight, scale, grad_total)

    def _expected_top_logits(self, tokens: Tensor, wide: Any) -> ExactLogits:
        """Return the result of `Head.top_logits` with these tokens; change its output in place.

        The order of equal logits is open. So `tokens` are those that were found, and only their
        rounded logits are compared with the largest ones.
        """
        (hidden, head, adapters, logits, k, *outputs), options = wide
        if bool(((tokens < 0) | (tokens >= logits.shape[1])).any()):
            raise WrongResultError("top_logits: a token is outside of the vocabulary")
        compare("top_logits", logits.gather(1, tokens), logits.topk(k).values, exact=True)
        rows = torch.arange(len(hidden), device=hidden.device).repeat_interleave(k)
        operands = (hidden, head, adapters, rows, tokens.flatten())
        exact_logits = self.reference.token_logits(*operands).view(tokens.shape)
        for output in (*outputs, *options.values()):
            if output is not None:
                output.copy_(logits).scatter_(1, tokens, exact_logits)
        return tokens, exact_logits


class Pair:
    """An object under test and its reference, whose operations are called together."""

    def __init__(
        self,
        comparison: Comparison,
        tested: Any,
        reference: Any,
        dtype: torch.dtype,
        states: tuple[Any, ...] = ((), ()),
    ) -> None:
        """`dtype`: the dtype of the inputs of the reference.

        `states`: what calls of the object change, in both forms, such as the KV cache.
        """
        self._comparison, self.tested, self.reference = comparison, tested, reference
        self.dtype, self.states = dtype, states

    @property
    def name(self) -> str:
        """The name of the object under test, for error messages."""
        return type(self.tested).__name__

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call both objects and compare the results."""
        return self._comparison.call(self, "__call__", arguments, options)

    def __getattr__(self, name: str) -> Any:
        """Return an operation that calls both objects, or any other attribute of the tested one."""
        found = getattr(self.tested, name)
        if not callable(found) or name in _UNCOMPARED:
            return found
        if (
            name in ("matmul", "matmul_backward")
            and "matmuls" not in self._comparison.compared_parts
        ):
            return found  # Only the linears are needed in both forms.

        def call(*arguments: Any, **options: Any) -> Any:
            return self._comparison.call(self, name, arguments, options)

        return call


def _compare_all(
    what: str, found: Any, expected: Any, factor: float = 1.0, dtype: torch.dtype | None = None
) -> None:
    for actual, reference in zip(_tensors(found), _tensors(expected), strict=True):
        compare(what, actual, reference, factor, dtype=dtype)


def _share_lora_hidden(
    adapter_ranges: Sequence[HeadAdapterRange], found: Any, expected: Any
) -> None:
    """Compare the LoRA hidden states of the head, and give the found ones to the reference.

    They are rounded to the dtype of the model. The logits that are computed from them are float32.
    """
    for start, stop, lora in adapter_ranges:
        actual, reference = (x.hidden[start:stop, : lora.rank] for x in (found, expected))
        compare("x A of the head", actual, reference)
    expected.hidden = found.hidden.to(expected.hidden.dtype)


def _compare_gradients(
    what: str, found: Tensor, expected: Tensor, given: Any, wide: Any, factor: float
) -> None:
    """Compare the gradients of the arguments when the backward pass reaches `found`."""
    inputs, wide_inputs = ([x for x in _tensors(each) if x.requires_grad] for each in (given, wide))

    @torch.enable_grad()
    def compare_gradients(grad: Tensor) -> None:
        handle.remove()  # The gradient below would call this function again.
        # The gradients of scalars: for others, torch first imports sympy, which takes a second.
        scalars = ((found * grad).sum(), (expected * grad).sum())
        actual = torch.autograd.grad(scalars[0], inputs, retain_graph=True)
        reference = torch.autograd.grad(scalars[1], wide_inputs)
        _compare_all(f"gradient of {what}", actual, reference, factor * _GRADIENT_FACTOR)

    handle = found.register_hook(compare_gradients)


class _Widening:
    """A function that copies the arguments of one call for the reference, in a wide dtype.

    Tensors and pools that occur twice are copied once.
    """

    def __init__(
        self,
        linears: dict[int, tuple[PackedLinear, PackedLinear]],
        dtype: torch.dtype,
        *,
        keeps_grad: bool,
    ) -> None:
        self._linears, self._dtype, self._keeps_grad = linears, dtype, keeps_grad
        self._copies: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """Return the copy of a value."""
        return _map(value, self._tensor, self._object)

    def _tensor(self, x: Tensor) -> Tensor:
        if id(x) not in self._copies:
            wide = x.detach().clone()
            if x.is_floating_point():
                wide = wide.to(self._dtype).requires_grad_(self._keeps_grad and x.requires_grad)
            self._copies[id(x)] = wide
        copied: Tensor = self._copies[id(x)]
        return copied

    def _object(self, value: Any) -> Any:
        if isinstance(value, Pair):
            return value.reference
        if isinstance(value, PackedLinear):
            return self._linears[id(value)][1]
        if isinstance(value, QuantizedWeight):
            return value
        if isinstance(value, LoraMatrices):
            return LoraMatrices(self(value.a), self(value.b_matrices))
        if isinstance(value, LayerLora):
            return LayerLora(self(value.modules))
        if isinstance(value, LoraWeights):
            return SimpleNamespace(layers=self(value.layers), head=self(value.head))
        if isinstance(value, KVPool | KVPools | RecurrentState):
            return self._copy(value)
        return _UNKNOWN

    def _copy(self, value: Any) -> Any:
        """Return a copy of an object, with copies of its tensors and pools."""
        if id(value) not in self._copies:
            copied = self._copies[id(value)] = copy.copy(value)
            for name in ("keys", "values", "conv", "matrices", "_pools"):
                if hasattr(value, name):
                    setattr(copied, name, self(getattr(value, name)))
            if isinstance(value, KVPool):
                copied.spec = replace(value.spec, dtype=self._dtype)
        return self._copies[id(value)]


_UNKNOWN = object()


def _map(
    value: Any,
    on_tensor: Callable[[Tensor], Tensor],
    on_object: Callable[[Any], Any] = lambda value: _UNKNOWN,
) -> Any:
    """Return a value with all of its tensors and known objects replaced."""
    if isinstance(value, Tensor):
        return on_tensor(value)
    found = on_object(value)
    if found is not _UNKNOWN:
        return found
    if isinstance(value, tuple | list):
        return type(value)(_map(each, on_tensor, on_object) for each in value)
    if isinstance(value, dict):
        return {key: _map(each, on_tensor, on_object) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type) and list(_tensors(value)):
        changed = {
            field.name: _map(getattr(value, field.name), on_tensor, on_object)
            for field in fields(value)
        }
        return replace(value, **changed)
    return value


def _unpaired(value: Any) -> Any:
    """Return arguments with the objects under test in place of the pairs."""
    if isinstance(value, Pair):
        return value.tested
    if isinstance(value, tuple | list):
        return type(value)(_unpaired(each) for each in value)
    if isinstance(value, dict):
        return {key: _unpaired(each) for key, each in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a value, in the same order for a value and its copy."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, KVPools):
        yield from _tensors([pool for _, pool in sorted(value.pools.items())])
    elif isinstance(value, KVPool):
        yield from (*value.keys, *value.values)
    elif isinstance(value, RecurrentState):
        yield from (value.conv, value.matrices)
    elif isinstance(value, LoraMatrices):
        yield from (value.a, *value.b_matrices)
    elif isinstance(value, LayerLora):
        yield from _tensors(value.modules)
    elif isinstance(value, LoraWeights | SimpleNamespace):
        yield from _tensors((value.layers, value.head))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])
