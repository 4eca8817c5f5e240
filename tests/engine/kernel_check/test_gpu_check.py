"""The self-test of the GPU kernels passes correct kernels and detects wrong kernels of every family.
The kernels are interpreted here.
"""

import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backends import CONFIG

pytest.importorskip("triton")

from planish.engine import settings
from planish.engine.kernel_check.check import ModelCheck, Sizes
from planish.engine.kernel_check.gpu import check_family, checked_config
from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend, reference_backend
from planish.model.kernels.self_test.process import WrongResultError
from planish.model.kernels.self_test.verdicts import Verdict, read_verdicts
from planish.model.kernels.triton import sampling_attention, self_test
from planish.model.kernels.triton.families import (
    FAMILIES,
    HeadShape,
    supported_families,
    wants_graphs,
)
from planish.model.kernels.triton.self_test import Request, run_checks, warning_of
from planish.testing import tiny_model

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE = [family for family in FAMILIES if family != "graphs"]
"""Families that can be checked here; a graph needs a real or pretended GPU."""
HEADS = HeadShape(128, 4, torch.bfloat16)
REQUEST = Request("/model", "bfloat16", "cuda:0", FAMILIES)


@pytest.fixture(autouse=True)
def _triton_serves(monkeypatch):
    monkeypatch.setenv("PLANISH_KERNELS", "triton")
    # At this setting, key ranges are split into more parts than one program adds at a time.
    monkeypatch.setattr(sampling_attention, "_INTERPRETER_MULTIPROCESSORS", 16)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("model"), family="qwen3_moe", layers=1, heads=4, kv_heads=2,
        hidden_size=48, intermediate=600, experts=5, expert_size=40,
    )  # fmt: skip


SMALL = Sizes(
    segment_lengths=(40, 20, 9),
    prompt_lengths=(1300, 3),
    samples_per_prompt=(3, 1),
    max_sampled_tokens=100,
    lora_rows=(37, 530),
    quantized_rows=(1, 21, 70, 521),
)


TINY = replace(SMALL, segment_lengths=(9, 4, 3), prompt_lengths=(20, 3), max_sampled_tokens=9)
"""Sizes for kernels whose programs do not depend on the number of rows."""


def error_of(
    family: str, directory: Path, dtype: torch.dtype = torch.bfloat16, sizes: Sizes | None = None
) -> str:
    """Return what the check of a family finds; empty if the kernels pass."""
    if sizes is None:
        sizes = SMALL if family in ("attention", "tree attention") else TINY
    try:
        check_family(family, ModelConfig.from_directory(directory), dtype, DEVICE, sizes)
    except WrongResultError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", HERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_correct_kernels_pass_the_check(directory, family, dtype):
    assert error_of(family, directory, dtype) == ""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["attention", "tree attention"])
def test_correct_kernels_pass_the_check_at_gpu_sizes(directory, family):
    """At these sizes the tree has 1,500 rows, and key ranges are split into several pieces."""
    assert error_of(family, directory, sizes=Sizes()) == ""


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_5_moe", "qwen3_moe", "olmo3"])
def test_every_family_of_models_can_be_checked(tmp_path, family):
    """The check of torch against itself passes with the one layer of each model that it uses."""
    config = checked_config(ModelConfig.from_directory(tiny_model(tmp_path, family)))
    backend = reference_backend(config, torch.float32, DEVICE)
    check = ModelCheck(backend, "norms", TINY)
    check.train()
    check.sample()


