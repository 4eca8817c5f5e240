"""Images in messages: prompts, training examples, and what is refused."""

import base64
import io
import json
import shutil
from typing import Any

import pytest
import torch
from family_tokenizers import template
from PIL import Image

from planish.errors import UserError
from planish.images import MAX_IMAGE_BYTES, ImageChunk
from planish.model.vision import processing
from planish.model.vision.decoding import decode_image
from planish.renderers import conversation_to_datum, get_renderer, recommended_renderer_name
from planish.renderers.codec import token_bounds
from planish.renderers.vision import VisionRenderer
from planish.server.http.routes_checkpoints import tokenizer_files
from planish.testing import save_byte_tokenizer, tiny_model
from planish.testing_vision import GEMMA4_TOKENS, tiny_vision_model
from planish.tokenizer import load_tokenizer
from planish.types import EncodedTextChunk, ModelInput


def png(width: int = 64, height: int = 48, color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def user(*parts) -> dict:
    """Return a message of texts, and of images that are no strings or are given as parts."""
    content = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        content.append(part if isinstance(part, dict) else {"type": "image", "image": part})
    return {"role": "user", "content": content}


def image_part(image) -> dict:
    return {"type": "image", "image": image}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(params=["qwen3_vl_instruct", "chatml", "template"])
def renderer(request, tokenizer):
    return get_renderer(request.param, tokenizer)


def shown(model_input: ModelInput, tokenizer) -> str:
    """Return the text of an input, with each image as its number of tokens."""
    return "".join(
        f"[{chunk.length}]" if isinstance(chunk, ImageChunk) else tokenizer.decode(chunk.tokens)
        for chunk in model_input.chunks
    )


EXPECTED = "<|im_start|>user\nIs <|vision_start|>[12]<|vision_end|> red?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", ["bytes", "data URL", "PIL image", "chunk"])
def test_an_image_stands_between_its_marks(renderer, tokenizer, kind):
    image = {
        "bytes": png(),
        "data URL": data_url(png()),
        "PIL image": Image.open(io.BytesIO(png())),
        "chunk": ImageChunk(png(), "png"),
    }[kind]
    assert isinstance(renderer, VisionRenderer)
    prompt = renderer.build_generation_prompt([user("Is ", image_part(image), " red?")])
    assert shown(prompt, tokenizer) == EXPECTED
    [chunk] = prompt.images
    assert Image.open(io.BytesIO(chunk.data)).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("model_type", ["qwen3_5"])
def test_models_with_their_own_decoder_write_images(tmp_path, model_type):
    tokenizer = load_tokenizer(tiny_vision_model(tmp_path, model_type))
    renderer = get_renderer("template", tokenizer)
    assert shown(renderer.build_generation_prompt([user("Is ", png(), " red?")]), tokenizer) == (
        EXPECTED
    )


def test_gemma3_writes_empty_lines_around_images(tmp_path):
    """As its processor in transformers does. Its chat template trims the texts beside an image."""
    tokenizer = load_tokenizer(tiny_vision_model(tmp_path, "gemma3"))
    renderer = get_renderer("template", tokenizer)
    prompt = renderer.build_generation_prompt([user("Is ", png(), " red?"), user("No image. ")])
    marked = "Is\n\n<start_of_image>[9]<end_of_image>\n\nred?<|im_end|>"
    assert marked in shown(prompt, tokenizer)
    assert "No image. " in shown(prompt, tokenizer)


GEMMA4_MARKS = ("<bos>", "<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>", '<|"|>')


@pytest.fixture
def gemma4(tmp_path):
    directory = tiny_vision_model(tmp_path, "gemma4")
    save_byte_tokenizer(directory, (*GEMMA4_TOKENS, *GEMMA4_MARKS), template("gemma4"))
    tokenizer = load_tokenizer(directory)
    tokenizer.bos_token = "<bos>"
    return tokenizer


