"""Models of which transformers' code computes the layers equal transformers and PEFT."""

import logging
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM
from variants import slow_after

from planish import ServiceClient
from planish.engine.agreement import measure_difference
from planish.engine.checkpoints.files import peft_config
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import Trainer
from planish.engine.training.trainer_settings import TrainerSettings
from planish.errors import DamagedFileError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.hf.decoder import TransformersDecoder
from planish.model.kernels.choose import choose_backend
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.model.sequences.prefix_tree import pack
from planish.service import Sample
from planish.testing import VOCAB_SIZE, tiny_transformers_model
from planish.types import Datum, LoraConfig, ModelInput, SampleResponse, SamplingParams

CPU = torch.device("cpu")
FAMILIES = [
    "glm4",
    "lfm2",
    "granite",
    "mixtral",
    "deepseek_v3",
    "gemma2",
    "gemma4_text",
    "llama4_text",
    "lfm2_moe",
    "lfm3",
    "gemma4",
    "gemma3n_text",
    "nemotron_h",
    "falcon_h1",
    "bamba",
    "granitemoehybrid",
]


def load(path, dtype=torch.float32) -> TransformersDecoder:
    config = ModelConfig.from_directory(path)
    return TransformersDecoder(path, choose_backend(config, dtype, CPU, deterministic=False))


def random_adapter(decoder: TransformersDecoder, seed: int = 0, **options) -> Adapter:
    layout = LoraLayout(decoder.config, LoraConfig(rank=4, **options))
    generator = torch.Generator().manual_seed(seed)
    noise = 0.05 * torch.randn(layout.size, generator=generator)
    return Adapter(layout, decoder.backend, layout.init(seed) + noise)


def random_sequences() -> list[list[int]]:
    """Return token sequences of several lengths, most of which share a prefix."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB_SIZE, 40).tolist()
    return [
        *(shared[:30] + rng.integers(0, VOCAB_SIZE, extra).tolist() for extra in (2, 20, 35)),
        shared,
        rng.integers(0, VOCAB_SIZE, 9).tolist(),
    ]


def datums(sequences: list[list[int]]) -> list[Datum]:
    return [
        Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
        for tokens in sequences
    ]


def train(decoder, adapter, sequences, **options) -> list[np.ndarray]:
    """Return the trainer's logprobs, and add the gradient of their sum to the adapter."""
    work = Trainer(decoder, TrainerSettings(**options)).forward_backward(
        adapter, datums(sequences), "cross_entropy"
    )
    while True:
        try:
            next(work)
        except StopIteration as end:
            return [output["logprobs"].to_numpy() for output in end.value.loss_fn_outputs]


def peft_model(path, layout: LoraLayout, master: torch.Tensor):
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fields = peft_config(layout, "")
    peft = get_peft_model(
        base,
        PeftConfig(
            r=layout.lora_config.rank,
            lora_alpha=32,
            target_modules=fields["target_modules"],
            target_parameters=fields.get("target_parameters"),
            exclude_modules=fields.get("exclude_modules"),
        ),
    )
    parameters = dict(peft.named_parameters())
    views = layout.views(master)
    for entry in layout.entries:
        name = f"base_model.model.{entry.peft_name}.default.weight"
        parameters[name].data.copy_(entry.to_peft(views[entry.name]))
    return peft


def reference_logprobs(model, tokens: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([tokens])).logits[0].float()
    return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("family", slow_after(1, FAMILIES))
def test_logprobs_and_gradients_of_a_prefix_tree_equal_peft(tmp_path, family):
    tiny_transformers_model(tmp_path, family)
    decoder = load(tmp_path)
    # PEFT's adapter of a tied head also changes the embedding.
    adapter = random_adapter(decoder, train_unembed=not decoder.config.tied_head)
    sequences = random_sequences()
    ours = train(decoder, adapter, sequences)
    peft = peft_model(tmp_path, adapter.layout, adapter.master)
    theirs = [reference_logprobs(peft, tokens) for tokens in sequences]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=2e-4)
    (-torch.cat(theirs).sum()).backward()
    assert adapter.grad is not None
    parameters = dict(peft.named_parameters())
    gradient = adapter.layout.views(adapter.grad)
    largest = float(adapter.grad.abs().max())
    for entry in adapter.layout.entries:
        expected = parameters[f"base_model.model.{entry.peft_name}.default.weight"].grad
        found = entry.to_peft(gradient[entry.name])
        torch.testing.assert_close(found, expected, atol=1e-4 * largest, rtol=1e-3)


@pytest.mark.parametrize("family", slow_after(1, FAMILIES))
def test_sampled_and_trained_logprobs_agree(tmp_path, family):
    tiny_transformers_model(tmp_path, family)
    decoder = load(tmp_path)
    sampler = Sampler(decoder, SamplerSettings(), str)
    difference = measure_difference(decoder, sampler, Trainer(decoder))
    assert difference is not None
    assert difference < 1e-4


