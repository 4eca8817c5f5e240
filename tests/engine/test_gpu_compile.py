"""The kernels that real launches specialize compile within their limits (tools/gpu_compile.py)."""

import subprocess
import sys

import gpu_compile
import gpu_counts
import hopper
import pytest
import torch
from hopper import Case, Resources

from planish.testing import CONFIGS

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded without a GPU only")
def test_the_sample_is_within_its_limits():
    done = subprocess.run(
        [sys.executable, gpu_compile.__file__, "--sample"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    kernels = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("sm_90 ")}
    assert set(gpu_compile.WGMMA) <= kernels
    assert {"decode._pieces_kernel", "decode._combine_kernel"} <= kernels


def test_the_recorded_numbers_have_the_compiled_sample():
    recorded = gpu_compile.recorded_numbers()
    assert recorded
    for by_architecture in recorded.values():
        assert {int(number) for number in by_architecture} <= gpu_compile.ARCHITECTURES.keys()
        for number, found in by_architecture.items():
            assert set(gpu_compile.WGMMA) <= found.keys()
            assert not list(gpu_compile.violations(int(number), found, found))


def test_every_family_with_a_decoder_is_compiled():
    families = {model.family for model in gpu_compile.MODELS.values()}
    assert families & CONFIGS.keys() == set(gpu_counts.FAMILIES)
    assert families - CONFIGS.keys() == {"lfm2_moe", "glm4_moe"}


def test_the_recorded_file_is_the_text_of_its_numbers():
    text = gpu_compile.RECORDED.read_text()
    assert text == gpu_compile.recorded_text(gpu_compile.recorded_numbers())


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_the_worst_numbers_do_not_depend_on_the_number_of_processes(num_processes, monkeypatch):
    """Each process compiles a part of the cases."""
    cases = {
        f"planish.{module}_kernels": {
            f"{kernel} {size}": Case(f"{kernel}_kernel", {}, {"SIZE": size}, warps=4)
            for kernel in ("first", "second")
            for size in sizes
        }
        for module, sizes in (("a", (16, 32, 64)), ("b", (8,)))
    }
    parts = []

    def compile_all(tasks):
        parts.append(len(tasks))
        assert {target for _, target, _ in tasks} == {("cuda", 89, 32)}
        return [
            Resources(case.kernel, 32, case.constants["SIZE"], 10 * case.constants["SIZE"])
            for _, _, case in tasks
        ]

    monkeypatch.setattr(hopper, "compile_all", compile_all)
    found = gpu_compile.measure(89, cases, num_processes)
    assert len(parts) == num_processes
    assert sum(parts) == 8
    largest = {"a": 64, "b": 8}
    assert list(found) == [f"{m}.{k}_kernel" for m in largest for k in ("first", "second")]
    for name, numbers in found.items():
        size = largest[name[0]]
        assert (numbers["spilled"], numbers["shared"]) == (size, 10 * size)


NUMBERS = {"spilled": 0, "shared": 1000, "warps": 8, "wgmma": 4}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"spilled": 40}, "spills 40 bytes"),
        ({"shared": 240_000}, "240,000 bytes of shared memory"),
        ({"warps": 4}, "4 warps of a multiprocessor"),
        ({"wgmma": 0}, "no wgmma"),
    ],
)
def test_each_bar_names_the_kernel(changes, text):
    wrong = list(gpu_compile.violations(90, {"tree.forward": NUMBERS | changes}, {}))
    assert wrong == ([] if text is None else [f"tree.forward: {text}"])


def test_a_recorded_number_is_the_limit_of_its_kernel():
    recorded = {"tree.forward": NUMBERS | {"spilled": 96, "warps": 4}}
    assert not list(gpu_compile.violations(89, recorded, recorded))
    worse = {"tree.forward": NUMBERS | {"spilled": 104, "warps": 2}}
    assert len(list(gpu_compile.violations(89, worse, recorded))) == 2
    better = {"tree.forward": NUMBERS}
    assert len(list(gpu_compile.violations(89, recorded, better))) == 2


def test_an_unknown_version_of_triton_has_the_limits_of_the_newest_one():
    recorded = {"3.6": {"89": {"a": {}}}, "3.7": {"89": {"b": {}}}}
    assert gpu_compile.limits_of(recorded, "3.6", 89) == {"a": {}}
    assert gpu_compile.limits_of(recorded, "4.0", 89) == {"b": {}}
    assert gpu_compile.limits_of(recorded, "4.0", 90) == {}


def test_warps_are_limited_by_registers_shared_memory_and_threads():
    ada = gpu_compile.ARCHITECTURES[89]
    assert gpu_compile.warps_at_once(ada, 255, 10_000, 4) == 8
    assert gpu_compile.warps_at_once(ada, 64, 72 << 10, 4) == 4
    assert gpu_compile.warps_at_once(ada, 16, 0, 8) == 48
    assert gpu_compile.warps_at_once(ada, 16, 0, 1) == 24


def test_a_case_has_the_types_that_triton_specializes():
    from types import SimpleNamespace

    def fn(x, stride, rows, one, module, factor, nothing, BLOCK: "tl.constexpr"):  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        """Stand for a kernel; only its arguments are read."""

    names = list(fn.__code__.co_varnames)
    kernel = SimpleNamespace(fn=fn, arg_names=names, kwargs={"do_not_specialize": ["module"]})
    x = torch.zeros(2, dtype=torch.bfloat16)
    case = gpu_compile.case_of(
        kernel, (x, 32, 7, 1, 1, 0.5, None), {"BLOCK": 64, "num_warps": 8, "num_stages": 2}
    )
    types = {"x": "*bf16", "stride": "i32", "rows": "i32", "module": "i32", "factor": "fp32"}
    assert (case.types, case.multiples) == (types, ("stride",))
    assert case.constants == {"one": 1, "nothing": None, "BLOCK": 64}
    assert (case.warps, case.stages, case.fuses_multiply_add) == (8, 2, True)
    kinds = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8)
    found = [gpu_compile.triton_type(torch.zeros(1, dtype=kind)) for kind in kinds]
    assert found == ["*fp32", "*fp64", "*i64", "*i32", "*i8", "*u8"]
    assert gpu_compile.triton_type(1 << 40) == "i64"
