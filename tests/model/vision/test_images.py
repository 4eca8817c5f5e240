"""Images in training and sampling equal transformers and PEFT, and bad images are refused."""

import io
import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from variants import slow_after

from planish import ServiceClient
from planish.engine.checkpoints.files import peft_config
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import Trainer
from planish.engine.training.trainer_settings import TrainerSettings
from planish.errors import DamagedFileError, UnsupportedError, UserError
from planish.images import MAX_IMAGE_PIXELS, ImageChunk
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.kernels.choose import choose_backend, triton_backend
from planish.model.layers.lora import LoraLayout
from planish.model.loading import load_decoder
from planish.model.vision import tower
from planish.model.vision.decoding import decode_image
from planish.model.vision.image_tokens import read_input, with_image_token
from planish.service import Sample
from planish.testing import tiny_model
from planish.testing_vision import tiny_vision_model
from planish.types import (
    Datum,
    EncodedTextChunk,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

CPU = torch.device("cpu")
MODEL_TYPES = [
    *("qwen3_vl", "gemma3", "gemma4", "gemma4_moe", "qwen3_5", "qwen2_5_vl", "qwen2_vl"),
    *("gemma4_unified", "qwen3_vl_moe", "qwen3_5_moe"),
]
START, END, IMAGE = 270, 271, 272
VISION_MODULES = r".*\b(visual|vision_tower|multi_modal_projector|embed_vision)\..*"
TEXT_TOKENS = 256


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image(width: int = 64, height: int = 48, seed: int = 0) -> ImageChunk:
    return ImageChunk(png(width, height, seed), "png")


def text(length: int, seed: int) -> EncodedTextChunk:
    tokens = np.random.default_rng(seed).integers(0, TEXT_TOKENS, length).tolist()
    return EncodedTextChunk(tokens)


def prompt(*chunks: ImageChunk | EncodedTextChunk) -> ModelInput:
    """Return an input with the tokens of vision around each image."""
    parts = []
    for chunk in chunks:
        parts += (
            [chunk]
            if isinstance(chunk, EncodedTextChunk)
            else [EncodedTextChunk([START]), chunk, EncodedTextChunk([END])]
        )
    return ModelInput(parts)


def inputs_with_images() -> list[ModelInput]:
    """Return inputs of which some share a prefix with an image, and one has no image."""
    shared = (text(5, 1), image(), text(3, 2))
    return [
        prompt(*shared, text(6, 3)),
        prompt(*shared, image(40, 90, 1), text(4, 4)),
        prompt(text(5, 1), image(64, 48, 2), text(4, 5)),
        prompt(*shared, text(6, 3), image(), text(2, 8)),
        prompt(text(7, 1)),
    ]


def load(path, dtype=torch.float32) -> BaseDecoder:
    config = ModelConfig.from_directory(path)
    return load_decoder(path, choose_backend(config, dtype, CPU, deterministic=False))


def random_adapter(decoder: BaseDecoder, seed: int = 0) -> Adapter:
    layout = LoraLayout(decoder.config, LoraConfig(rank=4))
    generator = torch.Generator().manual_seed(seed)
    noise = 0.05 * torch.randn(layout.size, generator=generator)
    return Adapter(layout, decoder.backend, layout.init(seed) + noise)


PROCESSORS = {
    "gemma3": Gemma3ImageProcessorPil,
    "gemma4": Gemma4ImageProcessorPil,
    "gemma4_unified": Gemma4ImageProcessorPil,
}


def joined_patches(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the patches of each token joined to one, for the unified models of Gemma 4."""
    images, positions = [], []
    for patches, places in zip(
        features["pixel_values"], features["image_position_ids"], strict=True
    ):
        tokens: dict[tuple[int, int], torch.Tensor] = {}
        for patch, (x, y) in zip(patches.view(-1, 4, 4, 3), places.tolist(), strict=True):
            if x >= 0:
                token = tokens.setdefault((y // 3, x // 3), torch.zeros(12, 12, 3))
                row, column = 4 * (y % 3), 4 * (x % 3)
                token[row : row + 4, column : column + 4] = patch
        ordered = sorted(tokens)
        padding = 70 - len(ordered)
        images.append(torch.stack([tokens[place] for place in ordered]).flatten(1))
        images[-1] = torch.cat([images[-1], torch.zeros(padding, 432)])
        positions.append(torch.tensor([[x, y] for y, x in ordered] + [[-1, -1]] * padding))
    return {"pixel_values": torch.stack(images), "image_position_ids": torch.stack(positions)}


class Reference:
    """transformers' model with PEFT's adapter, and its image processor."""

    def __init__(self, path, layout: LoraLayout, master: torch.Tensor) -> None:
        base: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        self.model_type, self.base = base.config.model_type, base
        processor = PROCESSORS.get(self.model_type, Qwen2VLImageProcessorPil)
        self.processor = processor.from_pretrained(path)
        fields = peft_config(layout, "")
        options = PeftConfig(
            r=layout.lora_config.rank,
            lora_alpha=32,
            target_modules=fields["target_modules"],
            target_parameters=fields.get("target_parameters"),
            exclude_modules=VISION_MODULES,
        )
        self.model = get_peft_model(base, options)
        self.parameters = dict(self.model.named_parameters())
        views = layout.views(master)
        for entry in layout.entries:
            self.parameter(entry).data.copy_(entry.to_peft(views[entry.name]))

    def parameter(self, entry) -> torch.Tensor:
        name = entry.peft_name
        if not name.startswith(
            ("model.language_model.", "lm_head")
        ):  # a model with a decoder of planish
            name = f"model.language_model.{name.removeprefix('model.')}"
        return self.parameters[f"base_model.model.{name}.default.weight"]

    def logits(self, model_input: ModelInput) -> tuple[list[int], torch.Tensor]:
        """Return the tokens, and the logits of all positions."""
        tokens, images = [], []
        for chunk in model_input.chunks:
            if isinstance(chunk, EncodedTextChunk):
                tokens += chunk.tokens
                continue
            images.append(Image.open(io.BytesIO(chunk.data)))
            tokens += [IMAGE] * self.num_tokens(images[-1])
        arguments = dict(self.processor(images=images, return_tensors="pt")) if images else {}
        ids = torch.tensor([tokens])
        if images:
            kinds = "token_type_ids" if self.model_type == "gemma3" else "mm_token_type_ids"
            arguments[kinds] = (ids == IMAGE).int()
            arguments.pop("num_crops", None)
            arguments.pop("num_soft_tokens_per_image", None)
        if images and self.model_type == "gemma4_unified":
            arguments |= joined_patches(arguments)
            # As in `generate`. Without it, layers without a window would attend in both directions.
            arguments["attention_mask"] = self.base.create_masks_for_generate(
                self.base.config,
                torch.zeros(1, len(tokens), 1),
                None,
                None,
                torch.arange(len(tokens))[None],
                arguments["mm_token_type_ids"],
            )
        return tokens, self.model(input_ids=ids, use_cache=False, **arguments).logits[0].float()

    def num_tokens(self, picture: Image.Image) -> int:
        if self.model_type == "gemma3":
            return 9
        features = self.processor(images=[picture], return_tensors="pt")
        if "num_soft_tokens_per_image" in features:
            return int(features["num_soft_tokens_per_image"][0])
        return int(features["image_grid_thw"].prod()) // 4

    def logprobs(self, model_input: ModelInput, targets: list[int]) -> torch.Tensor:
        _, logits = self.logits(model_input)
        return logits.log_softmax(-1)[range(len(targets)), targets]


def datum(model_input: ModelInput, length: int) -> Datum:
    targets = np.random.default_rng(length).integers(0, TEXT_TOKENS, length)
    return Datum(model_input, {"target_tokens": targets.tolist()})


def train(decoder, adapter, data: list[Datum], **options) -> list[np.ndarray]:
    """Return the trainer's logprobs, and add the gradient of their sum to the adapter."""
    trainer = Trainer(decoder, TrainerSettings(**options))
    work = trainer.forward_backward(adapter, data, "cross_entropy")
    while True:
        try:
            next(work)
        except StopIteration as end:
            return [output["logprobs"].to_numpy() for output in end.value.loss_fn_outputs]


def sample(sampler: Sampler, adapter, model_input: ModelInput, **options) -> SampleResponse:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, stop=[])
    op = Sample("nobody", model_input, options.pop("num_samples", 1), params, **options)
    sampler.validate(op)
    future: Future[SampleResponse] = Future()
    sampler.submit(op, adapter.snapshot(), adapter.version, future)
    while not future.done():
        sampler.step()
    return future.result()


@pytest.mark.parametrize("model_type", slow_after(5, MODEL_TYPES))
def test_logprobs_and_gradients_equal_peft(tmp_path, model_type):
    tiny_vision_model(tmp_path, model_type)
    decoder = load(tmp_path)
    adapter = random_adapter(decoder)
    reference = Reference(tmp_path, adapter.layout, adapter.master)
    inputs = inputs_with_images()
    lengths = [len(reference.logits(model_input)[0]) for model_input in inputs]
    data = [datum(*pair) for pair in zip(inputs, lengths, strict=True)]
    targets = [d.loss_fn_inputs["target_tokens"].to_numpy().tolist() for d in data]
    ours = train(decoder, adapter, data)
    theirs = [reference.logprobs(*pair) for pair in zip(inputs, targets, strict=True)]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=2e-4)
    (-torch.cat(theirs).sum()).backward()
    assert adapter.grad is not None
    gradient = adapter.layout.views(adapter.grad)
    largest = float(adapter.grad.abs().max())
    for entry in adapter.layout.entries:
        found, expected = entry.to_peft(gradient[entry.name]), reference.parameter(entry).grad
        torch.testing.assert_close(found, expected, atol=1e-4 * largest, rtol=1e-3)