def test_samples_of_two_adapters_in_one_batch_equal_those_of_each_alone(tmp_path):
    tiny_transformers_model(tmp_path, "glm4")
    decoder = load(tmp_path)
    adapters = [random_adapter(decoder, seed) for seed in (1, 2)]
    sampler = Sampler(decoder, SamplerSettings(), str)

    def samples(chosen: list[Adapter]) -> list[list[float]]:
        futures: list[Future[SampleResponse]] = [Future() for _ in chosen]
        for adapter, future in zip(chosen, futures, strict=True):
            params = SamplingParams(max_tokens=10, seed=3, stop=[])
            op = Sample("s", ModelInput.from_ints(list(range(40))), 2, params)
            sampler.submit(op, adapter.snapshot(), str(id(adapter)), future)
        while sampler.busy:
            sampler.step()
        return [
            [*sequence.tokens, *sequence.logprobs]
            for future in futures
            for sequence in future.result().sequences
        ]

    together = samples(adapters)
    alone = samples(adapters[:1]) + samples(adapters[1:])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    assert together[0] != together[2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo2", "mixtral", "lfm2", "gemma4", "nemotron_h"])
def test_recomputing_layers_gives_the_same_gradient(tmp_path, family):
    tiny_transformers_model(tmp_path, family)
    decoder = load(tmp_path)
    gradients = []
    for recompute in (False, True):
        adapter = random_adapter(decoder)
        train(decoder, adapter, random_sequences(), recompute=recompute)
        gradients.append(adapter.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in ("gemma2", "glm4_moe", "mixtral", "lfm2")),
        ("granitemoehybrid", {"mamba_n_heads": 32, "mamba_d_state": 4}),
    ],
)
def test_the_estimate_of_stored_activations_is_what_modelling_code_stores(
    tmp_path, family, options
):
    tiny_transformers_model(tmp_path, family, hidden_size=256, intermediate_size=512, **options)
    decoder = load(tmp_path)
    layout = LoraLayout(decoder.config, LoraConfig(rank=8))
    weights = LoraWeights(layout, layout.init(0), decoder.backend, requires_grad=True)
    (batch,) = pack([np.arange(200) % VOCAB_SIZE], 200)
    parameters = {x.untyped_storage().data_ptr() for x in decoder.parameters()}
    stored: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        decoder.forward(
            torch.from_numpy(batch.tokens),
            torch.from_numpy(batch.positions),
            decoder.backend.tree_attention(batch),
            weights,
            recurrence=decoder.backend.tree_recurrence(batch),
        )
    estimate = len(batch) * sum(TrainerSettings()._bytes_by_layer(decoder.backend, 8))
    assert 0.9 * estimate < sum(stored.values()) < 1.15 * estimate


def test_a_model_of_transformers_takes_quantized_weights(tmp_path):
    tiny_transformers_model(tmp_path, "glm4")
    config = ModelConfig.from_directory(tmp_path)
    exact = load(tmp_path)
    backend = choose_backend(config, torch.float32, CPU, deterministic=False)
    quantized = TransformersDecoder(tmp_path, backend, "int8")
    sequences = random_sequences()
    exact_logprobs, found = (
        np.concatenate(train(decoder, random_adapter(decoder), sequences))
        for decoder in (exact, quantized)
    )
    difference = np.abs(found - exact_logprobs).max()
    assert 0 < difference < 0.3


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mamba", {}, "layers of the types linear_attention"),
        ("mamba2", {}, "no layer with attention"),
        ("zamba2", {}, "layers share weights"),
        ("gptj", {"rotary_dim": 8}, "AttentionInterface"),
        ("bert", {}, "not causal"),
    ],
)
def test_a_model_that_cannot_run_is_refused_with_the_reason(tmp_path, family, options, reason):
    tiny_transformers_model(tmp_path, family, **options)
    (tmp_path / "model.safetensors").unlink()  # The refusal comes before anything is loaded.
    with pytest.raises(UnsupportedError, match=reason):
        ModelConfig.from_directory(tmp_path)


def test_code_in_a_models_repository_is_never_run(tmp_path):
    tiny_transformers_model(tmp_path, "glm4")
    config = (tmp_path / "config.json").read_text()
    code = tmp_path / "modeling_evil.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto_map = '"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"},'
    for model_type, error in (("evil", "code of its own"), ("glm4", None)):
        changed = config.replace('"glm4"', f'"{model_type}"').replace("{", "{" + auto_map, 1)
        (tmp_path / "config.json").write_text(changed)
        if error:
            with pytest.raises(UnsupportedError, match=error):
                ModelConfig.from_directory(tmp_path)
        else:
            load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_engine_names_the_code_that_computes_the_layers(tmp_path, caplog):
    tiny_transformers_model(tmp_path / "glm4", "glm4")
    names = {"tiny": str(tmp_path / "glm4")}
    with (
        caplog.at_level(logging.INFO, logger="planish.engine.base_models"),
        ServiceClient(models=names, dtype="float32", data_dir=tmp_path / "data") as service,
    ):
        client = service.create_sampling_client(base_model="tiny")
        client.compute_logprobs(ModelInput.from_ints([1, 2, 3])).result()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "layers by transformers' Glm4ForCausalLM" in message
    assert "sampled and trained logprobs of some tokens differ by at most" in message


def test_determinism_that_torch_does_not_give_is_refused(tmp_path):
    tiny_transformers_model(tmp_path / "glm4", "glm4")
    names = {"tiny": str(tmp_path / "glm4")}
    with (
        ServiceClient(models=names, deterministic=True, data_dir=tmp_path / "data") as service,
        pytest.raises(UnsupportedError, match="deterministic=True.*Glm4ForCausalLM"),
    ):
        service.create_sampling_client(base_model="tiny")


def test_weights_that_do_not_fit_the_config_are_named(tmp_path):
    tiny_transformers_model(tmp_path, "glm4")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(DamagedFileError, match="missing: model.layers.2"):
        load(tmp_path)
