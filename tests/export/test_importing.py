"""Adapters that PEFT saved become checkpoints with PEFT's logprobs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import FLOAT32, MERGED, imported_logprobs, loaded, model_logprobs, saved, service
from safetensors.torch import load_file, save_file
from trained_adapters import TOKENS

from planish import AdamParams, Datum, ModelInput, ServiceClient
from planish.client.checkpoint_records import LocalRecords
from planish.commands.cli import main
from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import (
    CheckpointError,
    DamagedFileError,
    UnknownModelError,
    UnsupportedError,
    UserError,
)
from planish.export import weights
from planish.export.importing import ImportedAdapter, import_adapter
from planish.testing import tiny_model
from planish.types import CheckpointPath

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = {
    "all linears": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "q and v alone": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "the head too": {"r": 3, "lora_alpha": 7, "target_modules": [*ALL, "lm_head"]},
    "rsLoRA": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "ranks by module": {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 6, "layers.0.mlp.up_proj": 1},
        "alpha_pattern": {"q_proj": 3},
    },
    "some layers": {"r": 4, "lora_alpha": 4, "target_modules": ALL, "layers_to_transform": [1]},
}


@pytest.fixture(scope="module", name="base")
def _base(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model", "llama", tied=False)


# PEFT says so when it saves the base model's head or embedding beside their adapters.
pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERT_VARIANTS = {
    "experts and attention": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "target_parameters": EXPERTS,
    },
    # PEFT adapts the experts for these names, with twice the rank for gate and up together.
    "names of linears": {"r": 2, "lora_alpha": 6, "target_modules": ALL},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_imported_logprobs_equal_peft_and_training_continues(base, tmp_path, variant):
    check_import(base, tmp_path, VARIANTS[variant])


# PEFT looks for its own patterns among modules, and experts are parameters.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("variant", EXPERT_VARIANTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_adapters_of_experts_are_imported(tmp_path, variant, family):
    base = tiny_model(tmp_path / "base", family, tied=False)
    check_import(base, tmp_path, EXPERT_VARIANTS[variant])


@pytest.mark.parametrize("parameter", EXPERTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_of_one_linear_of_the_experts_is_imported(tmp_path, family, parameter):
    """PEFT names the matrices of a single parameter the same, whichever parameter it is."""
    base = tiny_model(tmp_path / "base", family, tied=False)
    expected = saved(base, tmp_path / "adapter", r=4, target_parameters=[parameter])
    found = import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    assert imported_logprobs(base, tmp_path / "data", found) == pytest.approx(expected, abs=FLOAT32)
    merged = weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "out")
    assert model_logprobs(loaded(merged)) == pytest.approx(expected, abs=MERGED)


def quantized_service(base: Path, data: Path, scheme: str | None) -> ServiceClient:
    return ServiceClient(
        models={str(base): str(base)}, data_dir=data, dtype="float32", quantize=scheme
    )


def check_scheme(base: Path, data: Path, found: ImportedAdapter) -> None:
    """Check that the imported adapter needs a base quantized with int8."""
    assert found.quantize == "int8"
    with (
        quantized_service(base, data, None) as client,
        pytest.raises(
            CheckpointError, match="quantized with int8.*start the engine with quantize='int8'"
        ),
    ):
        client.create_training_client_from_state(str(found.path))
    with quantized_service(base, data, "int8") as client:
        client.create_training_client_from_state(str(found.path))


def test_an_import_names_the_scheme_that_was_given(base, tmp_path, capsys):
    saved(base, tmp_path / "adapter", **VARIANTS["all linears"])
    store = CheckpointStore(tmp_path / "data")
    found = import_adapter(tmp_path / "adapter", store, quantize="int8")
    check_scheme(base, tmp_path / "data", found)
    command = ["checkpoints", "import", str(tmp_path / "adapter"), "--quantize", "int8"]
    main([*command, "--data-dir", str(tmp_path / "data"), "--overwrite"])
    assert f"of {base} quantized with int8" in capsys.readouterr().out
    assert store.manifest(found.path).quantize == "int8"
    with pytest.raises(UserError, match=r"quantize='int4': give 'int8' or 'nf4'"):
        import_adapter(tmp_path / "adapter", store, quantize="int4")
    with pytest.raises(UserError, match="not a multiple of 64"):
        import_adapter(tmp_path / "adapter", store, quantize="nf4")


def test_downloads_and_exports_name_the_scheme_to_another_machine(base, tmp_path):
    with quantized_service(base, tmp_path / "first", "int8") as client:
        trainer = client.create_lora_training_client(str(base), rank=2, seed=0)
        path = trainer.save_state("x").result().path
    download, export = tmp_path / "download", tmp_path / "export"
    download.mkdir()
    LocalRecords(tmp_path / "first").download(path, download)
    weights.build_lora_adapter(
        base_model=str(base), adapter_path=str(download), output_path=str(export)
    )
    for source in (download, export):
        store = CheckpointStore(tmp_path / f"second-{source.name}")
        found = import_adapter(source, store, base_model=str(base))
        check_scheme(base, store.directory, found)
        with pytest.raises(UserError, match="trained on base weights quantized with int8; leave"):
            import_adapter(source, store, base_model=str(base), quantize="nf4")
    marker = json.loads((export / "planish_export.json").read_text())
    marker["base_quantization"] = "int3"
    (export / "planish_export.json").write_text(json.dumps(marker))
    with pytest.raises(UnsupportedError, match="scheme 'int3'; this planish has int8, nf4"):
        import_adapter(export, store, base_model=str(base))


def check_import(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = saved(base, tmp_path / "adapter", **options)
    store = CheckpointStore(tmp_path / "data")
    found = import_adapter(tmp_path / "adapter", store)
    assert str(found.path) == "tinker://imported-adapter/weights/imported"
    assert found.base_model == str(base)
    with service(base, tmp_path / "data") as client:
        prompt = ModelInput.from_ints(TOKENS)
        sampler = client.create_sampling_client(model_path=str(found.path))
        _, *logprobs = sampler.compute_logprobs(prompt).result()
        plain = client.create_sampling_client(base_model=str(base))
        _, *without = plain.compute_logprobs(prompt).result()
        trainer = client.create_training_client_from_state_with_optimizer(str(found.path))
        datum = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})
        losses = []
        for _ in range(3):
            pending = trainer.forward_backward([datum], "cross_entropy")
            trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
            losses.append(pending.result().metrics["loss:sum"])
        files = store.files(found.path)
        after = trainer.save_state("after").result().path
    assert logprobs == pytest.approx(expected, abs=FLOAT32)
    assert logprobs != pytest.approx(without, abs=0.05)
    assert losses[0] == pytest.approx(-sum(expected), rel=1e-4)
    assert losses[2] < losses[0]
    untouched_stays_zero(files["adapter_model.safetensors"], store, after, tmp_path / "adapter")


def untouched_stays_zero(before: Path, store, after: str, adapter: Path) -> None:
    """Check that linears without adapter, and the padding of a smaller rank, are not trained."""

    old = load_file(before)
    new = load_file(store.files(CheckpointPath.parse(after))["adapter_model.safetensors"])
    changed = {name for name in new if not torch.equal(old[name], new[name])}
    theirs = {name for name in load_file(adapter / "adapter_model.safetensors") if "lora_" in name}
    assert changed == theirs
    assert all(torch.equal(new[name] != 0, old[name] != 0) for name in new)


def test_unsloth_and_services_name_tensors_and_the_head_otherwise(base, tmp_path):
    expected = saved(base, tmp_path / "adapter", **VARIANTS["the head too"])
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = {
        name.removeprefix("base_model.model.").replace("lm_head", "model.unembed_tokens"): tensor
        for name, tensor in load_file(file).items()
        if "lora_" in name
    }
    save_file(tensors, file)
    found = import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"), name="other")
    assert imported_logprobs(base, tmp_path / "data", found) == pytest.approx(expected, abs=FLOAT32)


def test_the_command_prints_the_path_and_what_to_know(base, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PLANISH_BASE_URL", raising=False)
    saved(base, tmp_path / "my adapter", **VARIANTS["ranks by module"], lora_dropout=0.1)
    words = ["checkpoints", "import", str(tmp_path / "my adapter"), "--data-dir", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("tinker://imported-my-adapter/weights/imported: rank 6, ")
    assert "ranks 1, 2, 6 are kept" in printed
    assert "lora_dropout=0.1 is not applied" in printed
    assert main(words) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rank"] == 6
    assert main([*words, "--base-url", "http://127.0.0.1:1"]) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_dora": True}, "use_dora is True, and DoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
)
def test_unsupported_lora_variants_are_rejected_by_name(base, tmp_path, change, named):
    saved(base, tmp_path / "adapter", **VARIANTS["q and v alone"])
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UnsupportedError, match=named):
        import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_unsupported_target_modules_are_rejected_by_name(base, tmp_path):
    saved(base, tmp_path / "adapter", r=4, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(UnsupportedError, match="lora_embedding_A"):
        import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    saved(base, tmp_path / "wide", r=300, target_modules=["q_proj"])
    with pytest.raises(UnsupportedError, match="rank 300 is above 256"):
        import_adapter(tmp_path / "wide", CheckpointStore(tmp_path / "data"))


def test_a_fully_trained_head_is_rejected(base, tmp_path):
    saved(base, tmp_path / "adapter", **VARIANTS["the head too"])
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    [head] = [name for name in tensors if name.endswith("lm_head.base_layer.weight")]
    save_file({**tensors, head: tensors[head] * 1.5}, file)
    with pytest.raises(UnsupportedError, match="lm_head.base_layer.weight, which planish"):
        import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))


def test_a_base_model_that_is_elsewhere_is_named_with_the_option(base, tmp_path):
    saved(base, tmp_path / "adapter", **VARIANTS["q and v alone"])
    file = tmp_path / "adapter/adapter_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "base_model_name_or_path": "/root/models/llama"}))
    store = CheckpointStore(tmp_path / "data")
    message = r"/root/models/llama(?s:.*)adapter_config.json names this .* give --base-model"
    with pytest.raises(UnknownModelError, match=message):
        import_adapter(tmp_path / "adapter", store)
    with pytest.raises(UnknownModelError, match=message):
        weights.build_hf_model(adapter_path=tmp_path / "adapter", output_path=tmp_path / "new")
    assert import_adapter(tmp_path / "adapter", store, base_model=str(base)).base_model == str(base)


def test_an_adapter_that_changes_nothing_is_reported(base, tmp_path):
    """Programs that shard a model's weights have saved such files."""
    saved(base, tmp_path / "adapter", **VARIANTS["q and v alone"])
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: t * ("lora_A" in name) for name, t in tensors.items()}, file)
    found = import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    assert f"all matrices lora_B of {file} are 0, so it changes nothing" in found.notes


