"""`planish doctor` reports each problem, which the tests simulate; its JSON form, exit status and
duration.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from planish.commands import doctor as command
from planish.commands.cli import main
from planish.doctor import acceleration, busy, examination, preparation, software, storage
from planish.doctor.busy import Load, measure_load
from planish.doctor.examination import ExaminationOptions, examine
from planish.doctor.findings import Finding, Report, Section, collect_warnings
from planish.doctor.models import memory_findings, model_findings
from planish.doctor.numerics import numerics_findings
from planish.doctor.preparation import Preparation, PreparationResult
from planish.doctor.processors import processor_findings
from planish.doctor.sandbox import sandbox_findings
from planish.doctor.software import EXTRAS, extra_findings
from planish.doctor.storage import HubProbe, directory_findings
from planish.engine.numerics import Numerics
from planish.engine.settings import EngineSettings
from planish.errors import UserError
from planish.model.kernels.cpp.build import BuildError
from planish.model.kernels.self_test.verdicts import Verdict, verdict_file, write_verdicts
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.processes import threads
from planish.sandbox import Sandbox, SandboxUnavailableError
from planish.testing import tiny_model, tiny_transformers_model

SCHEMA = {
    "versions": {"planish", "torch", "triton", "python", "system", "torch_built_for"},
    "device": {"device", "driver", "dtype"},
    "kernels": {"compiler", "python_headers", "kernel_cache", "cpu_instructions", "cpu_kernels"},
    "numerics": {"kernels", "batch_invariant", "kl_sample_train_v2"},
    "processors": {"cores", "quota", "threads", "variables", "other_programs"},
    "models": {DEFAULT_MODEL},
    "memory": {"main_memory", "usable", "plan"},
    "sandbox": {"self_test"},
    "extras": set(EXTRAS),
    "directories": {"cache", "checkpoints", "server_data", "hub_cache"},
    "network": {"hub"},
}
"""Sections and the least that each holds: what a program may rely on."""
PREPARATION_SECONDS = 80.0
"""The time limit of the preparation. On a busy machine, its own 15 s are too short."""


def by_name(findings):
    return {finding.name: finding for finding in findings}


@pytest.fixture
def here(tmp_path, monkeypatch, planish_home):
    """A user who has only a base model and no network."""
    model = tiny_model(tmp_path / "model")
    monkeypatch.setenv("PLANISH_HOME", str(planish_home(tmp_path / "home")))
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PLANISH_MODELS", f"{DEFAULT_MODEL}={model}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def mended(monkeypatch):
    """Simulate what this machine may lack: a sandbox, and idle processors."""

    async def holds(_):
        pass

    monkeypatch.setattr(Sandbox, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(Sandbox, "check", holds)
    monkeypatch.setattr(examination, "measure_load", lambda: Load(0.0, ()))
    monkeypatch.setattr(examine, "__defaults__", (PREPARATION_SECONDS,))


@pytest.mark.slow
def test_a_sound_machine_needs_no_attention(here, monkeypatch, capsys):
    mended(monkeypatch)
    began = time.monotonic()
    assert main(["doctor", "--data-dir", str(here / "server")]) == 0
    assert time.monotonic() - began < 100
    printed = capsys.readouterr().out
    assert "Nothing needs attention" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert all(section in printed for section in SCHEMA)
    assert not (here / "server").exists()


@pytest.mark.slow
def test_the_json_form_is_stable(here, monkeypatch, capsys):
    mended(monkeypatch)
    assert main(["doctor", "--json", "--data-dir", str(here / "server")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"schema", "needs_attention", "seconds", "sections"}
    assert (report["schema"], report["needs_attention"]) == (1, False)
    assert list(report["sections"]) == list(SCHEMA)
    for name, least in SCHEMA.items():
        findings = report["sections"][name]
        assert findings.keys() >= least, name
        for finding in findings.values():
            assert finding.keys() == {"text", "value", "needs_attention", "remedy"}
            assert finding["value"] is not None
    plan = report["sections"]["memory"]["plan"]["value"]
    assert plan["model"] == DEFAULT_MODEL
    assert plan["total"] > plan["keys_values"] > 0


@pytest.mark.slow
def test_several_causes_at_once_without_a_network(here):
    """Run the whole command in its own process, on a simulated machine with many problems."""
    empty = here / "empty"
    empty.mkdir()
    environment = os.environ | {
        "PATH": str(empty),
        "PLANISH_HOME": "/proc/planish",
        "PLANISH_MODELS": f"gone={here}/gone",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("CXX", None)
    program = f"""