def test_gemma4_writes_images_as_its_own_template(gemma4):
    """Its processor in transformers writes the marks and one token for each part of the image."""
    renderer = get_renderer(recommended_renderer_name(gemma4.name_or_path), gemma4)
    assert renderer.name == "template"
    image = {"type": "image"}
    parts = ["What is ", image, " beside ", image, "? "]
    texts = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]
    expected = gemma4.apply_chat_template(
        [{"role": "user", "content": texts}], tokenize=False, add_generation_prompt=True
    )
    for number in (63, 70):
        expected = expected.replace("<|image|>", f"<|image>[{number}]<image|>", 1)
    message = user("What is ", png(), " beside ", png(70, 49, "blue"), "? ")
    prompt = renderer.build_generation_prompt([message])
    assert shown(prompt, gemma4) == expected
    answer = {"role": "assistant", "content": "Two images."}
    tokens, weights = renderer.build_supervised_example([message, answer])
    trained = [int(weight) for weight in weights].count(1)
    assert trained == len(gemma4.encode("Two images.<turn|>"))
    assert tokens.length == prompt.length + trained


def test_images_for_which_gemma4_has_no_place_are_errors(gemma4):
    renderer = get_renderer("template", gemma4)
    system = {**user("Look at ", png()), "role": "system"}
    with pytest.raises(UserError, match=r"content\[1\] is an image of a system.*user's message"):
        renderer.build_generation_prompt([system, user("Hello")])


def test_an_image_in_many_prompts_is_decoded_once(directory, monkeypatch):
    """The numbers of tokens of the most recent images are kept."""
    decoded = []

    def decode(chunk: ImageChunk, name: str) -> Any:
        decoded.append(chunk)
        return decode_image(chunk, name)

    monkeypatch.setattr(processing, "decode_image", decode)
    monkeypatch.setattr(processing, "MAX_KEPT_COUNTS", 2)
    renderer = get_renderer("chatml", load_tokenizer(directory))
    red, blue, green = png(), png(32, 32, "blue"), png(48, 32, "green")
    for image, length, num_decoded in (
        (red, 12, 1),
        (red, 12, 1),
        (blue, 4, 2),
        (red, 12, 2),
        (green, 6, 3),  # blue is the least recent
        (red, 12, 3),
        (blue, 4, 4),
    ):
        [chunk] = renderer.build_generation_prompt([user(image)]).images
        assert (chunk.length, len(decoded)) == (length, num_decoded)
    with pytest.raises(UserError, match="damaged|no png"):
        renderer.build_generation_prompt([user(png()[:50])])


def test_the_file_of_an_image_is_read_when_a_prompt_is_built(renderer, tokenizer, tmp_path):
    path = tmp_path / "image.png"
    message = user("Is ", image_part(path), " red?")
    with pytest.raises(UserError, match=r"content\[1\] has the image .* cannot be read .*No such"):
        renderer.build_generation_prompt([message])
    path.write_bytes(png())
    assert shown(renderer.build_generation_prompt([message]), tokenizer) == EXPECTED
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * MAX_IMAGE_BYTES)
    with pytest.raises(UserError, match=f"give an image of 1 to {MAX_IMAGE_BYTES:,} bytes"):
        renderer.build_generation_prompt([message])