def test_an_adapter_of_mlx_is_named(tmp_path):
    save_file(
        {"model.layers.0.self_attn.q_proj.lora_a": torch.ones(64, 4)},
        tmp_path / "adapters.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "lora", "num_layers": 8}')
    with pytest.raises(UnsupportedError, match=r"an adapter of mlx-lm, .* mlx_lm.fuse"):
        import_adapter(tmp_path, CheckpointStore(tmp_path / "data"))


def test_files_that_are_not_what_they_should_be_are_named(base, tmp_path):
    store = CheckpointStore(tmp_path / "data")
    with pytest.raises(CheckpointError, match="so it is not an adapter"):
        import_adapter(tmp_path, store)
    adapter = tmp_path / "adapter"
    saved(base, adapter, **VARIANTS["q and v alone"])
    other = tiny_model(tmp_path / "other", "llama", hidden_size=32)
    with pytest.raises(CheckpointError, match="that the adapter was trained on"):
        import_adapter(adapter, store, base_model=str(other))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first] * float("nan")}, file)
    with pytest.raises(DamagedFileError, match="NaN or infinity"):
        import_adapter(adapter, store)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, file)
    with pytest.raises(DamagedFileError, match="lacks lora_A or lora_B"):
        import_adapter(adapter, store)
    file.write_bytes(b"no safetensors")
    with pytest.raises(DamagedFileError, match="cannot be read"):
        import_adapter(adapter, store)
    file.rename(adapter / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="is a pickle"):
        import_adapter(adapter, store)
    config = adapter / "adapter_config.json"
    save_file(tensors, file)
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "r": 0}))
    with pytest.raises(DamagedFileError, match="r is 0"):
        import_adapter(adapter, store)
    config.write_text(json.dumps({**fields, "base_model_name_or_path": None}))
    with pytest.raises(UserError, match="--base-model"):
        import_adapter(adapter, store)