import sys
from planish.commands.cli import main
from planish.doctor.examination import examine
examine.__defaults__ = ({PREPARATION_SECONDS},)
sys.exit(main())
"""
    command = [sys.executable, "-c", program, "doctor", "--json", "--model", "nobody/nothing"]
    began = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert time.monotonic() - began < 100
    assert done.returncode == 1
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["needs_attention"]
    found = {
        f"{section}/{name}": finding
        for section, findings in report["sections"].items()
        for name, finding in findings.items()
        if finding["needs_attention"]
    }
    assert "apt-get install g++" in found["kernels/compiler"]["remedy"]
    assert "PLANISH_HOME" in found["kernels/kernel_cache"]["remedy"]
    assert "PLANISH_HOME" in found["directories/cache"]["remedy"]
    assert "PLANISH_MODELS" in found["models/gone"]["remedy"]
    assert "planish models" in found["memory/plan"]["remedy"]
    assert "bubblewrap" in found["sandbox/self_test"]["remedy"]
    # The compiler is the cause that can be mended; the kernels are its consequence.
    kernels = report["sections"]["kernels"]["cpu_kernels"]
    assert not kernels["value"]["in_use"]
    assert "compiler" in kernels["text"]
    assert "kernels/cpu_kernels" not in found


def test_an_unknown_switch_of_the_kernels_names_the_allowed_ones(monkeypatch):
    monkeypatch.setenv("PLANISH_KERNELS", "fast")
    section = Section.gather(
        "kernels",
        lambda: acceleration.kernel_findings(EngineSettings(device="cpu"), PreparationResult()),
    )
    assert section.findings[-1].text == "PLANISH_KERNELS='fast': give 'auto', 'native' or 'torch'"
    assert section.findings[-1].remedy == "correct the setting that this message names"


def test_an_invalid_device_is_rejected_before_any_examination(capsys):
    assert main(["doctor", "--device", "tpu"]) == 1
    assert "--device 'tpu': give 'auto', 'cpu'" in capsys.readouterr().err


def test_a_wheel_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(acceleration, "find_compiler", lambda: None)
    assert acceleration._compiler_finding().remedy
    monkeypatch.setattr(acceleration, "PREBUILT", tmp_path)
    assert not acceleration._compiler_finding().remedy


def test_a_compiler_that_does_not_run(monkeypatch):
    monkeypatch.setenv("CXX", "/absent/g++ -m64")
    finding = acceleration._compiler_finding()
    assert "does not run" in finding.text
    assert "CXX" in finding.remedy


def preparing(monkeypatch, program):
    """Return a preparation that runs this program."""
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(preparation, "command", lambda device, directory: command)
    return Preparation("cpu", None)


def test_kernels_that_are_still_being_compiled(monkeypatch):
    going_on = preparing(monkeypatch, "import time; time.sleep(60)")
    try:
        found = by_name(
            acceleration.kernel_findings(EngineSettings(device="cpu"), going_on.result(0.0))
        )
    finally:
        os.kill(going_on._process.pid, 9)
        os.waitpid(going_on._process.pid, 0)
    assert "still being compiled" in found["cpu_kernels"].text
    assert "again" in found["cpu_kernels"].remedy


NUMERICS = Numerics("cpu", "bfloat16", "torch", ("lora",), False, 1e-3, 1e-2)


def test_the_preparation_tells_what_it_found(monkeypatch):
    told = PreparationResult([Verdict("lora", False, "wrong result")], NUMERICS)
    text = json.dumps(asdict(told))
    done = preparing(monkeypatch, f"print('noise'); print({text!r})")
    assert done.result(time.monotonic() + 120) == told


@pytest.mark.parametrize("program", ["", "print()", "print('noise')", "print('{}')", "exit(3)"])
def test_a_preparation_that_fails_found_nothing(monkeypatch, program):
    assert preparing(monkeypatch, program).result(time.monotonic() + 120) == PreparationResult()


@pytest.mark.slow
def test_the_preparation_describes_the_numbers_of_a_model(here):
    done = subprocess.run(
        preparation.command("cpu", here / "model"), capture_output=True, check=True
    )
    found = PreparationResult.read(done.stdout)
    assert found.gpu_verdicts == []
    assert found.numerics is not None
    assert found.numerics.device == "cpu"


@pytest.mark.slow
def test_the_preparation_measures_a_model_of_transformers(tmp_path):
    tiny_transformers_model(tmp_path / "glm4", "glm4")
    done = subprocess.run(
        preparation.command("cpu", tmp_path / "glm4"), capture_output=True, check=True
    )
    found = PreparationResult.read(done.stdout)
    assert found.numerics is not None
    assert found.numerics.architecture == "Glm4ForCausalLM"
    assert found.numerics.measured_difference is not None
    assert found.numerics.measured_difference < 1e-2
    texts = {name: finding.text for name, finding in by_name(numerics_findings(found)).items()}
    assert texts["layers"].startswith("transformers' Glm4ForCausalLM")
    assert "differ by at most" in texts["measured_difference"]


def test_numbers_are_reported_for_people_and_programs():
    found = by_name(numerics_findings(PreparationResult([], NUMERICS)))
    assert found["batch_invariant"].value is False
    assert "deterministic=True" in found["batch_invariant"].text
    assert found["kl_sample_train_v2"].value == {"expected": 1e-3, "alarm": 1e-2}
    assert found["kernels"].text == "torch; torch for lora"
    exact = replace(NUMERICS, is_batch_invariant=True, expected_kl=0.0)
    found = by_name(numerics_findings(PreparationResult([], exact)))
    assert found["batch_invariant"].value is True
    assert found["kl_sample_train_v2"].text.startswith("exactly 0")
    [pending] = numerics_findings(None)
    assert "not known: the check did not finish in time" in pending.text
    [without] = numerics_findings(PreparationResult())
    assert "no base model is on this machine" in without.text


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("RuntimeError: Failed to find C compiler", "gcc"),
        ("wrong result: largest difference 0.3", "please report this"),
        ("timeout: no verdict within 300 seconds", "less busy"),
    ],
)
def test_gpu_kernels_that_failed_their_self_test(reason, remedy):
    finding = acceleration.gpu_self_test([Verdict("lora", False, reason), Verdict("rope", True)])
    assert f"lora ({reason})" in finding.text
    assert remedy in finding.remedy
    assert not acceleration.gpu_self_test([Verdict("rope", True)]).needs_attention
    assert not acceleration.gpu_self_test([]).needs_attention


def test_a_driver_that_is_too_old(monkeypatch):
    problem = (
        "This machine has an NVIDIA GPU that torch for CUDA 13.0 cannot use (The NVIDIA driver on "
        "your system is too old): update the NVIDIA driver"
    )
    monkeypatch.setattr(acceleration, "unused_gpu", lambda: problem)
    monkeypatch.setattr(acceleration, "choose_device", lambda _: torch.device("cpu"))
    found = by_name(acceleration.device_findings(EngineSettings(device="cpu")))
    assert "too old" in found["unused_gpu"].text
    assert found["unused_gpu"].remedy == "update the NVIDIA driver"
    found = by_name(acceleration.device_findings(replace(EngineSettings(), device="auto")))
    assert found["device"].text == "cpu, torch cannot use the GPU"


def test_an_unknown_value_of_a_switch_names_the_allowed_ones(monkeypatch, capsys):
    monkeypatch.setenv("PLANISH_GRAPHS", "maybe")
    assert main(["doctor"]) == 1
    assert "PLANISH_GRAPHS='maybe': give 0 or 1" in capsys.readouterr().err


def test_kernels_that_were_turned_off(monkeypatch):
    monkeypatch.setenv("PLANISH_KERNELS", "torch")
    acceleration.ops.load_library.cache_clear()
    try:
        [finding] = acceleration._cpu_kernel_findings()
    finally:
        acceleration.ops.load_library.cache_clear()
    assert finding.text == "not in use, because PLANISH_KERNELS=torch"
    assert not finding.needs_attention


def test_kernels_that_cannot_be_loaded(monkeypatch):
    def refuse():
        raise UserError("PLANISH_KERNELS=native: no library")

    monkeypatch.setattr(acceleration.ops, "load_library", refuse)
    [finding] = acceleration._cpu_kernel_findings()
    assert "no library" in finding.text
    assert finding.needs_attention == acceleration._has_avx2()


def test_kernels_that_failed_their_self_test(monkeypatch):
    verdicts = [Verdict("matmul", False, "illegal instruction"), Verdict("rope", True)]
    library = SimpleNamespace(verdicts=verdicts)
    monkeypatch.setattr(acceleration.ops, "load_library", lambda: library)
    monkeypatch.setattr(acceleration.ops, "instructions", lambda: "AVX2")
    found = by_name(acceleration._cpu_kernel_findings())
    assert not found["cpu_kernels"].needs_attention
    assert "matmul (illegal instruction)" in found["cpu_self_test"].text
    assert "rope" not in found["cpu_self_test"].text
    assert "PLANISH_KERNELS=torch" in found["cpu_self_test"].remedy
    assert found["cpu_self_test"].value[0]["passed"] is False


def test_a_damaged_file_of_verdicts_is_made_again(here, monkeypatch):
    """The self-test runs again, and the doctor reports its result."""
    real = acceleration.ops.load_library()
    if real is None:
        pytest.skip("no kernels on this CPU")
    directory = here / "another" / "kernels"
    directory.mkdir(parents=True)
    library = shutil.copy(real._name, directory)
    monkeypatch.setenv("PLANISH_HOME", str(here / "another"))
    asked = []

    def passed(families, request_for, *_):
        asked.append(request_for(families, ())["library"])
        return [Verdict(family, True) for family in families]

    monkeypatch.setattr("planish.model.kernels.cpp.self_test.run_self_test", passed)
    acceleration.ops.load_library.cache_clear()
    try:
        for damage in ("", "{", '[{"family": 1}]'):
            for path in directory.glob("verdicts-*.json"):
                path.write_text(damage)
            found = by_name(acceleration._cpu_kernel_findings())
            assert "passed: " in found["cpu_self_test"].text
            acceleration.ops.load_library.cache_clear()
        assert "passed: " in by_name(acceleration._cpu_kernel_findings())["cpu_self_test"].text
    finally:
        acceleration.ops.load_library.cache_clear()
    assert asked == [str(library)] * 3


def test_retest_deletes_the_stored_verdicts(here, monkeypatch):
    monkeypatch.setenv("PLANISH_HOME", str(here / "another"))
    path = verdict_file(here / "another" / "kernels", "gpu", "key")
    write_verdicts(path, [Verdict("lora", False, "wrong result: x")])
    library = path.with_name("kernels-1.so")
    library.touch()
    monkeypatch.setattr(command, "examine", lambda options: Report((), 0.0))
    assert main(["doctor"]) == 0
    assert path.exists()
    assert main(["doctor", "--retest"]) == 0
    assert not path.exists()
    assert library.exists()


def test_retest_names_the_directory_that_cannot_be_changed(here, monkeypatch, capsys):
    monkeypatch.setenv("PLANISH_HOME", str(here / "another"))
    blocked = here / "another" / "kernels" / "verdicts-gpu-1.json"
    blocked.mkdir(parents=True)  # a directory cannot be deleted as a file
    assert main(["doctor", "--retest"]) == 1
    assert str(blocked.parent) in capsys.readouterr().err


@pytest.mark.parametrize("fails", ["one family", "all families", "the compiler"])
def test_the_reason_for_torch_is_shown_after_an_earlier_call_has_logged_it(monkeypatch, fails):
    if fails == "the compiler":

        def refuse():
            raise BuildError("no compiler")

        monkeypatch.setattr(acceleration.ops, "_library", refuse)
        reason = "no compiler"
    else:
        library = SimpleNamespace(has_amx=lambda: 0, use_amx=lambda _: None)
        verdicts = [Verdict("matmul", False, "wrong"), Verdict("rope", fails == "one family")]
        monkeypatch.setattr(acceleration.ops, "_library", lambda: (None, library))
        monkeypatch.setattr(acceleration.ops, "verdicts_of", lambda *_: verdicts)
        monkeypatch.setattr(acceleration.ops, "instructions", lambda: "AVX2")
        reason = "matmul (wrong)"
    acceleration.ops.load_library.cache_clear()
    try:
        acceleration.ops.load_library()
        finding = next(acceleration._cpu_kernel_findings())
    finally:
        acceleration.ops.load_library.cache_clear()
    [warning] = finding.value["warnings"]
    assert reason in warning


def test_headers_matter_where_triton_compiles(monkeypatch):
    monkeypatch.setattr(acceleration, "has_headers", lambda: False)
    assert "python3-dev" in acceleration._python_headers_finding(is_needed=True).remedy
    assert not acceleration._python_headers_finding(is_needed=False).needs_attention


@pytest.mark.parametrize(("cores", "attention"), [(0.0, False), (0.3, False), (1.9, True)])
def test_other_programs_keep_cores_busy(monkeypatch, cores, attention):
    monkeypatch.setattr("planish.doctor.processors.usable_cpus", lambda: 2)
    monkeypatch.setattr("planish.doctor.processors.cpu_quota", lambda: None)
    found = by_name(processor_findings(Load(cores, (("make", 7, cores),))))["other_programs"]
    assert found.needs_attention == attention
    assert found.value["cores"] == cores
    assert f"make (process 7) {cores:.1f}" in found.text
    if attention:
        assert "OMP_NUM_THREADS=1" in found.remedy


@pytest.mark.parametrize(("quota", "attention"), [("50000 100000", True), ("200000 100000", False)])
def test_half_a_processor_needs_attention(monkeypatch, tmp_path, quota, attention):
    """The limit is read from simulated files of a control group."""
    (tmp_path / "membership").write_text("0::/mine\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cpu.max").write_text(quota)
    found = threads.cpu_quota(tmp_path / "membership", tmp_path)
    monkeypatch.setattr("planish.doctor.processors.cpu_quota", lambda: found)
    finding = by_name(processor_findings(None))["quota"]
    assert finding.value == {"cores": 0.5 if attention else 2.0}
    assert finding.needs_attention == attention
    assert ("--cpus" in finding.remedy) == attention


def test_more_threads_than_processors_need_attention(monkeypatch):
    monkeypatch.setattr("planish.doctor.processors.usable_cpus", lambda: 1)
    monkeypatch.setattr("planish.doctor.processors.limit_threads", lambda: None)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    found = by_name(processor_findings(None))
    assert "OMP_NUM_THREADS=1" in found["threads"].remedy


def test_a_system_that_does_not_tell_its_load(tmp_path):
    assert measure_load(0.0, tmp_path) is None
    assert not by_name(processor_findings(None))["other_programs"].needs_attention


def test_the_load_is_that_of_other_programs(tmp_path, monkeypatch):
    """The load is counted in clock ticks on the allowed processors, without this process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    ticks = os.sysconf("SC_CLK_TCK")

    def write(seconds):
        (tmp_path / "stat").write_text(
            f"cpu 9 9 9 9\ncpu0 {99 * ticks * seconds} 0 0 0 0 0 0 0 0 0\n"
            f"cpu1 {ticks * seconds} 0 0 50 50 0 0 0 0 0\n"
        )
        for pid, name, share in ((7, "a ) b", 1), (8, "idle", 0)):
            (tmp_path / str(pid)).mkdir(exist_ok=True)
            spent = ticks * seconds * share
            (tmp_path / str(pid) / "stat").write_text(
                f"{pid} ({name}) S" + " 0" * 10 + f" {spent} 0"
            )

    write(0)
    clock, own_seconds = iter([100.0, 104.0]), iter([7.0, 8.0])
    fake_time = SimpleNamespace(sleep=lambda _: write(4), monotonic=lambda: next(clock))
    monkeypatch.setattr(busy, "time", fake_time)
    monkeypatch.setattr(busy, "_own_cpu_seconds", lambda: next(own_seconds))
    load = measure_load(4.0, tmp_path)
    assert load is not None
    assert load.cores == pytest.approx(3 / 4)
    assert load.programs == (("a ) b", 7, 1.0),)