# Each case is a family, a module, and a change of its source.
FAULTS = [
    ("norms", "elementwise", "factor[:, None] * weights[None, :]", "factor[:, None]"),
    ("norms", "elementwise", "tl.sum(value * value, 1)", "tl.sum(tl.abs(value), 1)"),
    ("norms", "elementwise", "(weighted - value * inner[:, None])", "(weighted - value)"),
    ("norms", "elementwise", "tl.store(total + at, value, mask=inside)", "pass"),
    ("rope", "elementwise", "first * c - second * s, out", "first * c + second * s, out"),
    ("rope", "elementwise", "tl.sum(second * second, 1), (2", "tl.sum(first * first, 1), (2"),
    ("rope", "elementwise", "second * c + first * s, q", "second * c - first * s, q"),
    ("swiglu", "elementwise", "gate * _sigmoid(gate) * up", "gate * _sigmoid(up) * up"),
    ("swiglu", "elementwise", "share * (1.0 - share) + share", "share"),
    ("log_sum_exp", "head", "inside = column < vocab", "inside = column < vocab - 1"),
    ("log_sum_exp", "head", "tl.where(column == token, value, entries)", "tl.where(column == token, entries, entries)"),
    ("log_sum_exp", "head", "if token // BLOCK == tl.program_id(1)", "if tl.program_id(1) == 0"),
    ("log_sum_exp", "head", "logit += tl.sum(", "logit -= tl.sum("),
    ("log_sum_exp", "head", "at_targets - tl.exp(", "at_targets - 0.9 * tl.exp("),
    ("log_sum_exp", "head", "tl.where(total > 0.0, total, float(\"nan\"))", "tl.where(total > 0.0, total, 1.0)"),
    ("sampling", "head", "start + tl.cumsum", "tl.cumsum"),
    ("sampling", "head", "uniforms + row) * total", "uniforms + row)"),
    ("sampling", "head", "before += mass", "before = mass"),
    ("sampling", "filter", "(keys == least) & (index < ties)", "(keys == least)"),
    ("sampling", "filter", "ties = top_k - above", "ties = top_k"),
    ("sampling", "filter", "total = above + ties * _masses(least, MASS_BITS)", "total = 2 * above"),
    ("sampling", "filter", "(beyond >= goal)", "(beyond >= 2 * goal)"),
    ("sampling", "filter", "stays &= keys >= min_key", "stays &= keys > 0"),
    ("attention", "decode", "scores = tl.where(n[None, :] < visible[:, None]", "scores = tl.where(n[None, :] <= visible[:, None]"),
    ("attention", "decode", "mask = (n < stop)[:, None]", "mask = (n < stop - 1)[:, None]"),
    ("attention", "decode", "bound(tl.cdiv(parts, PARTS))", "bound(tl.minimum(tl.cdiv(parts, PARTS), 1))"),
    ("attention", "decode", "tl.load(stats + part * 2 + 1, mask=real, other=0.0), 0", "tl.load(stats + part * 2 + 1, mask=real, other=0.0) * 0 + 1, 0"),
    ("attention", "decode", "tl.load(record + 3)\n        ) * E + e", "tl.load(record + 3) - 1\n        ) * E + e"),
    ("attention", "decode", "visible = position + 1 +", "visible = position +"),
    ("attention", "decode", "heads = head * G + m % G", "heads = (H - 1 - head) * G + m % G"),
    ("tree attention", "tree", "(i[:, None] < ends[None, :])", "(i[:, None] < rows)"),
    ("tree attention", "tree", "(j[None, :] <= i[:, None])", "(j[None, :] < i[:, None] + 2)"),
    ("tree attention", "tree", "- delta[:, None])", ")"),
    ("tree attention", "tree", "(i[None, :] < ends[:, None])", "(i[None, :] < rows)"),
    ("tree attention", "tree", "sum_v += dot(rounded(weights, grads.dtype), grads)", "sum_v = dot(rounded(weights, grads.dtype), grads)"),
    ("lora", "lora", "for part in tl.static_range(PARTS)", "for part in tl.static_range(1)"),
    ("lora", "lora", "low + linear * rank", "low"),
    ("lora", "lora", "has_row = index < tl.load(tile + 1)", "has_row = index < tl.load(tile + 1) - 1"),
    ("lora", "lora", "if tl.load(module_pointers) != 0:", "if tl.load(tile) != 0:"),
    ("experts", "expert", "probabilities == best, expert, EXPERTS), 0)", "probabilities == best, -expert, EXPERTS), 0)"),
    ("experts", "expert", "largest = largest / chosen_total", "pass"),
    ("experts", "expert", "rows + place, (j // K)", "rows + place, (j // K * 0)"),
    ("experts", "expert", "+= own_bias", "-= own_bias"),
    ("experts", "expert", "total += dot(mine, theirs)", "total = dot(mine, theirs)"),
    ("experts", "expert", "total += tl.load(target", "total = tl.load(target"),
    ("experts", "expert", "total += dot(tl.trans(a), b)", "total = dot(tl.trans(a), b)"),
    ("experts", "expert", "value *= tl.load(weights", "value += tl.load(weights"),
    ("experts", "expert", "has_row = m < stop", "has_row = m < stop - 1"),
    ("quantized", "quantized", "tl.interleave(even, odd)", "tl.interleave(odd, even)"),
    ("quantized", "quantized", "scale * group_scale + tl.load(offset)", "scale * group_scale"),
    ("quantized", "quantized", "(n // row_block * scale_stride)[:, None]", "(n * 0)[:, None]"),
    ("quantized", "quantized", "inside = block < blocks", "inside = block < blocks - 1"),
    ("quantized", "quantized", "total += dot(odd, ", "total += 0 * dot(odd, "),
    ("quantized", "quantized_expert", "x_rows + part * fan_out + o", "x_rows + o"),
    ("quantized", "quantized_expert", "index = o * (fan_in // BLOCK_IN) + begin", "index = o * 0 + begin"),
    ("quantized", "quantized_expert", "column = part * fan_out + o", "column = o"),
    ("quantized", "quantized_expert", "table = tables + expert *", "table = tables + expert // 2 *"),
    ("quantized", "quantized_expert", "+= own_bias", "-= own_bias"),
]  # fmt: skip