@pytest.mark.parametrize("model_type", slow_after(4, MODEL_TYPES))
def test_sampled_and_trained_logprobs_agree(tmp_path, model_type):
    tiny_vision_model(tmp_path, model_type)
    decoder = load(tmp_path)
    adapter = random_adapter(decoder)
    # The prompt has several chunks of the prefix cache, and several steps prefill it.
    settings = SamplerSettings(max_prefill_tokens_per_step=80)
    sampler = Sampler(decoder, settings, str)
    model_input = prompt(text(50, 1), image(96, 96), text(20, 2), image(64, 48, 1), text(60, 3))
    length = len(read_input(model_input, decoder.images).tokens)
    for sequence in sample(sampler, adapter, model_input, num_samples=3).sequences:
        whole = model_input.append(EncodedTextChunk(sequence.tokens[:-1]))
        targets = [0] * (length - 1) + list(sequence.tokens)
        (trained,) = train(decoder, adapter, [Datum(whole, {"target_tokens": targets})])
        np.testing.assert_allclose(trained[length - 1 :], sequence.logprobs, atol=1e-4)


@pytest.mark.slow
def test_gemma3_reads_images_with_the_kernels_of_a_gpu(tmp_path):
    """The kernels are interpreted. torch computes the attention of images."""
    pytest.importorskip("triton")
    config = ModelConfig.from_directory(tiny_vision_model(tmp_path, "gemma3"))
    backend = triton_backend(config, torch.float32, CPU, ("attention", "tree attention"))
    found = []
    for decoder in (load_decoder(tmp_path, backend), load(tmp_path)):
        data = [datum(prompt(text(5, 1), image(), text(6, 3)), 22)]
        found += train(decoder, random_adapter(decoder), data)
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_cached_prefixes_belong_to_one_image(tmp_path):
    tiny_vision_model(tmp_path)
    decoder = load(tmp_path)
    adapter = random_adapter(decoder)
    sampler = Sampler(decoder, SamplerSettings(), str)
    chunks = (text(5, 1), image(128, 128), text(90, 2))
    first = sample(sampler, adapter, prompt(*chunks))
    again = sample(sampler, adapter, prompt(*chunks))
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, 160)
    assert first.sequences[0].tokens == again.sequences[0].tokens
    other = prompt(text(5, 1), image(128, 128, 7), text(90, 2))
    fresh = sample(Sampler(load(tmp_path), SamplerSettings(), str), adapter, other)
    beside = sample(sampler, adapter, other)
    assert beside.prompt_cache_hit_tokens == 0
    assert beside.sequences[0].logprobs == pytest.approx(fresh.sequences[0].logprobs, abs=1e-5)
    assert beside.sequences[0].logprobs != pytest.approx(first.sequences[0].logprobs, abs=1e-3)


