"""Images over HTTP: the official SDK, planish's own client and the OpenAI client."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_thread import serving_app
from PIL import Image

from planish import Datum, EncodedTextChunk, ModelInput, SamplingParams, ServiceClient
from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.images import MAX_IMAGE_PIXELS, MAX_IMAGES, ImageChunk
from planish.renderers import get_renderer
from planish.server.http import routes_sampling
from planish.server.http.app import create_app
from planish.server.openai import routes
from planish.server.openai.models import OpenAIModels
from planish.server.server import Server
from planish.server.settings import HttpSettings
from planish.testing import tiny_model
from planish.testing_vision import tiny_vision_model
from planish.tokenizer import load_tokenizer

VISION, TEXT, KEY = "tiny/vision", "tiny/text", "tml-first"
QWEN3_5, GEMMA3, GEMMA4 = "tiny/qwen3_5", "tiny/gemma3", "tiny/gemma4"


def png(width: int = 64, height: int = 48, color: str = "red", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), color if mode == "RGB" else 0).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_message(url: str, **options: Any) -> Any:
    image = {"type": "image_url", "image_url": {"url": url, **options}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {
        VISION: tiny_vision_model(tmp_path_factory.mktemp("vision")),
        QWEN3_5: tiny_vision_model(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5"),
        GEMMA3: tiny_vision_model(tmp_path_factory.mktemp("gemma3"), "gemma3"),
        GEMMA4: tiny_vision_model(tmp_path_factory.mktemp("gemma4"), "gemma4"),
        TEXT: tiny_model(tmp_path_factory.mktemp("text")),
    }


@pytest.fixture(scope="module")
def url(models, tmp_path_factory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("data")
    engine = Engine(
        {name: str(path) for name, path in models.items()}, data, EngineSettings(dtype="float32")
    )
    server = Server(engine, data, list(models))
    more = [*routes_sampling.PLANISH_ROUTES, *routes.routes(OpenAIModels(server, models))]
    settings = HttpSettings(tokenizer_directories=models, tenants_by_key={KEY: "first"})
    app = create_app(server, settings, more)
    with serving_app(app, lifespan="on", log_level="warning") as url:
        yield url
        app.state.http.ending.set()


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(url) -> Iterator[httpx.Client]:
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        yield client


@pytest.mark.parametrize("model", [VISION, QWEN3_5, GEMMA3, GEMMA4])
def test_the_openai_client_sends_an_image(client, models, model):
    options: Any = {"temperature": 0, "max_tokens": 5, "logprobs": True}
    messages = image_message(data_url(png()))
    answer = client.chat.completions.create(model=model, messages=messages, **options)
    content = [{"type": "image", "image": png()}, {"type": "text", "text": "What is this?"}]
    renderer = get_renderer("chatml", load_tokenizer(models[model]))
    prompt = renderer.build_generation_prompt([{"role": "user", "content": content}])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt.length
    blue = image_message(data_url(png(color="blue")))
    other = client.chat.completions.create(model=model, messages=blue, **options)
    logprobs = [choice.logprobs.content for choice in (answer.choices[0], other.choices[0])]
    assert logprobs[0][0].logprob != logprobs[1][0].logprob


def test_an_answer_to_an_image_is_streamed(client):
    options: Any = {"temperature": 0, "max_tokens": 5}
    messages = image_message(data_url(png()))
    answer = client.chat.completions.create(model=VISION, messages=messages, **options)
    with client.chat.completions.create(
        model=VISION, messages=messages, stream=True, **options
    ) as chunks:
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("model", "messages", "problem"),
    [
        (VISION, image_message("http://127.0.0.1:1/cat.png"), "never fetched"),
        (VISION, image_message("file:///etc/passwd"), "never fetched"),
        (VISION, image_message(data_url(png()[:50])), "damaged|no png"),
        (VISION, image_message(data_url(b"no image")), "no png"),
        (
            VISION,
            image_message(data_url(png(4097, 4096, mode="1"))),
            f"at most {MAX_IMAGE_PIXELS:,}",
        ),
        (VISION, image_message(data_url(png()), detail="low"), "not supported"),
        (VISION, image_message(data_url(png())) * (MAX_IMAGES + 1), "images"),
        (VISION, [{"role": "user", "content": [{"type": "image"}]}], "of another form"),
        (TEXT, image_message(data_url(png())), "reads only text"),
    ],
)
def test_a_bad_image_is_a_400(client, model, messages, problem):
    with pytest.raises(openai.BadRequestError, match=problem):
        client.chat.completions.create(model=model, messages=messages, max_tokens=2)


def prompt_length(models: dict[str, Path], *messages: Any) -> int:
    """Return the number of tokens of a prompt with images as bytes."""
    renderer = get_renderer("chatml", load_tokenizer(models[VISION]))
    return renderer.build_generation_prompt(messages).length


IMAGE_AND_TEXT = [{"type": "image", "image": png()}, {"type": "text", "text": "What is this?"}]


def test_the_openai_client_sends_an_image_in_a_response(client, models):
    image = {"type": "input_image", "image_url": data_url(png()), "detail": "auto"}
    content: Any = [image, {"type": "input_text", "text": "What is this?"}]
    items: Any = [{"role": "user", "content": content}]
    options: Any = {"model": VISION, "max_output_tokens": 5, "temperature": 0}
    answer = client.responses.create(input=items, **options)
    assert answer.usage.input_tokens == prompt_length(
        models, {"role": "user", "content": IMAGE_AND_TEXT}
    )
    chat = client.chat.completions.create(
        model=VISION, messages=image_message(data_url(png())), max_tokens=5, temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content


def test_the_output_of_a_function_has_an_image_in_a_response(client, models):
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    image = {"type": "input_image", "image_url": data_url(png())}
    output = {"type": "function_call_output", "call_id": "c", "output": [image]}
    options: Any = {"model": VISION, "max_output_tokens": 1}
    items: Any = [{"role": "user", "content": "Look."}, call, output]
    empty = [{**output, "output": ""}]
    lengths = [
        client.responses.create(input=[*items[:2], *last], **options).usage.input_tokens
        for last in ([output], empty)
    ]
    assert lengths[0] - lengths[1] == 12 + 2, "an image has 12 tokens here, between two marks"


@pytest.mark.parametrize(
    ("model", "items", "problem"),
    [
        (
            VISION,
            [{"image_url": "https://x.org/a.png"}],
            r"^input\[0\].content\[0\].*never fetched",
        ),
        (VISION, [{"image_url": data_url(png()[:50])}], r"input\[0\].*(damaged|no png)"),
        (VISION, [{"image_url": data_url(png()), "detail": "low"}], "options that are not"),
        (VISION, [{"file_id": "file-1"}], r"input\[0\].content\[0\]"),
        (VISION, [{"image_url": data_url(png())}] * (MAX_IMAGES + 1), f"{MAX_IMAGES} images"),
        (TEXT, [{"image_url": data_url(png())}], r"^input\[0\].content\[0\] .*reads only text"),
    ],
)
def test_a_bad_image_in_a_response_is_a_400(client, model, items, problem):
    content: Any = [{"type": "input_image", **item} for item in items]
    message: Any = {"role": "user", "content": content}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=model, input=[message], max_output_tokens=2)
    body: Any = raised.value.body
    assert re.search(problem, body["message"]), body


def test_a_system_message_of_a_response_has_no_image(client):
    content: Any = [{"type": "input_image", "image_url": data_url(png())}]
    items: Any = [{"role": "system", "content": content}, {"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError, match=r"input\[0\] is a system message with an im"):
        client.responses.create(model=VISION, input=items, max_output_tokens=2)


def image_block(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """Return an image as Anthropic's clients send it."""
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def message_request(model: str, *content: Any, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"model": model, "max_tokens": 5, "messages": messages, "temperature": 0, **options}


