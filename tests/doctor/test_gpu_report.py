"""`planish doctor --gpu-report`: the format of its file, resuming, the time limit, and what is
personal. A CPU takes the place of the GPU.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from planish.commands.cli import main
from planish.doctor.gpu import report as gpu_report
from planish.doctor.gpu.model_part import group_of
from planish.doctor.gpu.random_model import SHAPES, num_bytes
from planish.doctor.gpu.report import GpuReport, ReportOptions
from planish.doctor.gpu.report_file import (
    DONE,
    FAILED,
    NOT_RUN,
    STATUSES,
    UNFINISHED,
    Line,
    PartResult,
    ReportFile,
    scrubbed,
    software,
)
from planish.errors import UserError

VALUE = {"type": ["number", "string", "null"]}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["schema", "software", "parts"],
    "properties": {
        "schema": {"const": 1},
        "software": {
            "type": "object",
            "required": ["planish", "torch", "triton", "kernel_sources"],
            "additionalProperties": {"type": "string"},
        },
        "parts": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "required": ["status", "reason", "seconds", "lines", "details"],
                "properties": {
                    "status": {"enum": list(STATUSES)},
                    "reason": {"type": "string"},
                    "seconds": {"type": "number"},
                    "details": {"type": "object"},
                    "lines": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["what", "got", "unit", "expected"],
                            "properties": {
                                "what": {"type": "string"},
                                "unit": {"type": "string"},
                                "got": VALUE,
                                "expected": VALUE,
                            },
                        },
                    },
                },
            },
        },
    },
}
"""What a program that reads the file may rely on."""
PARTS = [
    *("machine", "limits", "self-test Qwen3-0.6B"),
    *("Qwen3-0.6B bf16", "Qwen3-0.6B nf4", "Qwen3-0.6B int8"),
    *("self-test Qwen3-8B", "Qwen3-8B bf16", "Qwen3-8B nf4", "Qwen3-8B int8", "gpu tests"),
]


def read(path: Path) -> dict:
    """Return the report after a check of its form."""
    found = json.loads(path.read_text())
    jsonschema.validate(found, SCHEMA)
    return found


def options(directory: Path, **changes) -> ReportOptions:
    given = ReportOptions(directory / "report.json", "cpu", models=("tiny",), say=lambda text: None)
    return replace(given, **changes)


def program(directory: Path, text: str) -> list[str]:
    """Return the command of a part's process that runs `text`, which can use `request`."""
    path = directory / "program.py"
    path.write_text(
        "import json, os, sys, time\n"
        "from planish.model.kernels.self_test.process import end_with_parent\n"
        "request = json.load(sys.stdin)\n"
        "end_with_parent(request['parent'])\n"
        "def write(**fields):\n    print(json.dumps(fields), flush=True)\n" + textwrap.dedent(text)
    )
    return [sys.executable, str(path)]