@pytest.mark.parametrize("fault", range(len(FAULTS)), ids=lambda i: f"{FAULTS[i][0]}-{i}")
def test_the_check_detects_wrong_kernels(directory, tmp_path, monkeypatch, fault):
    family, name, right, wrong = FAULTS[fault]
    module = f"planish.model.kernels.triton.{name}_kernels"
    change(module, right, wrong, tmp_path, monkeypatch)
    assert error_of(family, directory)


@pytest.fixture(scope="module")
def windowed_directory(tmp_path_factory) -> Path:
    """A model with attention sinks, and one layer with a window."""
    return tiny_model(
        tmp_path_factory.mktemp("model"), family="gpt_oss", layers=2, heads=4, kv_heads=2,
        hidden_size=48, window=20,
    )  # fmt: skip


WINDOWED = replace(SMALL, prompt_lengths=(90, 3), max_sampled_tokens=9)


@pytest.mark.parametrize("family", ["attention", "tree attention"])
def test_correct_windows_and_sinks_pass_the_check(windowed_directory, family):
    config = checked_config(ModelConfig.from_directory(windowed_directory))
    assert config.attention_sinks
    assert config.windows == (20, None)
    for dtype in (torch.bfloat16, torch.float32):
        assert error_of(family, windowed_directory, dtype, WINDOWED) == ""


WINDOW_FAULTS = [
    ("attention", "decode", "n[None, :] >= hidden[:, None]", "n[None, :] > hidden[:, None]"),
    ("attention", "decode", "first = tl.maximum(position + 1 - window, 0)", "first = tl.maximum(position + 3 - window, 0)"),
    ("attention", "decode", "tl.load(sinks + head) * LOG2_E", "tl.load(sinks + head)"),
    ("attention", "decode", "tl.load(sinks + head * G + m % G) * LOG2_E", "tl.load(sinks + head * G + m % G)"),
    ("tree attention", "tree", "[None, :] > hidden[:, None]", "[None, :] >= hidden[:, None]"),
    ("tree attention", "tree", "tl.load(sinks + own) * LOG2_E", "tl.load(sinks + own)"),
    ("tree attention", "tree", "key_positions[:, None] > ", "key_positions[:, None] >= "),
]  # fmt: skip


@pytest.mark.parametrize("fault", range(len(WINDOW_FAULTS)))
def test_the_check_detects_wrong_windows_and_sinks(
    windowed_directory, tmp_path, monkeypatch, fault
):
    family, name, right, wrong = WINDOW_FAULTS[fault]
    module = f"planish.model.kernels.triton.{name}_kernels"
    change(module, right, wrong, tmp_path, monkeypatch)
    assert error_of(family, windowed_directory, torch.float32, WINDOWED)


