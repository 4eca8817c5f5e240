"""The files of an export, the rejected exports, and that an export is complete or absent."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.repocard import metadata_load
from safetensors.torch import save_file

from planish.commands.cli import main
from planish.errors import CheckpointError, DamagedFileError, UnsupportedError, UserError
from planish.export import model_card, weights
from planish.export.atomic_directory import atomic_directory
from planish.export.model_card import ExportBase
from planish.runlog.run_directory import RunDirectory
from planish.testing import tiny_model

MERGED = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "planish_export.json", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip


def copied(directory: Path, target: Path) -> Path:
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_the_command_exports_by_path(trained, tmp_path, monkeypatch, capsys):
    made = trained("llama")
    monkeypatch.setenv("PLANISH_MODELS", f"tiny={made.base}")
    words = ["export", made.path, "--data-dir", str(made.data_dir)]
    assert main([*words, str(tmp_path / "peft")]) == 0
    assert main([*words, str(tmp_path / "merged"), "--format", "merged", "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :])["files"] == sorted(MERGED)
    assert {file.name for file in (tmp_path / "merged").iterdir()} == MERGED
    assert {file.name for file in (tmp_path / "peft").iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "planish_export.json",
    }  # fmt: skip
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert list(tmp_path.glob(".*")) == []


def test_the_card_tells_what_is_known(trained, tmp_path):
    made = trained("qwen3", unembed=False, kind="weights")
    base = copied(made.base, tmp_path / "base")
    (base / "README.md").write_text(
        "---\nlicense: other\nlicense_name: test-licence\n---\n# A base\n"
    )
    out = weights.build_hf_model(
        base_model=str(base), adapter_path=made.files, output_path=tmp_path / "out"
    )
    card = Path(out, "README.md").read_text()
    header = metadata_load(Path(out, "README.md"))
    assert header is not None
    assert (header["license"], header["license_name"], header["library_name"]) == (
        "other",
        "test-licence",
        "transformers",
    )
    for told in (
        "a recipe",
        "chatml",
        "rank 4, alpha 32, factor 8",
        "`q_proj`",
        "| optimizer steps | 2 |",
    ):
        assert told in card
    assert str(tmp_path) not in card, "a path of this machine"
    out = weights.build_lora_adapter(adapter_path=made.files, output_path=tmp_path / "peft")
    card = Path(out, "README.md").read_text()
    assert "--lora-modules" in card
    assert "PEFT and TRL load it as it is" in card


def test_the_card_of_a_head_adapter_names_the_programs_that_refuse_it(trained, tmp_path):
    made = trained("qwen3", unembed=True, kind="weights")
    out = weights.build_lora_adapter(adapter_path=made.files, output_path=tmp_path / "peft")
    card = Path(out, "README.md").read_text()
    assert "TRL 1.16 rejects it" in card
    assert "`train_unembed=False` works in all three" in card
    assert "--lora-modules" not in card


def test_what_the_run_directory_knows_is_in_the_card(trained, tmp_path, monkeypatch):
    made = trained("llama")
    monkeypatch.setenv("PLANISH_MODELS", f"tiny={made.base}")
    config = {
        "learning_rate": 0.05,
        "log_path": "/home/somebody",
        "model_name": "/home/somebody/models/qwen",
        "dataset": "/home/somebody/two words/train.jsonl",
        "load_checkpoint_path": "tinker://run/weights/warm",
        "judge_url": "http://10.0.0.7:8000/v1",
        "judge": {
            "base_url": "http://10.0.0.7:8000/v1",
            "paths": ["~/somebody/x.parquet", "a=/home/somebody/b.jsonl"],
        },
        "system": "Say and/or, /no_think; then <b>stop</b>.",
    }
    with RunDirectory(tmp_path / "run", config) as run:
        run.log(0, {"reward/total": 0.125})
        run.log(1, {"reward/total": 0.5, "time/total": 2.0})
    row = {"name": "final", "batch": 2, "sampler_path": made.path, "final": True}
    (tmp_path / "run/checkpoints.jsonl").write_text(json.dumps(row) + "\n")
    options = ["--data-dir", str(made.data_dir)]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), *options]) == 0
    assert (
        main(
            ["export", made.path, str(tmp_path / "again"), "--run", str(tmp_path / "run"), *options]
        )
        == 0
    )
    for name in ("out", "again"):
        card = (tmp_path / name / "README.md").read_text()
        assert '"learning_rate": 0.05' in card
        assert "somebody" not in card
        assert "10.0.0.7" not in card
        for told in (
            "qwen",
            "train.jsonl",
            "tinker://run/weights/warm",
            "x.parquet",
            "a=b.jsonl",
            config["system"],
        ):
            assert f'"{told}"' in card
        assert "Metrics of its step 1" in card
        assert "| `reward/total` | 0.5 |" in card
    other = made.path.replace("final", "other")
    assert (
        main(["export", other, str(tmp_path / "no"), "--run", str(tmp_path / "run"), *options]) == 1
    )
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("name", "renderer"), [("Qwen/Qwen3-8B", "`qwen3`"), ("nobody/nothing", "not recorded")]
)
def test_the_card_names_the_default_renderer_if_none_is_recorded(name, renderer):
    assert model_card._default_renderer(ExportBase(name, None)).endswith(renderer)


def test_only_the_embedded_model_has_a_licence_without_a_card(tmp_path):
    base = tiny_model(tmp_path / "base")
    assert ExportBase(str(base), base).license() == {}
    assert ExportBase("HuggingFaceTB/SmolLM2-135M-Instruct", base).license() == {}
    assert ExportBase("Qwen/Qwen3-8B", None).license() == {}


def test_an_adapter_is_written_where_the_base_is_not(trained, tmp_path):
    made = trained("llama")
    out = weights.build_lora_adapter(
        adapter_path=made.files, output_path=tmp_path / "out", base_model="Nobody/Nothing"
    )
    assert (
        json.loads(Path(out, "adapter_config.json").read_text())["base_model_name_or_path"]
        == "Nobody/Nothing"
    )
    assert "base_model: Nobody/Nothing" in Path(out, "README.md").read_text()


@pytest.mark.parametrize("build", [weights.build_hf_model, weights.build_lora_adapter])
def test_other_weights_are_taken_only_if_named(build, trained, tmp_path, monkeypatch):
    made = trained("llama")
    other = tiny_model(tmp_path / "other", seed=5)
    with pytest.raises(CheckpointError, match="other weights"):
        build(adapter_path=made.files, output_path=tmp_path / "out", models={"tiny": str(other)})
    assert not (tmp_path / "out").exists()
    out = build(base_model=str(other), adapter_path=made.files, output_path=tmp_path / "out")
    assert "another base model" in Path(out, "README.md").read_text()
    narrow = tiny_model(tmp_path / "narrow", hidden_size=32)
    with pytest.raises(CheckpointError, match="base model that the adapter was trained on"):
        build(base_model=str(narrow), adapter_path=made.files, output_path=tmp_path / "narrow-out")


def test_altered_files_are_rejected(trained, tmp_path):
    made = trained("llama")
    altered = copied(made.files, tmp_path / "altered")
    data = bytearray((altered / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (altered / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(DamagedFileError, match="SHA-256"):
        weights.build_lora_adapter(adapter_path=altered, output_path=tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"use_dora": True}, UnsupportedError, "use_dora"),
        ({"bias": "all"}, UnsupportedError, "bias"),
        ({"modules_to_save": ["lm_head"]}, DamagedFileError, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, DamagedFileError, "rank 2"),
        ({"layer_replication": [[0, 1]]}, UnsupportedError, "layer_replication"),
        ({"peft_type": "LOHA"}, UnsupportedError, "peft_type"),
        ({"r": 0}, DamagedFileError, "r is 0"),
        ({"r": 3}, DamagedFileError, "rank 3"),
    ],
)
def test_adapters_other_than_plain_lora_are_rejected(change, error, told, trained, tmp_path):
    made = trained("llama")
    adapter = copied(made.files, tmp_path / "adapter")
    (adapter / "planish.json").unlink()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=told):
        weights.build_hf_model(
            base_model=str(made.base), adapter_path=adapter, output_path=tmp_path / "out"
        )


def test_invalid_arguments_are_rejected_before_any_work(trained, tmp_path, capsys):
    made = trained("llama")
    options = ["--data-dir", str(made.data_dir)]
    for words, told in (
        ([str(tmp_path / "nothing"), str(tmp_path / "out")], "neither the path"),
        (["tinker://no:train:0/weights/x", str(tmp_path / "out")], "no checkpoint"),
        ([made.path, str(tmp_path / "out"), "--shard-mib", "0"], "--shard-mib"),
    ):
        assert main(["export", *words, *options]) == 1
        assert told in capsys.readouterr().err
    with pytest.raises(UserError, match="dtype"):
        weights.build_hf_model(adapter_path=made.files, output_path=tmp_path / "out", dtype="int8")
    with pytest.raises(CheckpointError, match="adapter_config.json, so it is not an adapter"):
        weights.build_hf_model(adapter_path=made.base, output_path=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_float16_that_overflows_is_rejected(tmp_path):
    base = tiny_model(tmp_path / "base")
    rows = {"r": 1, "lora_alpha": 1, "peft_type": "LORA"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(rows))
    name = "base_model.model.model.layers.0.mlp.up_proj"
    pair = {
        f"{name}.lora_A.weight": torch.full((1, 64), 300.0),
        f"{name}.lora_B.weight": torch.full((96, 1), 300.0),
    }
    save_file(pair, tmp_path / "adapter/adapter_model.safetensors")
    arguments = {"base_model": str(base), "adapter_path": tmp_path / "adapter"}
    with pytest.raises(UserError, match="float16"):
        weights.build_hf_model(**arguments, output_path=tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    weights.build_hf_model(**arguments, output_path=tmp_path / "out", dtype="bfloat16")


def fill_half(out: Path) -> None:
    with atomic_directory(out, marker="made.json", overwrite=True) as partial:
        (partial / "made.json").write_text("third")
        raise RuntimeError


def test_what_is_there_stays_unless_it_is_an_export(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with (
            pytest.raises(UserError, match="mine"),
            atomic_directory(mine, marker="made.json", overwrite=overwrite),
        ):
            pytest.fail("it was begun")
    assert (mine / "thesis.tex").read_text() == "years of work"
    out = tmp_path / "out"
    out.mkdir()  # an empty one may be there
    for text in ("first", "second"):
        with atomic_directory(out, marker="made.json", overwrite=True) as partial:
            (partial / "made.json").write_text(text)
        assert (out / "made.json").read_text() == text
    with (
        pytest.raises(UserError, match="exists already"),
        atomic_directory(out, marker="made.json"),
    ):
        pytest.fail("it was begun")
    with pytest.raises(RuntimeError):
        fill_half(out)
    assert (out / "made.json").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_an_existing_target_is_rejected_before_any_reading(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    missing = "tinker://no/weights/no"
    assert main(["export", missing, str(tmp_path), "--data-dir", str(tmp_path / "data")]) == 1
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(UserError, match="exists already"):
        weights.build_hf_model(adapter_path=tmp_path / "no", output_path=tmp_path)


KILLED = """
import sys, time
from pathlib import Path
from planish.export.atomic_directory import atomic_directory
with atomic_directory(Path(sys.argv[1]), marker="made.json") as partial:
    (partial / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_killed_export_leaves_nothing_that_looks_whole(tmp_path):
    out = tmp_path / "out"
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    with writer, writer.stdout:
        assert writer.stdout.readline() == "writing\n"
        with (
            pytest.raises(UserError, match="another process"),
            atomic_directory(out, marker="made.json"),
        ):
            pytest.fail("two write one directory")
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert not out.exists()
    with atomic_directory(out, marker="made.json") as partial:
        (partial / "made.json").write_text("whole")
    assert sorted(path.name for path in out.iterdir()) == ["made.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_every_file_has_the_mode_that_the_umask_allows(trained, tmp_path):
    made = trained("llama", kind="weights")
    before = os.umask(0o027)
    try:
        options = {"adapter_path": made.files}
        weights.build_lora_adapter(**options, output_path=tmp_path / "peft")
        weights.build_hf_model(
            **options, base_model=str(made.base), output_path=tmp_path / "merged"
        )
    finally:
        os.umask(before)
    files = [file for name in ("peft", "merged") for file in (tmp_path / name).iterdir()]
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == dict.fromkeys(
        {file.name for file in files}, "0o640"
    )
    saved = {oct(file.stat().st_mode & 0o777) for file in made.files.iterdir()}
    assert saved == {oct(0o666 & ~before)}


def test_a_base_in_the_hubs_cache_is_named_as_the_hub_names_it(trained, tmp_path, monkeypatch):
    made = trained("llama", unembed=False)
    snapshot = tmp_path / "models--some-org--Tiny-1.0/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    copied(made.base, snapshot)
    monkeypatch.setenv("PLANISH_MODELS", f"tiny={snapshot}")
    out = Path(weights.build_lora_adapter(adapter_path=made.files, output_path=tmp_path / "peft"))
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some-org/Tiny-1.0"
    header = metadata_load(out / "README.md")
    assert header is not None
    assert header["base_model"] == "some-org/Tiny-1.0"
    monkeypatch.setenv("PLANISH_MODELS", f"tiny={made.base}")
    local = weights.build_lora_adapter(adapter_path=made.files, output_path=tmp_path / "local")
    card = Path(local, "README.md").read_text()
    assert "`tiny` is a local name of the base model" in card
    assert "base_model_name_or_path" in card