@pytest.mark.slow
def test_a_machine_without_a_gpu_reports_its_facts_and_nothing_else(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["doctor", "--gpu-report", str(path), "--device", "cpu"]) == 0
    parts = read(path)["parts"]
    assert list(parts) == PARTS
    assert parts["machine"]["status"] == DONE
    assert parts["machine"]["details"]["gpu"] == "not run here: no GPU"
    others = [part for name, part in parts.items() if name != "machine"]
    assert all((part["status"], part["reason"]) == (NOT_RUN, "no GPU") for part in others)
    printed = capsys.readouterr().out
    assert printed.count("not run here: no GPU") == len(PARTS) - 1
    assert str(path) in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_is_measured_from_loading_to_its_slowest_kernels(tmp_path, monkeypatch):
    """The real processes measure a tiny model on the CPU."""
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "kernels").symlink_to(Path.home() / ".cache/planish/kernels")
    printed: list[str] = []
    assert GpuReport(options(tmp_path, small=True, say=printed.append)).run()
    parts = read(tmp_path / "report.json")["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "machine": DONE,
        "limits": DONE,
        "self-test tiny": NOT_RUN,
        "tiny bf16": DONE,
        "tiny nf4": FAILED,
        "tiny int8": DONE,
        "gpu tests": NOT_RUN,
    }
    assert "multiple of 64" in parts["tiny nf4"]["reason"]
    lines = {line["what"]: line for line in parts["tiny int8"]["lines"]}
    assert all(lines["decode, 9 rows"][name] > 0 for name in ("got", "expected"))
    assert lines["decode, 9 rows"]["unit"] == "ms a step"
    assert lines["decode, 512 rows"]["got"].startswith("not run here: at most 256")
    assert lines["decode, 9 rows, top_p 0.9"]["got"] > 0
    assert lines["decode, 9 rows, without CUDA graphs"]["got"].startswith("not run here")
    assert lines["largest difference of sampled and trained logprobs"]["got"] < 0.01
    assert lines["train, sequences of 64 tokens"]["got"] > 0
    assert lines["memory: peak of everything"]["expected"] > 0
    assert 0 < len(parts["tiny int8"]["details"]["slowest_kernels"]) <= 10
    assert any("decode, 9 rows: expected" in text for text in printed)
    assert not (tmp_path / "home" / "random-models").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_report_that_was_killed_continues(tmp_path, monkeypatch):
    """SIGKILL ends the command in its second part; the part's process ends with it."""
    started = tmp_path / "started"
    monkeypatch.setenv("STARTED", str(started))
    command = program(
        tmp_path,
        """
        write(details={"run": time.time()})
        if request["part"] == "limits":
            open(os.environ["STARTED"], "w").write(str(os.getpid()))
            time.sleep(600)
        """,
    )
    code = f"""
from pathlib import Path
from planish.doctor.gpu.report import GpuReport, ReportOptions
path = Path({str(tmp_path / "report.json")!r})
GpuReport(ReportOptions(path, "cpu", models=(), small=True, command={command!r})).run()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(300)
    first = read(tmp_path / "report.json")["parts"]
    assert list(first) == ["machine"]
    while Path(f"/proc/{started.read_text()}/cmdline").exists() and _runs(int(started.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    again = program(tmp_path, "write(details={'bandwidth': 1.0, 'matmul_rate': 2.0})")
    assert GpuReport(options(tmp_path, models=(), small=True, command=again)).run()
    second = read(tmp_path / "report.json")["parts"]
    assert second["machine"] == first["machine"]
    assert second["limits"]["details"] == {"bandwidth": 1.0, "matmul_rate": 2.0}


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.slow
def test_the_time_limit_ends_a_part_which_the_next_call_repeats(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "MIN_PART_SECONDS", 0.0)
    text = "write(line={'what': 'early', 'got': 1.0, 'unit': '', 'expected': None})\n"
    command = program(tmp_path, text + "time.sleep(600)")
    given = options(tmp_path, models=(), small=True, minutes=6 / 60, command=command)
    began = time.monotonic()
    assert not GpuReport(given).run()
    assert time.monotonic() - began < 100
    [part] = read(given.path)["parts"].values()
    assert part["status"] == UNFINISHED
    assert [line["what"] for line in part["lines"]] in ([], ["early"])  # on a busy machine
    quick = program(tmp_path, "write(details={'bandwidth': 1.0, 'matmul_rate': 1.0})")
    assert GpuReport(replace(given, minutes=10.0, command=quick)).run()
    assert [part["status"] for part in read(given.path)["parts"].values()] == [DONE, DONE, NOT_RUN]


def test_no_part_is_begun_when_the_time_is_over(tmp_path):
    given = options(tmp_path, minutes=0.0, command=["/nowhere/python"])
    assert not GpuReport(given).run()
    assert not given.path.exists()


@pytest.mark.slow
def test_a_part_that_crashes_keeps_its_lines_and_its_whole_error(tmp_path):
    text = """
        write(line={"what": "first", "got": 2.0, "unit": "ms", "expected": 1.0})
        if request["part"] == "limits":
            raise RuntimeError("CUDA error: unspecified launch failure\\nCompile with DSA")
        """
    given = options(tmp_path, models=(), small=True, command=program(tmp_path, text))
    assert GpuReport(given).run()
    part = read(given.path)["parts"]["limits"]
    assert part["status"] == FAILED
    assert (
        "RuntimeError: CUDA error: unspecified launch failure\nCompile with DSA" in part["reason"]
    )
    assert part["lines"] == [{"what": "first", "got": 2.0, "unit": "ms", "expected": 1.0}]


def test_a_program_that_cannot_be_started_is_a_failed_part(tmp_path):
    given = options(tmp_path, models=(), small=True, command=["/nowhere/python"])
    assert GpuReport(given).run()
    assert "FileNotFoundError" in read(given.path)["parts"]["machine"]["reason"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"schema": 1, "software": {}, "parts": 3}']
)
def test_a_file_that_is_no_report_is_not_overwritten(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(UserError, match="no report of planish doctor"):
        ReportFile(path)
    assert path.read_text() == text


def test_a_report_of_other_software_is_not_continued(tmp_path):
    path = tmp_path / "report.json"
    ReportFile(path).add("machine", PartResult(DONE))
    found = json.loads(path.read_text())
    found["software"]["torch"] = "1.0"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match="another version of planish, torch or Triton"):
        ReportFile(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    file = ReportFile(tmp_path / "file" / "report.json")
    with pytest.raises(UserError, match="give --gpu-report another file"):
        file.add("machine", PartResult(DONE))


def test_the_file_has_nothing_personal(tmp_path, monkeypatch):
    user, host = "margarethe", socket.gethostname()
    monkeypatch.setenv("HOME", f"/home/{user}")
    monkeypatch.setenv("LOGNAME", user)
    scrub_names = gpu_report.ReportFile.add.__globals__["_personal_names"]
    scrub_names.cache_clear()
    reason = (
        f"OSError: /home/{user}/.triton/cache/AB/kernel.so on {host}, user {user}; GPU-1b2c3d4e-55; "
        f'File "/opt/venv/lib/python3.11/site-packages/triton/runtime/build.py", line 3'
    )
    path = tmp_path / "report.json"
    line = Line(f"~/{user}/x", reason)
    ReportFile(path).add(
        "machine", PartResult(FAILED, reason, lines=(line,), details={user: [reason]})
    )
    scrub_names.cache_clear()
    text = path.read_text()
    assert user not in text
    assert "1b2c3d4e" not in text
    assert "site-packages" not in text
    assert len(host) < 3 or host in ("localhost",) or host not in text
    assert "<path>/kernel.so" in text
    assert "<path>/build.py" in text


def test_scrubbing_leaves_other_texts_unchanged():
    for text in ("9.5 TFLOP/s", "GB/s", "and/or", "x / y", "H100 80GB HBM3", "sm_90a/ptx"):
        assert scrubbed(text) == text


def test_the_software_is_that_of_the_kernels():
    assert software().keys() == {"planish", "torch", "triton", "kernel_sources"}


def test_the_random_models_have_the_sizes_of_the_real_ones():
    assert num_bytes("Qwen3-8B") == pytest.approx(16.4e9, rel=0.01)
    assert num_bytes("Qwen3-0.6B") == pytest.approx(1.2e9, rel=0.01)
    assert set(gpu_report.MODELS) <= SHAPES.keys()


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128", "matmuls"),
        ("nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "matmuls"),
        ("four_bit_kernel", "matmuls"),
        ("_pieces_kernel", "attention"),
        ("shrink_kernel", "adapters"),
        ("_row_sums", "logits"),
        ("_rms_norm", "other"),
        ("_swiglu", "other"),
    ],
)
def test_kernels_are_grouped_by_their_names(kernel, group):
    assert group_of(kernel) == group


@pytest.mark.parametrize(
    "arguments",
    [
        ["--plan", "Qwen3-8B"],
        ["--gpu", "h100"],
        ["--gpu-report", "x.json", "--json"],
        ["--gpu-report", "x.json", "--quantize", "int8"],
        ["--gpu-report", "x.json", "--plan", "Qwen3-8B", "--gpu", "h100"],
    ],
)
def test_options_that_do_not_belong_together_are_errors(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 1
    assert "omit" in (text := capsys.readouterr().err) or "belong together" in text
    assert not os.listdir(tmp_path)