def test_the_tower_runs_once_for_each_image(tmp_path):
    tiny_vision_model(tmp_path)
    decoder = load(tmp_path)
    adapter = random_adapter(decoder)
    inputs = inputs_with_images()
    lengths = [len(read_input(model_input, decoder.images).tokens) for model_input in inputs]
    data = [datum(*pair) for pair in zip(inputs, lengths, strict=True)]
    for _ in range(2):
        train(decoder, adapter, data, micro_batch_tokens=40)
    sampler = Sampler(decoder, SamplerSettings(), str)
    for model_input in inputs:
        sample(sampler, adapter, model_input)
    assert decoder.vision is not None
    assert decoder.vision.num_runs == 3


def test_features_beyond_the_limit_are_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tower, "MAX_FEATURE_BYTES", 1)
    tiny_vision_model(tmp_path)
    decoder = load(tmp_path)
    adapter = random_adapter(decoder)
    data = [datum(model_input, 28) for model_input in [prompt(image(), image(64, 48, 1))] * 2]
    first, second = (train(decoder, adapter, data[:1]) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    assert decoder.vision is not None
    assert decoder.vision.num_runs == 4


def test_prompt_logprobs_equal_transformers(tmp_path):
    tiny_vision_model(tmp_path)
    decoder = load(tmp_path)
    adapter = random_adapter(decoder)
    reference = Reference(tmp_path, adapter.layout, adapter.master)
    model_input = prompt(text(5, 1), image(), text(6, 3))
    tokens, logits = reference.logits(model_input)
    expected = logits[:-1].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
    sampler = Sampler(decoder, SamplerSettings(), str)
    response = sample(sampler, adapter, model_input, prompt_logprobs=True)
    found = np.array((response.prompt_logprobs or [])[1:], np.float32)
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=2e-4)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_positions_equal_transformers(tmp_path, model_type):
    tiny_vision_model(tmp_path, model_type)
    decoder = load(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).model
    for model_input in inputs_with_images()[:4]:
        tokens = read_input(model_input, decoder.images)
        ids = torch.tensor([with_image_token(tokens.tokens, IMAGE)])
        grids = torch.tensor([[1, 2 * i.grid[0], 2 * i.grid[1]] for i in tokens.images])
        positions, offset = model.get_rope_index(
            ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids
        )
        np.testing.assert_array_equal(tokens.rope_positions, positions[:, 0].numpy())
        assert tokens.rope_offset == int(offset)