@pytest.mark.parametrize(
    ("name", "unquantized", "scheme"),
    [
        ("unsloth/Qwen3-0.6B-unsloth-bnb-4bit", "unsloth/Qwen3-0.6B", "nf4"),
        ("unsloth/llama-3-8b-Instruct-bnb-4bit", "unsloth/llama-3-8b-Instruct", "nf4"),
        ("someone/model-bnb-8bit", "someone/model", "int8"),
        ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B", "nf4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-7B-Instruct", "int8"),
    ],
)
def test_a_quantized_base_is_rejected_with_its_unquantized_model(
    base, tmp_path, name, unquantized, scheme
):
    """The name alone decides, before anything is downloaded."""
    saved(base, tmp_path / "adapter", **VARIANTS["q and v alone"])
    store = CheckpointStore(tmp_path / "data")
    told = rf"unquantized model '{unquantized}' with `--quantize {scheme}`"
    with pytest.raises(UnsupportedError, match=told):
        import_adapter(tmp_path / "adapter", store, base_model=name)
    # A copy on this machine, whose config.json says so.
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    local = tmp_path / name.rpartition("/")[2]
    local.mkdir()
    fields = json.loads((base / "config.json").read_text()) | {"quantization_config": config}
    (local / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedError, match=r"unquantized model .* with `--quantize"):
        import_adapter(tmp_path / "adapter", store, base_model=str(local))


