"""A pretended GPU on the CPU, which rejects what a GPU rejects because of devices or capture.

All tensors are on the CPU. A storage is marked if it is created with device="cuda" or from marked
storages, and the `device` of a marked tensor is the GPU. The pretended GPU rejects operations that
mix marked and plain tensors, numpy() of marked tensors, kernels on plain tensors, and everything
that waits for the device during a capture. It applies to the thread that enters `pretended_gpu` and
to the backward passes of that thread.

Asynchronous copies are done when the host has waited for the device, or for an event after them. A
copy to the host has wrong values until then. The source of a copy to the GPU must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from planish.engine import base_models
from planish.engine.sampling.cuda_graph_runner import DecodeStep, GraphRecorder
from planish.engine.sampling.sampler import Sampler
from planish.engine.training import trainer
from planish.model.hf import decoder as hf_decoder
from planish.model.kernels.self_test.verdicts import Verdict
from planish.model.kernels.triton import common
from planish.model.kernels.triton.families import FAMILIES
from planish.model.layers.quantization import dynamic_values, four_bit_values, mxfp4_scales

GPU = torch.device("cuda", 0)
WAITING = (
    "tolist",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "unique_consecutive",
)
INTERPRETED = ("choose_kernel", "sort_kernel")
"""Kernels that are interpreted even if there is an observer, because the number of later launches
may depend on their results.
"""
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided")
"""Functions that return memory without a value."""


class RefusedError(Exception):
    """An operation that a GPU would reject."""


class Observer(Protocol):
    """What sees the work of the pretended GPU. With an observer only kernels of INTERPRETED are
    interpreted. The results of the others are random numbers, so that a pass takes a fraction of a
    second.
    """

    def operation(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """An operation of torch with inputs or results on the GPU, views included."""

    def launch(self, kernel: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A launch of a Triton kernel."""