def test_two_adapters_share_the_layers_and_images_of_gemma4(tmp_path):
    """Samples of two adapters in one batch equal those of each alone, also with cached prefixes."""
    decoder = load(tiny_vision_model(tmp_path, "gemma4"))
    assert decoder.backend.kv_spec.num_layers == 2  # Two of four layers have none of their own.
    adapters = [random_adapter(decoder, seed) for seed in (1, 2)]
    model_input = prompt(text(90, 1), image(), text(60, 2))
    sampler = Sampler(decoder, SamplerSettings(), str)
    params = SamplingParams(max_tokens=6, seed=3, stop=[])
    op = Sample("nobody", model_input, 2, params)
    futures: list[Future[SampleResponse]] = [Future() for _ in adapters]
    for adapter, future in zip(adapters, futures, strict=True):
        sampler.submit(op, adapter.snapshot(), str(id(adapter)), future)
    while sampler.busy:
        sampler.step()
    logprobs = []
    for adapter, future in zip(adapters, futures, strict=True):
        alone: Future[SampleResponse] = Future()
        fresh = Sampler(decoder, SamplerSettings(), str)
        for sampling, expected_hits in ((fresh, 0), (sampler, 192)):
            sampling.submit(op, adapter.snapshot(), str(id(adapter)), alone)
            while not alone.done():
                sampling.step()
            response = alone.result()
            assert response.prompt_cache_hit_tokens == expected_hits
            for found, expected in zip(future.result().sequences, response.sequences, strict=True):
                assert found.tokens == expected.tokens
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            alone = Future()
        logprobs.append(future.result().sequences[0].logprobs)
    assert logprobs[0] != logprobs[1]
    assert decoder.vision is not None
    assert decoder.vision.num_runs == 1