def test_memory_that_is_too_small_for_a_model(here, monkeypatch):
    monkeypatch.setattr("planish.engine.memory.main_memory_bytes", lambda: 1000)
    plan = by_name(memory_findings(None, EngineSettings(device="cpu")))["plan"]
    assert "does not fit into main memory" in plan.text
    assert "smaller base model" in plan.remedy


def test_the_memory_plan_has_the_quantization_scheme(here, capsys):
    def plan(scheme: str | None) -> Finding:
        return by_name(memory_findings(None, EngineSettings(device="cpu", quantize=scheme)))["plan"]

    plain, quantized = plan(None), plan("int8")
    assert plain.value["quantize"] is None
    assert quantized.value["quantize"] == "int8"
    assert "int8 weights" in quantized.text
    assert set(plain.value) == {
        *("model", "quantize", "total", "weights", "adapters", "keys_values"),
        *("sampler", "sampling", "trainer", "training"),
    }
    assert quantized.value["weights"] < plain.value["weights"]
    budgets = {"total", "weights", "adapters", "keys_values", "sampling", "training"}
    assert budgets < plain.value.keys()
    # A tiny model has linears with 96 inputs.
    rejected = plan("nf4")
    assert "not a multiple of 64" in rejected.text
    assert rejected.remedy == "use the other scheme, or none"
    with pytest.raises(SystemExit):
        main(["doctor", "--quantize", "int4"])
    assert "int8" in capsys.readouterr().err