def num_input_tokens(message: dict[str, Any]) -> int:
    """Return the number of tokens of the prompt, cached or not."""
    usage = message["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_message_has_an_image(client, http, models):
    sources = [
        image_block(png()),
        {"type": "image", "source": {"type": "url", "url": data_url(png())}},
    ]
    for image in sources:
        request = message_request(VISION, image, {"type": "text", "text": "What is this?"})
        answer = http.post("/v1/messages", json=request).json()
        expected = prompt_length(models, {"role": "user", "content": IMAGE_AND_TEXT})
        assert num_input_tokens(answer) == expected
        chat = client.chat.completions.create(
            model=VISION, messages=image_message(data_url(png())), max_tokens=5, temperature=0
        )
        assert answer["content"][0]["text"] == chat.choices[0].message.content
        del request["max_tokens"], request["temperature"]
        count = http.post("/v1/messages/count_tokens", json=request).json()
        assert count == {"input_tokens": expected}


def test_a_tool_result_has_an_image(http):
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    lengths = []
    for content in ([], [image_block(png())]):
        result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
        request = message_request(VISION) | {
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ]
        }
        answer = http.post("/v1/messages", json=request)
        assert answer.status_code == 200, answer.text
        lengths.append(num_input_tokens(answer.json()))
    assert lengths[1] - lengths[0] == 12 + 2