@pytest.mark.parametrize(
    ("model_type", "change", "problem"),
    [
        ("gemma4", {"patch_size": 8}, r"pooling_kernel_size \(8, 3\).* has \(4, 3\)"),
        ("gemma4_unified", {"pooling_kernel_size": 2}, r"\(4, 2\), and config.json has \(4, 3\)"),
        ("gemma4", {"do_resize": False}, "do_resize is false"),
        ("gemma4", {"max_soft_tokens": 71}, "no options of Gemma4ImageProcessorPil"),
    ],
)
def test_options_that_do_not_fit_gemma4_are_errors(tmp_path, model_type, change, problem):
    path = tiny_vision_model(tmp_path, model_type) / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    decoder = load(tmp_path)
    with pytest.raises(UserError, match=problem):
        read_input(prompt(image()), decoder.images)


def test_inputs_per_layer_need_a_padding_token(tmp_path):
    path = tiny_vision_model(tmp_path, "gemma4") / "config.json"
    fields = json.loads(path.read_text())
    fields["text_config"]["pad_token_id"] = None
    path.write_text(json.dumps(fields))
    with pytest.raises(UnsupportedError, match="pad_token_id is missing in text_config"):
        ModelConfig.from_directory(tmp_path)


def test_gemma3_reads_an_image_in_one_step(tmp_path):
    tiny_vision_model(tmp_path, "gemma3")
    decoder = load(tmp_path)
    sampler = Sampler(decoder, SamplerSettings(max_prefill_tokens_per_step=8), str)
    op = Sample("nobody", prompt(text(5, 1), image()), 1, SamplingParams(max_tokens=1))
    with pytest.raises(UserError, match="an image has 9 tokens.*max_prefill_tokens_per_step"):
        sampler.validate(op)
    adjacent = ModelInput([text(3, 1), image(), image(64, 48, 1)])
    with pytest.raises(UserError, match="image 1 of prompt .* follows image 0 without a token"):
        read_input(adjacent, decoder.images)