def test_a_quantized_name_may_be_mapped_to_the_unquantized_model(base, tmp_path):
    expected = saved(base, tmp_path / "adapter", **VARIANTS["q and v alone"])
    name = "unsloth/tiny-bnb-4bit"
    store = CheckpointStore(tmp_path / "data")
    found = import_adapter(tmp_path / "adapter", store, base_model=name, models={name: str(base)})
    with ServiceClient(
        models={name: str(base)}, data_dir=store.directory, dtype="float32"
    ) as client:
        sampler = client.create_sampling_client(model_path=str(found.path))
        _, *logprobs = sampler.compute_logprobs(ModelInput.from_ints(TOKENS)).result()
    assert logprobs == pytest.approx(expected, abs=FLOAT32)


def test_fields_that_planish_does_not_know_are_reported(base, tmp_path):
    adapter = tmp_path / "adapter"
    saved(base, adapter, **VARIANTS["all linears"])
    store = CheckpointStore(tmp_path / "data")
    assert not any("does not know" in note for note in import_adapter(adapter, store).notes)
    file = adapter / "adapter_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "use_new_kind": True, "other_kind": None, "n": 3}))
    notes = import_adapter(adapter, store, overwrite=True).notes
    assert any(
        "2 fields that planish does not know and does not use: n, use_new_kind" in note
        for note in notes
    )


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."]
)
def test_names_with_wrappers_of_torch_are_those_of_the_modules(base, tmp_path, wrapper):
    """torch.compile, FSDP and activation checkpointing wrap modules, and some files keep that."""
    saved(base, tmp_path / "adapter", **VARIANTS["q and v alone"])
    store = CheckpointStore(tmp_path / "data")
    path = import_adapter(tmp_path / "adapter", store).path
    expected = load_file(store.files(path)["adapter_model.safetensors"])
    change_names(tmp_path / "adapter", lambda name: name.replace(".layers.", f".{wrapper}layers."))
    assert import_adapter(tmp_path / "adapter", store, overwrite=True).path == path
    for name, tensor in load_file(store.files(path)["adapter_model.safetensors"]).items():
        assert torch.equal(tensor, expected[name])
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name.replace(wrapper, ""): t.clone() for name, t in tensors.items()}, file)
    with pytest.raises(DamagedFileError, match="are the same tensor"):
        import_adapter(tmp_path / "adapter", store, overwrite=True)


def change_names(adapter: Path, change: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda name: name.replace(".weight", ".policy.weight"), "under the adapter's own name"),
        (lambda name: name.replace("lora_B.weight", "lora_B.bias"), "the bias of a matrix"),
        (
            lambda name: name.replace("lora_A.weight", "lora_magnitude_vector"),
            "magnitude vector of DoRA",
        ),
    ],
)
def test_tensors_that_no_merge_can_represent_are_named(base, tmp_path, change, told):
    saved(base, tmp_path / "adapter", **VARIANTS["q and v alone"])
    change_names(tmp_path / "adapter", change)
    with pytest.raises(UnsupportedError, match=told) as error:
        import_adapter(tmp_path / "adapter", CheckpointStore(tmp_path / "data"))
    assert "NEW_MODEL" not in str(error.value)


def test_targets_without_matrices_are_reported(base, tmp_path):
    """An interrupted copy, or a program that skipped layers, may have lost them."""
    saved(base, tmp_path / "adapter", **VARIANTS["all linears"])
    store = CheckpointStore(tmp_path / "data")
    assert "incomplete" not in "".join(import_adapter(tmp_path / "adapter", store).notes)
    file = tmp_path / "adapter/adapter_model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if "layers.1.mlp" not in name}
    save_file({name: t for name, t in kept.items() if "v_proj" not in name}, file)
    (note,) = [
        note
        for note in import_adapter(tmp_path / "adapter", store, overwrite=True).notes
        if "incomplete" in note
    ]
    assert note.startswith("5 linears are target_modules of")
    assert "such as model.layers.0.self_attn.v_proj" in note


def test_an_adapter_given_as_a_base_model_is_named(base, tmp_path):
    saved(base, tmp_path / "adapter", **VARIANTS["q and v alone"])
    with (
        ServiceClient(data_dir=tmp_path / "data") as client,
        pytest.raises(UserError, match="is an adapter, not a model.*planish checkpoints import"),
    ):
        client.create_sampling_client(base_model=str(tmp_path / "adapter"))