@pytest.mark.parametrize(
    ("model", "blocks", "problem"),
    [
        (VISION, [image_block(b"GIF89a", "image/gif")], "messages.0.content.0 has the address"),
        (VISION, [image_block(b"no image")], "no png"),
        (VISION, [image_block(png()[:50])], "messages.0, content[0] is"),
        (
            VISION,
            [{"type": "image", "source": {"type": "url", "url": "https://x.org/a.png"}}],
            "messages.0.content.0 has the address 'https://x.org/a.png', and images are never",
        ),
        (VISION, [{"type": "image", "source": {"type": "file", "file_id": "f"}}], "0.source: give"),
        (VISION, [{"type": "image"}], "messages.0.content.0.source: give type base64"),
        (VISION, [image_block(png())] * (MAX_IMAGES + 1), f"over {MAX_IMAGES} images"),
        (TEXT, [image_block(png())], "is an image, and tiny/text reads only text"),
    ],
)
def test_a_bad_image_in_a_message_is_a_400(http, model, blocks, problem):
    answer = http.post("/v1/messages", json=message_request(model, *blocks))
    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]["message"]


def test_the_anthropic_client_sends_an_image(url, http):
    anthropic = pytest.importorskip("anthropic", reason="make test-extras runs it")
    request: Any = message_request(VISION, image_block(png()), {"type": "text", "text": "What?"})
    options: Any = {key: value for key, value in request.items() if key != "temperature"}
    greedy = {"temperature": 0}
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        answer = client.messages.create(**options, extra_body=greedy)
        with client.messages.stream(**options, extra_body=greedy) as stream:
            assert stream.get_final_text() == answer.content[0].text
        options["messages"] = [{"role": "user", "content": [image_block(b"no image")]}]
        with pytest.raises(anthropic.BadRequestError, match="no png"):
            client.messages.create(**options)
    expected = http.post("/v1/messages", json=request).json()
    assert num_input_tokens(answer.model_dump()) == num_input_tokens(expected)