def change(name: str, right: str, wrong: str, directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Replace text in the source of a module while the test runs."""
    origin = importlib.util.find_spec(name).origin  # type: ignore[union-attr]
    source = Path(str(origin)).read_text()
    assert right in source
    path = directory / "changed.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known, attribute = sys.modules.get(name), name.rpartition(".")[2]
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    for importer in list(sys.modules.values()):
        if known is not None and vars(importer).get(attribute) is known:
            patch.setattr(importer, attribute, module)


def test_without_a_compiler_no_kernel_is_checked(tmp_path):
    """Triton itself raises the error, because PATH has no compiler."""
    script = """
        import inspect, json, sys
        from triton.runtime.build import _build
        lists = [[] for _ in list(inspect.signature(_build).parameters)[3:]]
        for family in json.load(sys.stdin)["families"]:
            print(json.dumps({"begin": family}), flush=True)
            open("runs", "a").write("1")
            _build("launcher", "launcher.c", ".", *lists)
        """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(script))
    command = [
        sys.executable, "-c",
        "import os, sys; os.chdir(sys.argv[2]); os.environ.pop('CC', None);"
        "os.environ['PATH'] = ''; os.execv(sys.executable, [sys.executable, sys.argv[1]])",
        str(program), str(tmp_path),
    ]  # fmt: skip
    found = run_checks(REQUEST, command)
    assert [verdict.family for verdict in found] == list(FAMILIES)
    assert (tmp_path / "runs").read_text() == "1"
    assert not any(verdict.passed or verdict.is_lasting for verdict in found)
    warning = warning_of(found)
    assert warning.count("Failed to find C compiler") == 1
    assert "all GPU kernels of planish are off" in warning
    assert "Install gcc and the headers of this Python (gcc and python3-dev)" in warning


def test_missing_python_headers_are_named_in_the_error():
    words = "CalledProcessError: main.c:1:10: fatal error: Python.h: No such file or directory"
    assert "python3-dev" in self_test.remedy_of(words)
    assert "gcc and" not in self_test.remedy_of(words)


@pytest.mark.parametrize(
    "reason",
    [
        "JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "OSError: [Errno 116] Stale file handle",
        "OSError: [Errno 16] Device or resource busy: 'cuda_utils.so'",
        "FileNotFoundError: [Errno 2] No such file or directory: '.triton/cache/K3/lora.ttir.tmp'",
    ],
)
def test_a_damaged_or_shared_cache_of_triton_is_named(reason):
    """Such a file stays damaged, so starting again alone would not help."""
    assert "Delete Triton's cache" in self_test.remedy_of(reason)
    assert "compute mode" not in self_test.remedy_of(reason)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (
            "AssertionError: libcuda.so cannot found!\nPlease make sure GPU is",
            "TRITON_LIBCUDA_PATH",
        ),
        ("FileNotFoundError: [Errno 2] No such file: '/sbin/ldconfig'", "TRITON_LIBCUDA_PATH"),
        ("ImportError: cuda_utils.so: failed to map segment from shared object", "noexec"),
        (
            "PTXASError: `ptxas` stderr:\nValue 'sm_121a' is not defined for option 'gpu-name'",
            "TRITON_PTXAS_PATH",
        ),
        (
            "RuntimeError: the provided PTX was compiled with an unsupported toolchain.",
            "a newer driver",
        ),
    ],
)
def test_an_error_of_tritons_installation_has_its_remedy(reason, remedy):
    """Such an error concerns all families. It is not stored, because the remedy may be applied."""
    verdict = Verdict("lora", False, reason)
    assert not verdict.is_lasting
    assert remedy in warning_of([verdict])
    assert "report" not in warning_of([verdict])
    assert self_test._names(reason, self_test._CONCERNS_ALL)


def test_the_warning_names_families_reasons_and_remedy():
    found = [
        Verdict(family, family not in ("lora", "rope"), "wrong result: x") for family in FAMILIES
    ]
    warning = warning_of(found)
    assert warning.startswith("some GPU kernels of planish are off, and torch does their work")
    assert "rope, lora: wrong result: x. " in warning
    assert "PLANISH_KERNELS=torch" in warning
    assert warning_of([Verdict(family, True) for family in FAMILIES]) == ""
    off = warning_of([Verdict("lora", False, "OutOfMemoryError: CUDA out of memory")])
    assert "End other programs on the GPU" in off


def test_the_check_runs_in_a_separate_process(directory):
    """The kernels are interpreted on a CPU, where no graph can be captured."""
    if DEVICE.type == "cuda":
        pytest.skip("tests/engine/gpu has the check on a GPU")
    request = Request(str(directory), "float32", "cpu", ["norms", "graphs", "swiglu"])
    found = run_checks(request)
    assert [(v.family, v.passed) for v in found] == [
        ("norms", True), ("graphs", False), ("swiglu", True),
    ]  # fmt: skip
    assert "no graph can be recorded" in found[1].reason


class Gpu:
    """Fakes the GPU properties that `check_kernels` reads, and counts the runs of the checker."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Request] = []
        self.fails: dict[str, str] = {}
        self.name = "NVIDIA Example"
        monkeypatch.setenv("PLANISH_KERNELS", "auto")
        monkeypatch.setenv("PLANISH_HOME", str(tmp_path))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: self.name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
        monkeypatch.setattr(self_test, "run_checks", self.run)

    def run(self, request: Request) -> list[Verdict]:
        self.asked.append(request)
        return [
            Verdict(family, family not in self.fails, self.fails.get(family, ""))
            for family in request.families
        ]

    def passed(
        self,
        heads: HeadShape = HEADS,
        shapes: tuple[int, ...] = (4096,),
        families: Sequence[str] = FAMILIES,
    ) -> set[str]:
        """Return the families that passed their check for a model with these shapes."""
        verdicts = self_test.check_kernels(Path("/model"), shapes, heads, CUDA, families)
        return {verdict.family for verdict in verdicts if verdict.passed}


CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(tmp_path, monkeypatch) -> Gpu:
    return Gpu(tmp_path, monkeypatch)


def test_only_families_that_support_the_model_are_checked(gpu, caplog):
    config = replace(CONFIG, score_cap=50.0)
    capped = supported_families(config, is_quantized=False, has_experts=False)
    assert capped == ("norms", "rope", "swiglu", "log_sum_exp", "sampling")
    assert supported_families(config) == (*capped, "quantized", "experts")
    config = replace(CONFIG, attention_sinks=True, windows=(16,) * CONFIG.num_layers)
    assert supported_families(config) == FAMILIES
    gpu.fails = {"graphs": "wrong result: x"}
    assert gpu.passed(families=capped) == set(capped)
    assert gpu.asked[-1].families == list(capped)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    # Another model of the same shapes needs the other families, and the first one's are known.
    assert gpu.passed() == set(FAMILIES) - {"graphs"}
    assert set(gpu.asked[-1].families) == set(FAMILIES) - set(capped)
    assert gpu.passed(families=capped) == set(capped)
    assert len(gpu.asked) == 2


def test_kernels_are_used_only_after_they_passed_the_check(gpu, caplog):
    assert choose_backend(CONFIG, torch.bfloat16, CUDA, None).name == "torch"
    with caplog.at_level("INFO"):
        passed = gpu.passed()
    assert passed == set(FAMILIES)
    backend = choose_backend(CONFIG, torch.bfloat16, CUDA, None, passed - {"rope"})
    assert backend.name == "Triton kernels"
    assert backend.families == passed - {"rope"}
    assert backend.torch_families == {"rope"}
    (line,) = caplog.messages
    assert line == (
        "compiling and checking GPU kernels for NVIDIA Example; this takes about a minute, once"
    )


def test_verdicts_are_cached_by_gpu_model_and_software(gpu, monkeypatch):
    gpu.passed()
    gpu.passed()
    assert len(gpu.asked) == 1
    for change in (
        lambda: gpu.passed(HeadShape(128, 8, torch.bfloat16)),
        lambda: gpu.passed(HeadShape(128, 4, torch.float32)),
        lambda: gpu.passed(shapes=(2048,)),
        lambda: (setattr(gpu, "name", "NVIDIA Other"), gpu.passed()),
        lambda: (monkeypatch.setattr(self_test, "driver_version", lambda: "1"), gpu.passed()),
        lambda: (monkeypatch.setattr(torch, "__version__", "3.0"), gpu.passed()),
        lambda: (monkeypatch.setattr(self_test, "triton_version", lambda: "4.0"), gpu.passed()),
        lambda: (monkeypatch.setattr(self_test, "source_digest", lambda: "1"), gpu.passed()),
    ):
        asked = len(gpu.asked)
        change()
        assert len(gpu.asked) == asked + 1


def test_a_damaged_verdict_file_is_replaced(gpu, tmp_path):
    gpu.passed()
    (path,) = (tmp_path / "kernels").glob("verdicts-gpu-*.json")
    path.write_text(path.read_text()[:-20])
    gpu.passed()
    assert len(gpu.asked) == 2
    assert len(read_verdicts(path) or ()) == len(FAMILIES)


def test_a_failure_with_a_remedy_is_checked_again(gpu, caplog):
    gpu.fails = {
        "lora": "RuntimeError: Failed to find C compiler. Please specify via CC",
        "rope": "wrong result: x",
    }
    assert gpu.passed() == set(FAMILIES) - {"lora", "rope"}
    (line,) = caplog.messages
    assert line.startswith("some GPU kernels of planish are off")
    gpu.fails = {}
    assert gpu.passed() == set(FAMILIES) - {"rope"}
    assert gpu.asked[1].families == ["lora"]


@pytest.mark.parametrize("wanted", ["torch", "triton"])
def test_no_check_runs_if_kernels_are_disabled_or_forced(gpu, monkeypatch, wanted):
    monkeypatch.setenv("PLANISH_KERNELS", wanted)
    assert not gpu.passed()
    assert not gpu.asked
    backend = choose_backend(CONFIG, torch.bfloat16, CUDA, None, FAMILIES)
    assert backend.families == (frozenset(FAMILIES) if wanted == "triton" else frozenset())


def test_planish_graphs_must_be_0_or_1(monkeypatch):
    for value, wants in (("0", False), ("1", True)):
        monkeypatch.setenv("PLANISH_GRAPHS", value)
        assert wants_graphs() == wants
    monkeypatch.setenv("PLANISH_GRAPHS", "off")
    with pytest.raises(UserError, match=r"PLANISH_GRAPHS='off': give 0 or 1"):
        settings.EngineSettings(device="cpu")
