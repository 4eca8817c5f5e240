"""Images in data files, in the forms that other trainers have."""

import asyncio
import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import datasets as hub
import pytest
from PIL import Image

from planish.datasets.image_parts import image_chunk
from planish.datasets.layouts import conversation_of, prompt_of
from planish.datasets.rows import load_rows
from planish.distillation.prompts import load_prompts
from planish.errors import UserError
from planish.images import MAX_IMAGE_BYTES, MAX_IMAGES, ImageChunk
from planish.preference.prompts import PromptsFromRows
from planish.preference.types import Comparison, read_comparison
from planish.recipes import sl_loop
from planish.renderers import get_renderer
from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.rubric.rubrics import Criterion, RubricRow, read_rubric_row
from planish.supervised.datasets import FromRowsBuilder
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import tiny_model
from planish.testing_vision import tiny_vision_model
from planish.tokenizer import load_tokenizer

ANSWER = {"role": "assistant", "content": "Red."}


def png(color: str, width: int = 32) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 32), color).save(file, "PNG")
    return file.getvalue()


def data_url(color: str) -> str:
    return "data:image/png;base64," + base64.b64encode(png(color)).decode()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [user(content), ANSWER], **columns}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def part(**keys: Any) -> dict[str, Any]:
    return {"type": "image", **keys}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    for color in ("red", "blue"):
        (tmp_path / "pictures" / f"{color}.png").write_bytes(png(color))
    return tmp_path