def test_token_ids_of_an_image_are_refused(client, url):
    messages = image_message(data_url(png()))
    with pytest.raises(openai.BadRequestError, match="return_token_ids"):
        client.chat.completions.create(
            model=VISION, messages=messages, extra_body={"return_token_ids": True}
        )
    body = {"model": VISION, "messages": messages}
    answer = httpx.post(
        f"{url}/tokenize", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert answer.status_code == 400
    assert "no list of token ids" in answer.text


def test_our_client_trains_and_samples_an_image(url):
    service = ServiceClient(base_url=url, api_key=KEY)
    trainer = service.create_lora_training_client(VISION, rank=4)
    renderer = get_renderer("qwen3_vl_instruct", trainer.get_tokenizer())
    content = [{"type": "image", "image": png()}, {"type": "text", "text": "What is this?"}]
    prompt = renderer.build_generation_prompt([{"role": "user", "content": content}])
    targets = [*prompt.to_targets()[1:], 65]
    weights = [0.0] * (len(targets) - 1) + [1.0]
    datum = Datum(prompt, {"target_tokens": targets, "weights": weights})
    output = trainer.forward_backward([datum], "cross_entropy").result()
    logprob = output.loss_fn_outputs[0]["logprobs"].tolist()[-1]
    sampler = trainer.save_weights_and_get_sampling_client()
    scored = sampler.compute_logprobs(prompt.append_int(65)).result()
    assert scored[-1] == pytest.approx(logprob, abs=1e-4)
    service.close()


SCRIPT = """
import json, sys, tinker
from tinker import types
url, key, data = sys.argv[1], sys.argv[2], open(sys.argv[3], "rb").read()
service = tinker.ServiceClient(base_url=url, api_key=key)
trainer = service.create_lora_training_client("tiny/vision", rank=4)

def prompt(expected):
    image = types.ImageChunk(data=data, format="png", expected_tokens=expected)
    text = types.EncodedTextChunk(tokens=[270])
    return types.ModelInput(chunks=[text, image, types.EncodedTextChunk(tokens=[271, 72, 105])])

def datum(expected):
    inputs = {"target_tokens": [0] * 15 + [65], "weights": [0.0] * 15 + [1.0]}
    return types.Datum(model_input=prompt(expected), loss_fn_inputs=inputs)

output = trainer.forward_backward([datum(12), datum(None)], "cross_entropy").result()
trained = [item["logprobs"].data[-1] for item in output.loss_fn_outputs]
sampler = trainer.save_weights_and_get_sampling_client()
scored = [sampler.compute_logprobs(prompt(n).append_int(65)).result()[-1] for n in (12, None)]
sampled = sampler.sample(prompt(None), 2, types.SamplingParams(max_tokens=3, stop=[])).result()
errors = []
for chunk in (
    types.ImageChunk(data=data, format="png", expected_tokens=13),
    types.ImageAssetPointerChunk(location="x", format="png", expected_tokens=1),
):
    try:
        bad = types.ModelInput(chunks=[chunk])
        sampler.sample(bad, 1, types.SamplingParams(max_tokens=1)).result()
    except tinker.APIStatusError as error:
        errors.append([error.status_code, str(error)])
print(json.dumps([trained, scored, [len(s.tokens) for s in sampled.sequences], errors]))
"""


@pytest.mark.slow
def test_the_official_sdk_sends_images(url, tmp_path):
    (tmp_path / "image.png").write_bytes(png())
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, url, KEY, str(tmp_path / "image.png")],
        env={**os.environ, "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    trained, scored, lengths, errors = json.loads(ran.stdout.splitlines()[-1])
    assert trained == pytest.approx(scored, abs=1e-4)
    assert trained[0] == pytest.approx(trained[1], abs=1e-6)
    assert lengths == [3, 3]
    assert [status for status, _ in errors] == [400, 400]
    assert "has 12 tokens, and expected_tokens is 13" in errors[0][1]
    assert "this server stores none" in errors[1][1]


def test_an_image_without_expected_tokens_is_sampled(url):
    service = ServiceClient(base_url=url, api_key=KEY)
    sampler = service.create_sampling_client(base_model=VISION)
    chunks = [EncodedTextChunk([270]), ImageChunk(png(), "png"), EncodedTextChunk([271, 72])]
    params = SamplingParams(max_tokens=2, stop=[])
    assert len(sampler.sample(ModelInput(chunks), 1, params).result().sequences[0].tokens) == 2
    service.close()