def test_a_processor_of_another_size_is_an_error(tmp_path):
    path = tiny_vision_model(tmp_path, "gemma3") / "preprocessor_config.json"
    fields = json.loads(path.read_text())
    for change, problem in (
        ({"size": {"height": 96, "width": 96}}, "96 x 96 pixels.*image_size in config.json is 48"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan is true"),
    ):
        path.write_text(json.dumps(fields | change))
        decoder = load(tmp_path)
        with pytest.raises(UserError, match=problem):
            train(decoder, random_adapter(decoder), [datum(prompt(image()), 11)])


def test_a_checkpoint_without_its_tower_reads_text_only(tmp_path):
    tensors = load_file(tiny_vision_model(tmp_path, "qwen3_5") / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    decoder = load(tmp_path)
    with pytest.raises(UnsupportedError, match="contains an image, and this model reads"):
        read_input(ModelInput([text(3, 1), image()]), decoder.images)


def test_a_tower_that_does_not_fit_is_an_error(tmp_path):
    tensors = load_file(tiny_vision_model(tmp_path, "qwen3_5") / "model.safetensors")
    del tensors["model.visual.pos_embed.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DamagedFileError, match="vision tower .*pos_embed"):
        load(tmp_path)


def test_a_penalty_of_the_prompt_ignores_images(tmp_path):
    tiny_vision_model(tmp_path)
    decoder = load(tmp_path)
    adapter = random_adapter(decoder)
    params = SamplingParams(max_tokens=4, seed=1, stop=[], repetition_penalty=1.5)
    op = Sample("nobody", prompt(text(5, 1), image(), text(6, 3)), 1, params)
    sampler = Sampler(decoder, SamplerSettings(), str)
    future: Future[SampleResponse] = Future()
    sampler.submit(op, adapter.snapshot(), adapter.version, future)
    while not future.done():
        sampler.step()
    assert len(future.result().sequences[0].tokens) == 4


def bomb(width: int, height: int) -> bytes:
    """Return a PNG file of a few kilobytes or megabytes whose pixels are all black."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def animation() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    return file.getvalue()


def deep() -> bytes:
    file = io.BytesIO()
    Image.new("I;16", (32, 32)).save(file, "PNG")
    return file.getvalue()


BAD_IMAGES: dict[str, tuple[bytes, Any, str]] = {
    "no image": (b"GIF89a", "png", "no png file"),
    "another format": (png(32, 32), "jpeg", "no jpeg file"),
    "half a file": (png(64, 64)[:2000], "png", "damaged"),
    "too many pixels": (bomb(4096, 4097), "png", f"at most {MAX_IMAGE_PIXELS:,} pixels"),
    "far too many pixels": (bomb(20000, 20000), "png", f"at most {MAX_IMAGE_PIXELS:,} pixels"),
    "too wide": (bomb((1 << 15) + 1, 200), "png", "at most 32,768"),
    "too narrow": (bomb(201 * 16, 16), "png", "aspect ratio"),
    "an animation": (animation(), "png", "animation of 2"),
    "16 bits": (deep(), "png", "color mode"),
}


@pytest.fixture(scope="module")
def vision_decoder(tmp_path_factory) -> BaseDecoder:
    return load(tiny_vision_model(tmp_path_factory.mktemp("vision")))


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_is_an_error_that_names_it(vision_decoder, name):
    data, file_format, problem = BAD_IMAGES[name]
    model_input = ModelInput([text(3, 1), ImageChunk(data, file_format)])
    with pytest.raises(UserError, match=r"the image in prompt.chunks\[1\].*" + problem):
        read_input(model_input, vision_decoder.images)


def test_text_after_an_input_continues_its_positions(vision_decoder):
    """As for a preempted sample, whose tokens continue the prompt."""
    model_input, added = inputs_with_images()[1], text(5, 9)
    extended = read_input(model_input, vision_decoder.images).extended(added.tokens)
    whole = read_input(model_input.append(added), vision_decoder.images)
    assert extended.tokens == whole.tokens
    assert extended.images == whole.images
    assert extended.rope_positions is not None
    assert whole.rope_positions is not None
    assert extended.rope_positions.tolist() == whole.rope_positions.tolist()
    assert extended.rope_offset == whole.rope_offset != 0


def test_the_largest_image_is_read(vision_decoder):
    (largest,) = read_input(
        ModelInput([ImageChunk(bomb(4096, 4096), "png")]), vision_decoder.images
    ).images
    assert largest.num_tokens == 256  # the limit of the processor


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_color_modes_equal_transformers(vision_decoder, mode):
    file = io.BytesIO()
    Image.open(io.BytesIO(png(40, 56))).convert(mode).save(file, "PNG")
    chunk = ImageChunk(file.getvalue(), "png")
    ours = vision_decoder.images.processor.inputs(decode_image(chunk, ""))["pixel_values"]
    processor = Qwen2VLImageProcessorPil.from_pretrained(vision_decoder.images.processor.directory)
    theirs = processor(images=[Image.open(file)], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(ours, theirs)


def test_a_photo_is_turned_upright(vision_decoder):
    file = io.BytesIO()
    photo = Image.open(io.BytesIO(png(64, 32)))
    exif = photo.getexif()
    exif[0x0112] = 6  # The camera was turned by 90 degrees.
    photo.save(file, "JPEG", exif=exif)
    found = vision_decoder.images.image(ImageChunk(file.getvalue(), "jpeg"), "image")
    assert found.grid == (4, 2)


def test_another_number_of_tokens_is_an_error(vision_decoder):
    good = ImageChunk(png(64, 48), "png", expected_tokens=12)
    assert len(read_input(ModelInput([good]), vision_decoder.images).tokens) == 12
    bad = ImageChunk(png(64, 48), "png", expected_tokens=13)
    with pytest.raises(UserError, match="has 12 tokens, and expected_tokens is 13"):
        read_input(ModelInput([bad]), vision_decoder.images)


def test_token_ids_beyond_the_vocabulary_are_no_images(vision_decoder):
    known = vision_decoder.images.image(image(), "image")
    with pytest.raises(UserError, match="outside the vocabulary"):
        read_input(prompt(text(3, 1), image()).append_int(known.first_token), vision_decoder.images)


def test_a_text_model_refuses_images(tmp_path):
    client = ServiceClient(models={"tiny": str(tiny_model(tmp_path))}, data_dir=tmp_path / "data")
    with_image = ModelInput([text(3, 1), image()])
    sampler = client.create_sampling_client(base_model="tiny")
    with pytest.raises(UnsupportedError, match="prompt contains an image, and this model reads"):
        sampler.sample(with_image, 1, SamplingParams(max_tokens=2)).result()
    trainer = client.create_lora_training_client("tiny", rank=4)
    data = [Datum(with_image, {"target_tokens": [0] * 15})]
    with pytest.raises(UnsupportedError, match=r"data\[0\].model_input contains an image"):
        trainer.forward_backward(data, "cross_entropy").result()