def written(folder: Path, *rows: dict[str, Any]) -> str:
    """Write rows to a file beside the pictures."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def shown(messages: Any) -> list[Any]:
    """Return the contents of messages, with each image as its color in brackets."""
    return [
        message["content"]
        if isinstance(message["content"], str)
        else "".join(
            each["text"] if each["type"] == "text" else f"[{color_of(each['image'])}]"
            for each in message["content"]
        )
        for message in messages
    ]


def color_of(image: Any) -> str:
    pixel: Any = (
        Image.open(io.BytesIO(image_chunk(image, "it").data)).convert("RGB").getpixel((0, 0))
    )
    return {(255, 0, 0): "red", (0, 0, 255): "blue"}[pixel]


RED, BLUE = "pictures/red.png", "pictures/blue.png"
FORMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a path": (chat([part(image=RED), text("What?")]), ["[red]What?", "Red."]),
    "a data URL": (chat([part(image=data_url("blue"))]), ["[blue]", "Red."]),
    "Qwen's file URL": (chat([part(path=RED), part(url=BLUE)]), ["[red][blue]", "Red."]),
    "OpenAI's part": (
        chat([{"type": "image_url", "image_url": {"url": data_url("red"), "detail": "auto"}}]),
        ["[red]", "Red."],
    ),
    "OpenAI's part as text": (
        chat([{"type": "image_url", "image_url": RED, "text": None}]),
        ["[red]", "Red."],
    ),
    "TRL": (
        chat([part(text=None), text("or"), part()], images=[RED, BLUE]),
        ["[red]or[blue]", "Red."],
    ),
    "TRL with positions": (
        chat([part(index=1), part(index=0), part(index=1)], images=[RED, BLUE]),
        ["[blue][red][blue]", "Red."],
    ),
    "TRL with one image": (chat("What?", image=RED), ["[red]What?", "Red."]),
    "LLaMA-Factory": (
        chat("<image>or<image>?", images=[BLUE, RED], system=""),
        ["[blue]or[red]?", "Red."],
    ),
    "LLaMA-Factory's ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "<image>What?"},
                {"from": "gpt", "value": "Red."},
                {"from": "human", "value": "And <image>?"},
                {"from": "gpt", "value": "Blue."},
            ],
            "images": [RED, BLUE],
        },
        ["[red]What?", "Red.", "And [blue]?", "Blue."],
    ),
    "verl": (
        {"prompt": [user("<image>What?")], "images": [RED], "data_source": "x"},
        ["[red]What?"],
    ),
    "a prompt as text": (
        {"prompt": "What?", "completion": "Red.", "images": [RED, BLUE]},
        ["[red][blue]What?", "Red."],
    ),
    "a question": ({"question": "What?", "answer": "Red.", "image": RED}, ["[red]What?", "Red."]),
    "a column in a CSV file": (chat("What?", images=json.dumps([RED])), ["[red]What?", "Red."]),
    "the mark without images": (chat("Write <image> in HTML."), ["Write <image> in HTML.", "Red."]),
    "parts and the mark": (chat([part(), text("<image>")], images=[RED]), ["[red]<image>", "Red."]),
}


@pytest.mark.parametrize("form", FORMS)
def test_images_are_read_in_the_forms_of_other_trainers(folder, form):
    row, expected = FORMS[form]
    [read] = load_rows(written(folder, row), "train")
    prompt = prompt_of(read, read.location)
    assert shown(prompt) == expected[: len(prompt)]
    if form != "verl":
        assert shown(conversation_of(read, read.location)) == expected


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no file": (
        chat([part(image="cat.png")]),
        r"messages\[0\], content\[0\]: there is no image file .*cat.png",
    ),
    "an address": (
        chat([part(url="https://x.org/a.png")]),
        "are never fetched; download the image",
    ),
    "a bucket": (chat("a", images=["s3://x/a.png"]), r'"images"\[0\] has the address .*download'),
    "no PNG": (
        chat([part(image="rows.jsonl")]),
        "messages\\[0\\], content\\[0\\].*neither PNG nor JPEG",
    ),
    "too few": (chat("<image><image>", images=[RED]), 'column "images" has 1 images'),
    "too many": (chat("<image>", images=[RED, BLUE]), 'column "images" has 2 images'),
    "no column": (chat([part()]), 'column "images" has 0 images'),
    "unused": (chat([part(image=RED)], images=[BLUE]), 'column "images" has 1 images'),
    "two columns": (chat("a", images=[RED], image=RED), '"images" and "image"'),
    "a position": (chat([part(index=2)], images=[RED]), '"index": 2, and the row has 1 images'),
    "a position and an image": (
        chat([part(index=0, image=RED)], images=[RED]),
        'an image and an "index"',
    ),
    "two in a part": (chat([part(image=RED, url=BLUE)]), "has 2 images"),
    "the detail": (
        chat([{"type": "image_url", "image_url": {"url": RED, "detail": "low"}}]),
        r"has \['detail'\], which planish does not use",
    ),
    "no url": (chat([{"type": "image_url", "image_url": {}}]), "has no address"),
    "an unknown key": (chat([part(image=RED, resized_height=28)]), r"has \['resized_height'\]"),
    "another object": (chat("a", images=[{"base64": "x"}]), r"an image with \['base64'\]"),
    "a number": (chat("a", images=[5]), r'"images"\[0\] has an image of type int'),
    "no user": ({"prompt": [{"role": "tool", "content": "a"}], "images": [RED]}, "no user message"),
    "plain text": ({"text": "a", "images": [RED]}, 'the column "images" does not belong'),
    "a video": (chat("a", videos=["a.mp4"]), 'the column "videos" has .*text and images only'),
    "of the assistant": (
        {"messages": [user("Draw."), {**ANSWER, "content": [part(image=RED)]}]},
        "image of the assistant",
    ),
    "a very long name": (chat([part(image="a" * 5000)]), "there is no image file"),
}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory) -> str:
    return str(tiny_vision_model(tmp_path_factory.mktemp("vision")))


def supervised(dataset: str, model: str) -> Any:
    config = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=model, batch_size=1)
    return FromRowsBuilder(common_config=config, dataset=dataset)()[0]


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_image_is_an_error_that_names_its_row(folder, vision_model, fault):
    row, message = BAD[fault]
    path = written(folder, chat("Fine."), row)
    if "messages" not in row and "text" not in row:
        with pytest.raises(UserError, match=rf"rows.jsonl, line 2.*{message}"):
            load_prompts(path, get_renderer("chatml", load_tokenizer(vision_model)))
        return
    with pytest.raises(UserError, match=rf"rows.jsonl, line 2.*{message}"):
        supervised(path, vision_model)


def test_a_path_in_a_row_of_no_file_is_absolute(folder):
    row = chat([part(image=RED)])
    with pytest.raises(UserError, match="the row is from no directory"):
        conversation_of(row, "row 1")
    absolute = chat([part(image=f"file://{folder / RED}")])
    assert shown(conversation_of(absolute, "row 1")) == ["[red]", "Red."]


@pytest.mark.parametrize("stored_as", ["parquet", "save_to_disk"])
def test_the_image_feature_of_datasets_is_read(tmp_path, stored_as):
    """The feature stores an image as bytes. Parts of one struct have null for missing keys."""
    parts = hub.List(
        {"type": hub.Value("string"), "text": hub.Value("string"), "image": hub.Image()}
    )
    message = {"role": hub.Value("string"), "content": parts}
    features = hub.Features({"messages": hub.List(message), "images": hub.List(hub.Image())})
    red, blue = (Image.open(io.BytesIO(png(color))) for color in ("red", "blue"))
    empty = {"text": None, "image": None}
    answer = {"role": "assistant", "content": [{**empty, "type": "text", "text": "Red."}]}
    rows = [
        {
            "messages": [user([{**empty, **part(image=red)}, {**empty, **text("?")}]), answer],
            "images": [],
        },
        {"messages": [user([{**empty, **part()}]), answer], "images": [blue]},
    ]
    table = hub.Dataset.from_list(rows, features=features)
    place = tmp_path / ("rows.parquet" if stored_as == "parquet" else "saved")
    table.to_parquet(place) if stored_as == "parquet" else table.save_to_disk(place)
    read = load_rows(str(place), "train")
    assert [shown(conversation_of(row, row.location)) for row in read] == [
        ["[red]?", "Red."],
        ["[blue]", "Red."],
    ]


def test_a_datum_has_the_image_in_its_place(folder, vision_model):
    row = chat("Is <image> red?", images=[RED])
    train = supervised(written(folder, row), vision_model)
    [datum] = train.get_batch(0)
    assert datum.model_input.images == [ImageChunk(png("red"), "png", expected_tokens=4)]
    tokenizer: Any = load_tokenizer(vision_model)
    before, _, after = datum.model_input.chunks
    assert tokenizer.decode(before.tokens).endswith("user\nIs <|vision_start|>")
    assert tokenizer.decode(after.tokens).startswith("<|vision_end|> red?")
    weights = datum.loss_fn_inputs["weights"].tolist()
    assert sum(weight > 0 for weight in weights) == len("Red.") + 1
    renderer = get_renderer("chatml", tokenizer)
    [example] = sl_loop.load_conversations(written(folder, row), "train")
    [other] = sl_loop.render([example], renderer, 1000).data
    assert other.model_input == datum.model_input
    [prompt] = load_prompts(written(folder, row), renderer)
    assert shown(prompt) == ["Is [red] red?"]


def test_the_prompts_of_rewards_have_images(folder, vision_model):
    rows = [chat("Is <image> red?", images=[name], answer="yes") for name in (RED, BLUE)]
    builder = RewardDatasetBuilder(
        dataset=written(folder, *rows),
        reward=lambda answer, row: float(row["answer"] in answer),
        model_name=vision_model,
        batch_size=2,
        group_size=2,
    )
    train, _ = asyncio.run(builder())
    [first, second] = train.get_batch(0)
    images = set()
    for group in (first, second):
        envs: Any = asyncio.run(group.make_envs())
        for env in envs:
            prompt, _ = asyncio.run(env.initial_observation())
            [image] = prompt.images
            images.add(image.data)
    assert images == {png("red"), png("blue")}


def test_a_model_of_text_rejects_images_before_training(folder, tmp_path):
    model = str(tiny_model(tmp_path / "model"))
    path = written(folder, chat("Fine."), chat("Is <image> red?", images=[RED]))
    with pytest.raises(
        UserError, match=r"line 2: messages\[0\], content\[1\] is an image.*only text"
    ):
        supervised(path, model)
    builder = RewardDatasetBuilder(
        dataset=path, reward=lambda *_: 0.0, model_name=model, batch_size=1, group_size=2
    )
    with pytest.raises(
        UserError, match=r"line 2: messages\[0\], content\[1\] is an image.*only text"
    ):
        asyncio.run(builder())
    with pytest.raises(
        UserError, match=r"line 2: messages\[0\], content\[1\] is an image.*only text"
    ):
        load_prompts(path, get_renderer("chatml", load_tokenizer(model)))


def test_a_model_whose_images_planish_does_not_read_rejects_them(folder, tmp_path):
    """Mistral 3 has an image processor and a vision tower, and planish loads its text model only."""
    model = tiny_vision_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mistral3"}))
    with pytest.raises(UserError, match="line 1: .* is an image.*only text"):
        supervised(written(folder, chat("<image>", images=[RED])), str(model))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"\x89PNG\r\n\x1a\n" + b"x" * MAX_IMAGE_BYTES, f"1 to {MAX_IMAGE_BYTES:,} bytes"),
        (png("red")[:60], "damaged|no png"),
        (png("red", width=4097) + b"", None),
    ],
)
def test_limits_of_images_hold_before_training(folder, vision_model, image, message):
    (folder / "image.png").write_bytes(image)
    path = written(folder, chat("<image>", images=["image.png"]))
    if message is None:
        assert len(supervised(path, vision_model)) == 1
        return
    with pytest.raises(UserError, match=rf"line 1: messages\[0\], content\[0\].*({message})"):
        supervised(path, vision_model)


def test_a_conversation_has_a_limited_number_of_images(folder, vision_model):
    for count, is_allowed in ((MAX_IMAGES, True), (MAX_IMAGES + 1, False)):
        path = written(folder, chat("<image>" * count, images=[RED] * count))
        if is_allowed:
            assert len(supervised(path, vision_model).get_batch(0)) == 1
            continue
        with pytest.raises(UserError, match=f"line 1: .* give at most {MAX_IMAGES} images"):
            supervised(path, vision_model)


def test_prompts_whose_answers_are_compared_have_text_only(folder):
    path = written(folder, {"prompt": "<image>", "images": [RED]})
    with pytest.raises(UserError, match=r'line 1: "prompt"\[0\]\["content"\]\[0\] is an image'):
        PromptsFromRows(dataset=path, test_size=0)()


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SHOWN: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}]
DRAWN = [{"role": "assistant", "content": [IMAGE]}]
QUESTION = [{"role": "user", "content": "What is this?"}]
LAMP = [{"role": "assistant", "content": "A lamp."}]


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"prompt": SHOWN, "chosen": LAMP, "rejected": "A cat."}, '"prompt"[0]["content"][1]'),
        ({"prompt": QUESTION, "chosen": DRAWN, "rejected": LAMP}, '"chosen"[0]["content"][0]'),
        ({"chosen": SHOWN + LAMP, "rejected": SHOWN + DRAWN}, '"chosen"[0]["content"][1]'),
        (
            {"conversations": json.dumps(SHOWN), "chosen": "A lamp.", "rejected": "A cat."},
            "a message is an image",
        ),
        (
            {
                "comparison": {
                    "prompt_conversation": QUESTION,
                    "completion_A": LAMP,
                    "completion_B": DRAWN,
                },
                "label": "A",
            },
            '"comparison"["completion_B"][0]["content"][0]',
        ),
        (
            {"input": {"messages": SHOWN}, "preferred_output": LAMP, "non_preferred_output": LAMP},
            '"input"["messages"][0]["content"][1]',
        ),
        *(
            ({"prompt": "Hi", "chosen": "A", "rejected": "B", name: ["x.png"]}, f'column "{name}"')
            for name in ("images", "image", "rejected_images")
        ),
    ],
)
def test_an_image_in_a_comparison_is_an_error_that_names_row_and_key(row, place):
    with pytest.raises(UserError, match=re.escape(place)) as error:
        read_comparison(row, "pairs.jsonl:3")
    assert str(error.value).startswith("pairs.jsonl:3")
    assert "text only" in str(error.value)


def test_an_image_in_a_rubric_is_an_error_that_names_row_and_key():
    items = [{"rubric_str": "Is it right?"}]
    for row, place in (
        ({"messages": SHOWN, "rubric_items": items}, '"messages": the content of message 1'),
        ({"convo": QUESTION, "rubric_items": items, "images": ["x.png"]}, 'column "images"'),
    ):
        with pytest.raises(UserError, match=f"^rows.jsonl:2.*{place}"):
            read_rubric_row(row, "rows.jsonl:2")


def test_images_in_comparisons_and_rubrics_of_own_code_are_errors():
    """The judge's prompt would have the texts of the messages only."""
    with pytest.raises(UserError, match=r"^prompt_conversation\[0\].*\[1\] is an image"):
        Comparison(SHOWN, LAMP, LAMP)
    with pytest.raises(UserError, match=r"^row 7: messages\[0\].*\[1\] is an image"):
        RubricRow(tuple(SHOWN), (Criterion("Is it right?"),), "row 7")