class Marks:
    """The storages on the pretended GPU, and whether a capture is running."""

    observer: Observer | None = None

    def __init__(self) -> None:
        # The references also keep the addresses from being used again.
        self.known_storages: dict[int, StorageWeakRef] = {}
        self.is_recording = False
        self.waited: list[str] = []
        """Names of the operations that waited for the device."""
        self.copies: list[_Copy] = []
        """The asynchronous copies that may not be done yet."""

    def has(self, x: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return x.untyped_storage()._cdata in self.known_storages

    def put(self, made: Any) -> Any:
        for x in tensors(made):
            with torch._C.DisableTorchFunction():
                storage = x.untyped_storage()
                self.known_storages.setdefault(storage._cdata, StorageWeakRef(storage))
        return made

    def wait(self, what: str) -> None:
        self.refuse_while_recording(what)
        self.waited.append(what)
        self.finish(self.copies)

    def finish(self, copies: Sequence[_Copy]) -> None:
        """Do the asynchronous copies among `copies` that are not done yet."""
        done = set(copies).intersection(self.copies)
        finished = [copy for copy in self.copies if copy in done]
        self.copies = [copy for copy in self.copies if copy not in done]
        for copy in finished:
            copy.finish()

    def refuse_while_recording(self, what: str) -> None:
        if self.is_recording:
            raise RefusedError(f"{what} while a step is recorded")


class _Copy:
    """An asynchronous copy between the host and the pretended GPU."""

    def __init__(self, on_host: Tensor, value: Tensor, is_upload: bool) -> None:
        """`value`: what `on_host` has when the copy is done."""
        self._on_host, self._value, self._is_upload = on_host, value, is_upload

    def finish(self) -> None:
        # Only in this mode may inference tensors change.
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            if not self._is_upload:
                self._on_host.copy_(self._value)
            elif not torch.equal(self._on_host, self._value):
                raise RefusedError("the source of an asynchronous copy was changed before its end")


class _Event:
    """A CUDA event. Waiting for it counts if copies to the host were not done."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._copies: list[_Copy] = []

    def record(self, stream: Any = None) -> None:
        self._copies = [*self._marks.copies]

    def synchronize(self) -> None:
        if any(copy in self._marks.copies and not copy._is_upload for copy in self._copies):
            self._marks.refuse_while_recording("synchronize")
            self._marks.waited.append("synchronize")
        self._marks.finish(self._copies)


def tensors(given: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


class _Functions(TorchFunctionMode):
    """Tracks where tensors are created and moved, and what `device` returns."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        marks, kwargs, name = self._marks, dict(kwargs or {}), getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], Tensor) else None
        is_marked = own is not None and marks.has(own)
        asked = func.__self__.__name__ if name == "__get__" else ""
        if asked == "device":
            return GPU if is_marked else torch.device("cpu")
        if asked == "is_cuda":
            return is_marked
        if is_marked and name in ("numpy", "pin_memory"):
            raise RefusedError(f"{name} of what is on a GPU")
        if is_marked and name in WAITING:
            marks.wait(name)
        if own is not None and name in ("to", "cpu"):
            return self._moved(func, own, name, args[1:], kwargs)
        if name == "pin_memory":
            marks.refuse_while_recording(name)
            return own.clone()  # type: ignore[union-attr]
        kwargs.pop("pin_memory", None)
        place = kwargs.pop("device", None)
        made = func(*args, **kwargs)
        if marks.observer is not None and name in ALLOCATIONS:
            _fill(made)
        if (place is not None and torch.device(place) == GPU) or (
            is_marked and name == "new_tensor"
        ):
            if name in ("tensor", "new_tensor"):
                marks.wait(name)
            marks.put(made)
            if marks.observer is not None and own is None and name not in ALLOCATIONS:
                marks.observer.operation(func, [], tensors(made))
        return made

    def _moved(
        self, func: Any, own: Tensor, name: str, args: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        places = [
            torch.device(x)
            for x in (*args, kwargs.pop("device", None))
            if isinstance(x, torch.device | str)
        ]
        others = [x for x in args if isinstance(x, torch.dtype | Tensor)]
        waits = not (kwargs.pop("non_blocking", False) or any(x is True for x in args))
        here = self._marks.has(own)
        there = places[0].type == "cuda" if places else here and name != "cpu"
        if here != there:
            (self._marks.wait if waits else self._marks.refuse_while_recording)(name)
        moved = func(own, *others, **kwargs) if others or kwargs else own
        if here == there:
            return moved
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            moved = moved.clone()
            if not waits and not there:
                self._marks.copies.append(_Copy(moved, moved.clone(), is_upload=False))
                moved.fill_(-77)
        if self._marks.observer is not None:
            self._marks.observer.operation(torch.ops.aten.copy_.default, [own], [moved])
        return self._marks.put(moved) if there else moved


class _Operations(TorchDispatchMode):
    """Checks the devices of the inputs of each operation."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        marks, name = self._marks, func._schema.name.removeprefix("aten::")
        given = tensors((args, kwargs))
        on_gpu = [x for x in given if marks.has(x)]
        elsewhere = [x for x in given if not marks.has(x)]
        if on_gpu and any(x.dim() for x in elsewhere):
            into = (
                "index" in name
                and marks.has(args[0])
                and all(x.dtype in (torch.int64, torch.bool) for x in elsewhere)
            )
            if name != "copy_" and not into:
                raise RefusedError(
                    f"{func} of {[tuple(x.shape) for x in elsewhere]} on the CPU and others on a "
                    "GPU"
                )
            if name == "copy_" and args[2:] == (True,):
                marks.refuse_while_recording(name)
                if marks.has(args[0]):
                    with _disable_current_modes(), torch._C.DisableTorchFunction():
                        marks.copies.append(_Copy(args[1], args[1].clone(), is_upload=True))
            else:
                marks.wait(name)
        if name == "_local_scalar_dense" and on_gpu:
            marks.wait(name)
        if func in (
            torch.ops.aten.mm.dtype,
            torch.ops.aten.bmm.dtype,
        ):  # a CPU has no such property
            assert on_gpu
            assert (args[0].dtype, args[1].dtype, args[2]) == (
                torch.bfloat16,
                torch.bfloat16,
                torch.float32,
            )
            return marks.put(args[0].float() @ args[1].float())
        made = func(*args, **(kwargs or {}))
        if on_gpu:
            marks.put([x for x in tensors(made) if not any(x is other for other in elsewhere)])
            if marks.observer is not None:
                if name in ALLOCATIONS:
                    _fill(made)
                marks.observer.operation(func, given, tensors(made))
        return made


def _fill(made: Tensor) -> None:
    """Fill new memory, in the place of the kernels that are not interpreted."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if made.is_floating_point():
            made.uniform_(-0.1, 0.1)
        else:
            made.zero_()


@contextmanager
def pretended_gpu(patch: pytest.MonkeyPatch) -> Iterator[Marks]:
    marks = Marks()
    patch_cuda(patch)
    patch.setattr(torch.cuda, "Event", lambda: _Event(marks))
    # Tables that an earlier test has cached are on the CPU.
    for table in (four_bit_values, dynamic_values, mxfp4_scales):
        table.cache_clear()
    patch.setattr(common, "shared_memory", lambda _: common.HOPPER_SHARED)
    passed = [Verdict(family, True) for family in FAMILIES]
    patch.setattr(base_models, "check_kernels", lambda *_: passed)
    patch.setattr(GraphRecorder, "record", lambda _, step: recorded(marks, step))
    # Interpreted, the sampling of a few tokens takes seconds, and the graphs of all sizes minutes.
    patch.setattr(base_models, "warn_of_difference", lambda *_: None)
    patch.setattr(base_models, "measure_difference", lambda *_: 0.0)
    patch.setattr(Sampler, "record_cuda_graphs", lambda _: None)
    interpret, load = InterpretedFunction.run, hf_decoder.load_model

    def load_on_cpu(*args: Any) -> Any:
        # transformers creates models on torch's meta device, which _Functions does not know.
        with _pop_mode_temporarily(), _disable_current_modes():
            return load(*args)

    patch.setattr(hf_decoder, "load_model", load_on_cpu)

    def run(kernel: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        if not all(marks.has(x) for x in tensors((args, kwargs))):
            raise RefusedError(f"kernel {kernel.fn.__name__} over what is on the CPU")
        assert all(size <= 65_535 for size in grid[1:])
        if marks.observer is not None:
            marks.observer.launch(kernel, args, kwargs)
            if kernel.fn.__name__ not in INTERPRETED:
                return None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return interpret(kernel, *args, grid=grid, **kwargs)

    def tracked(function: Any) -> Any:
        """Return a function that runs in the mode also within an operation or a backward pass."""

        def call(*args: Any) -> Any:
            with nullcontext() if _get_current_function_mode_stack() else _Functions(marks):
                return function(*args)

        return call

    def saved_on_cpu(**options: Any) -> saved_tensors_hooks:
        hooks = save_on_cpu(**options)
        return saved_tensors_hooks(tracked(hooks.pack_hook), tracked(hooks.unpack_hook))

    patch.setattr(InterpretedFunction, "run", run)
    patch.setattr(BackwardCFunction, "apply", tracked(BackwardCFunction.apply))
    patch.setattr(trainer, "save_on_cpu", saved_on_cpu)
    with _Operations(marks), _Functions(marks):
        yield marks


def recorded(marks: Marks, step: DecodeStep) -> DecodeStep:
    """Do the same as GraphRecorder.record; a launch computes the step again."""

    def computed() -> tuple[Tensor, Tensor]:
        marks.is_recording = True
        try:
            return step()
        finally:
            marks.is_recording = False

    step()
    out = computed()

    def launch() -> tuple[Tensor, Tensor]:
        for kept, made in zip(out, computed(), strict=True):
            kept.copy_(made)
        return out

    return launch


def patch_cuda(patch: pytest.MonkeyPatch) -> None:
    idle = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    facts = SimpleNamespace(multi_processor_count=1)
    found: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda _: facts,
        "mem_get_info": lambda _: (1 << 30, 1 << 30),
        "get_device_capability": lambda _: (9, 0),
        "set_device": lambda _: None,
        "current_stream": lambda _: idle,
        "Event": lambda: idle,
        "Stream": lambda _: idle,
        "synchronize": lambda _: None,
    }
    for name, value in found.items():
        patch.setattr(torch.cuda, name, value)