def test_the_image_processor_may_be_in_either_file(directory, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    old = copy / "preprocessor_config.json"
    options = {"image_processor": json.loads(old.read_text()), "processor_class": "X"}
    (copy / "processor_config.json").write_text(json.dumps(options))
    old.unlink()
    assert "processor_config.json" in tokenizer_files(copy)
    renderer = get_renderer("chatml", load_tokenizer(copy))
    assert renderer.build_generation_prompt([user(png())]).images[0].length == 12


def test_text_without_images_is_as_before(renderer, tokenizer):
    text = [{"role": "user", "content": "Hello <|vision_start|> 1"}]
    prompt = renderer.build_generation_prompt(text)
    assert not set(prompt.to_ints()) & {270, 271, 272}


def test_several_images_keep_their_order(renderer, tokenizer):
    first, second = png(), png(32, 32, "blue")
    answer = {"role": "assistant", "content": "Yes."}
    messages = [user(first, second), answer, user("And ", first, "?")]
    prompt = renderer.build_generation_prompt(messages)
    assert [chunk.data for chunk in prompt.images] == [first, second, first]
    assert [chunk.length for chunk in prompt.images] == [12, 4, 12]
    assert prompt.length == len(prompt.to_targets())


def test_a_prompt_is_a_prefix_of_its_training_example(renderer):
    messages = [user("Is ", png(), " red?"), {"role": "assistant", "content": "Yes."}]
    prompt = renderer.build_generation_prompt(messages[:1])
    example, weights = renderer.build_supervised_example(messages)
    assert example.prefix(prompt.length) == ModelInput(
        [*prompt.chunks[:-1], EncodedTextChunk(prompt.chunks[-1].tokens)]
    )
    assert len(weights) == example.length
    assert not weights[: prompt.length].any()
    assert weights[prompt.length :].sum() == len("Yes.") + 1
    all_tokens, all_weights = renderer.build_supervised_example(messages, "all_tokens")
    assert all_tokens == example
    is_image = torch.tensor([token == 0 for token in example.to_targets()])
    assert int(is_image.sum()) == 12
    assert not all_weights[is_image].any()


def test_a_datum_has_a_target_for_each_position(renderer):
    messages = [user(png()), {"role": "assistant", "content": "Red."}]
    datum = conversation_to_datum(messages, renderer)
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    assert len(targets) == datum.model_input.length
    assert len(datum.model_input.images) == 1
    with pytest.raises(ValueError, match="no token with a weight"):
        conversation_to_datum(messages, renderer, max_length=20)


def test_the_bound_of_a_prompt_counts_its_images(renderer):
    messages = [user("Is ", png(), " red?")]
    with token_bounds():
        bound = renderer.build_generation_prompt(messages).length
    assert bound >= renderer.build_generation_prompt(messages).length


def test_a_prompt_continues_a_message_after_an_image(renderer, tokenizer):
    messages = [user(png()), {"role": "assistant", "content": "It is"}]
    prompt = renderer.build_continued_prompt(messages)
    assert shown(prompt, tokenizer).endswith("<|im_start|>assistant\nIt is")
    assert len(prompt.images) == 1


def test_thinking_renderers_write_images(tokenizer):
    renderer = get_renderer("qwen3_vl", tokenizer)
    thought = {"type": "thinking", "thinking": "Hm."}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "Red."}]}
    messages = [user(png()), answer, user(png(32, 32)), answer]
    examples = renderer.build_supervised_examples(messages, "all_assistant_messages")
    assert [len(example.images) for example, _ in examples] == [1, 2]
    renderer.check_supervised_examples(messages, "all_assistant_messages")


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("https://example.org/cat.png", "never fetched"),
        ("/etc/passwd", "never fetched or read"),
        ("data:image/png;base64,!!", "not base64"),
        ("data:image/gif;base64,AAAA", "never fetched"),
        (b"GIF89a", "neither PNG nor JPEG"),
        (5, "type int"),
        (png()[:40], "damaged|no png"),
    ],
)
def test_a_bad_image_is_an_error_that_names_its_part(renderer, image, problem):
    with pytest.raises(UserError, match=rf"messages\[0\], content\[1\].*({problem})"):
        renderer.build_generation_prompt([user("What is ", image_part(image))])


def test_an_image_of_the_assistant_is_an_error(renderer):
    messages = [user("Draw."), {**user(png()), "role": "assistant"}]
    with pytest.raises(UserError, match="image of the assistant"):
        renderer.build_generation_prompt(messages)


def test_a_renderer_of_text_refuses_images(tmp_path):
    renderer = get_renderer("chatml", load_tokenizer(tiny_model(tmp_path)))
    with pytest.raises(ValueError, match="image"):
        renderer.build_generation_prompt([user(png())])
    with pytest.raises(ValueError, match="vision_start"):
        get_renderer("qwen3_vl_instruct", load_tokenizer(tmp_path))


def test_a_template_that_drops_an_image_is_an_error(directory, tokenizer):
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("message['content']", "message['content'][:9]")
        with pytest.raises(ValueError, match="images|extend|template"):
            get_renderer("template", tokenizer).build_generation_prompt([user("Is it ", png())])
    finally:
        tokenizer.chat_template = template


def test_the_renderer_of_a_model_follows_from_its_name(directory):
    assert recommended_renderer_name("Qwen/Qwen3-VL-8B-Instruct") == "qwen3_vl_instruct"
    assert recommended_renderer_name("Qwen/Qwen3-VL-30B-A3B-Thinking") == "qwen3_vl"
    assert recommended_renderer_name("Qwen/Qwen2.5-VL-7B-Instruct") == "chatml"
    name = recommended_renderer_name(directory)
    assert isinstance(get_renderer(name, load_tokenizer(directory)), VisionRenderer)