def test_the_embedded_model_may_be_fetched_later(here, monkeypatch):
    monkeypatch.delenv("PLANISH_MODELS")
    monkeypatch.setenv("PLANISH_HOME", str(here / "nothing"))
    assert not by_name(memory_findings(None, EngineSettings(device="cpu")))["plan"].needs_attention
    entry = by_name(model_findings())[DEFAULT_MODEL]
    assert "planish models --fetch" in entry.text
    assert not entry.needs_attention


def test_a_model_that_cannot_be_used(here, monkeypatch):
    (here / "model" / "config.json").write_text("{}")
    plan = by_name(memory_findings(DEFAULT_MODEL, EngineSettings(device="cpu")))["plan"]
    assert plan.needs_attention
    assert "config.json" in plan.text


def test_a_gguf_file_is_not_converted_by_asking(here, monkeypatch):
    (here / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("PLANISH_MODELS", f"m={here}/m.gguf")
    plan = by_name(memory_findings("m", EngineSettings(device="cpu")))["plan"]
    assert plan.needs_attention
    assert "planish models --fetch m" in plan.value["error"]


def test_a_sandbox_without_bubblewrap(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    [finding] = sandbox_findings()
    assert "apt-get install bubblewrap" in finding.remedy


def test_a_sandbox_without_user_namespaces(monkeypatch):
    async def refuse(_):
        raise SandboxUnavailableError("bubblewrap could not create the sandbox; sysctl this")

    monkeypatch.setattr(Sandbox, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(Sandbox, "check", refuse)
    [finding] = sandbox_findings()
    assert finding.remedy == "sysctl this"
    assert not asyncio.iscoroutine(finding.value)


def test_extras_are_those_of_the_package(monkeypatch):
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys()
    monkeypatch.setattr(software, "_version", lambda name: None)
    found = by_name(extra_findings())
    assert "pip install 'planish[wandb]'" in found["wandb"].text
    assert found["wandb"].value["missing"] == project["optional-dependencies"]["wandb"]
    assert not any(finding.needs_attention for finding in found.values())


def test_a_disk_that_is_nearly_full(here, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100 << 20))
    for finding in directory_findings(here / "server"):
        assert "nearly full" in finding.text
        assert "free space" in finding.remedy


def test_a_directory_that_cannot_be_written(here):
    finding = by_name(directory_findings(storage.Path("/proc/planish")))["server_data"]
    assert "cannot be written" in finding.text
    assert "--data-dir" in finding.remedy


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(storage, "hub_problem", lambda: "ConnectError: no such host")
    [finding] = HubProbe().findings()
    assert "no such host" in finding.text
    assert "HF_HUB_OFFLINE=1" in finding.remedy
    monkeypatch.setattr(storage, "hub_problem", lambda: None)
    [finding] = HubProbe().findings()
    assert not finding.needs_attention


def test_a_hub_that_never_answers(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(storage, "_HUB_SECONDS", 0.05)
    go_on = threading.Event()
    monkeypatch.setattr(storage, "hub_problem", lambda: go_on.wait(60))
    [finding] = HubProbe().findings()
    go_on.set()
    assert "no answer" in finding.text


@pytest.mark.slow
def test_a_probe_that_fails_leaves_the_others(here, monkeypatch):
    def broken():
        yield Finding("first", "fine")
        raise RuntimeError("unexpected")

    section = Section.gather("part", broken)
    assert [finding.name for finding in section.findings] == ["first", "error"]
    assert "RuntimeError: unexpected" in section.findings[1].text
    assert Report((section,), 1.0).problems == [("part", section.findings[1])]
    monkeypatch.setattr(examination, "version_findings", broken)
    report = examine(ExaminationOptions(here / "server", settings=EngineSettings(device="cpu")))
    assert len(report.sections) == len(SCHEMA)


def test_warnings_are_collected_and_not_printed(caplog):
    import logging

    with collect_warnings() as warnings:
        logging.getLogger("planish.model.kernels.cpp.ops").warning("no kernels: %s", "why")
    assert warnings == ["no kernels: why"]
    assert caplog.records == []
