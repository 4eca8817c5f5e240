"""Write the table of docs/reference/families.md: which models of transformers planish runs, and how.

    python tools/family_table.py --write            all causal language models of transformers
    python tools/family_table.py glm4 granite       print the rows of some of them
    python tools/family_table.py --write glm4       replace the results of some of them

Each row is the result of a tiny random model. The model's logprobs are compared with those of
transformers, and the logprobs of planish's sampler with those of its trainer.
"""

from __future__ import annotations

import argparse
import re
import signal
import tempfile
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "families.md"
TIMEOUT = 60
"""The seconds after which a model is given up."""
MARK = "<!-- The rest of this page is written by tools/family_table.py. -->\n"
_NATIVE, _BY_TRANSFORMERS, _REFUSED, _NO_TINY_MODEL = (
    "native",
    "transformers",
    "refused",
    "untested",
)
_TESTED = {_NATIVE, _BY_TRANSFORMERS, _REFUSED}
_SPECIFIC = (
    (r"^\S+ is a convolution", "a module is a convolution"),
    (r" \([A-Z]\w+\)(?=,)", ""),
    (r"(?<=without values) \(.*", ""),
    (r" \((\w+Error: |model\.layers\.).*", ""),
    (r", (and|so) planish (runs layers|needs|has only|cannot).*", ""),
)
"""What `general_reason` replaces, and by what."""


@dataclass(frozen=True)
class Row:
    """The result for one model_type."""

    model_type: str
    architecture: str
    how: str
    """"native", "transformers", "refused" or "untested"."""
    reason: str = ""
    """Why the model is refused or untested."""
    difference: float | None = None
    """The largest difference of logprobs to transformers, float32, with shared prefixes."""
    gaps: tuple[float, ...] = ()
    """The largest difference between sampled and trained logprobs, in float32 and bfloat16."""


def measure(model_type: str, architecture: str) -> Row:
    """Return the row of a model_type, from a tiny random model."""
    from planish.errors import UserError
    from planish.model.architecture.config import ModelConfig
    from planish.model.architecture.hf_config.families import MULTIMODAL_ARCHITECTURES
    from planish.testing import tiny_transformers_model

    if model_type in {outer for outer, _ in MULTIMODAL_ARCHITECTURES.values()}:
        return Row(model_type, architecture, _NATIVE)  # Other tests run its text model.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            tiny_transformers_model(path, model_type)
        except Exception as error:  # Configs and models raise many kinds of errors.
            return Row(model_type, architecture, _NO_TINY_MODEL, _message(error))
        try:
            config = ModelConfig.from_directory(path)
            if config.hf is None:
                return Row(model_type, architecture, _NATIVE)
            return Row(
                model_type,
                architecture,
                _BY_TRANSFORMERS,
                difference=difference_to_transformers(path),
                gaps=tuple(gap(path, dtype) for dtype in ("float32", "bfloat16")),
            )
        except UserError as error:
            return Row(model_type, architecture, _REFUSED, _message(error.__cause__ or error))


def difference_to_transformers(path: Path) -> float:
    """Return the largest difference of the trainer's logprobs to those of transformers in float32.

    The sequences have several lengths and share a prefix.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from planish.engine.training.adapters import Adapter
    from planish.engine.training.trainer import Trainer
    from planish.model.layers.lora import LoraLayout
    from planish.types import Datum, LoraConfig, ModelInput

    decoder = _decoder(path, "float32")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 30).tolist()
    sequences = [shared + rng.integers(0, 256, extra).tolist() for extra in (1, 12, 31)]
    adapter = Adapter(LoraLayout(decoder.config, LoraConfig(rank=4)), decoder.backend)
    data = [
        Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
        for tokens in sequences
    ]
    work = Trainer(decoder).forward_backward(adapter, data, "cross_entropy", forward_only=True)
    try:
        while True:
            next(work)
    except StopIteration as end:
        outputs = end.value.loss_fn_outputs
    differences = []
    for tokens, output in zip(sequences, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].float()
        expected = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].numpy()
        differences.append(float(np.abs(output["logprobs"].to_numpy() - expected).max()))
    return max(differences)


def gap(path: Path, dtype: str) -> float:
    """Return the largest difference between sampled and trained logprobs."""
    from planish.engine.agreement import measure_difference
    from planish.engine.sampling.sampler import Sampler
    from planish.engine.sampling.settings import SamplerSettings
    from planish.engine.training.trainer import Trainer

    decoder = _decoder(path, dtype)
    difference = measure_difference(
        decoder, Sampler(decoder, SamplerSettings(), str), Trainer(decoder)
    )
    assert difference is not None
    return difference


def _decoder(path: Path, dtype: str):
    import torch

    from planish.model.architecture.config import ModelConfig
    from planish.model.kernels.choose import choose_backend
    from planish.model.loading import load_decoder

    backend = choose_backend(
        ModelConfig.from_directory(path), getattr(torch, dtype), torch.device("cpu"), None
    )
    return load_decoder(path, backend)


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:240] if text else type(error).__name__


def model_types() -> dict[str, str]:
    """Return the class of each model_type that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        model_type: names if isinstance(names, str) else names[0]
        for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }


def rows(chosen: Sequence[str]) -> Iterator[Row]:
    """Yield the row of each model_type."""
    architectures = model_types()
    for model_type in chosen:
        try:
            # Some default configs are too large for a tiny model.
            signal.alarm(TIMEOUT)
            yield measure(model_type, architectures[model_type])
        except Exception as error:  # One model's failure must not end the others' rows.
            reason = f"{type(error).__name__}: {_message(error)}"
            yield Row(model_type, architectures[model_type], "failed", reason)
        finally:
            signal.alarm(0)


def page(found: Sequence[Row]) -> str:
    """Return the tables as Markdown. A row has all models with the same numbers, or reason."""
    import transformers

    def table(heading: Sequence[str], rows: Mapping[tuple[str, ...], Sequence[str]]) -> list[str]:
        lines = [heading, ["---"] * len(heading)]
        lines += [[*cells, _listed(names)] for cells, names in rows.items()]
        return [f"| {' | '.join(line)} |" for line in lines]

    by_how = {how: [row for row in found if row.how == how] for how in {row.how for row in found}}
    by_numbers = defaultdict[tuple[str, ...], list[str]](list)
    for row in by_how.get(_BY_TRANSFORMERS, ()):
        numbers = (row.difference or 0.0, *row.gaps)
        by_numbers[tuple(f"{value:.0e}" if value else "0" for value in numbers)].append(
            row.model_type
        )
    by_reason = defaultdict[tuple[str, ...], list[str]](list)
    for row in by_how.get(_REFUSED, ()):
        by_reason[(_escaped(general_reason(row.reason)),)].append(row.model_type)
    summary = (
        f"transformers {transformers.__version__} has {len(found)} kinds of causal language models. "
        f"planish runs {len(by_how.get(_NATIVE, ()))} by its own decoder and "
        f"{len(by_how.get(_BY_TRANSFORMERS, ()))} by the code of transformers."
    )
    untested = [row.model_type for row in found if row.how not in _TESTED]
    parts = [
        *textwrap.wrap(summary, 100),
        "",
        "## By the code of transformers",
        "",
        *table(
            ("to transformers", "gap, float32", "gap, bfloat16", "model_type"),
            dict(sorted(by_numbers.items(), key=lambda item: tuple(map(float, item[0])))),
        ),
        "",
        "## By planish's own decoder",
        "",
        *textwrap.wrap(_listed([row.model_type for row in by_how.get(_NATIVE, ())]), 100),
        "",
        "## Refused",
        "",
        *table(("reason", "model_type"), by_reason),
        "",
        "## Without a tiny model",
        "",
        "The tool could not create a tiny random model of these, so they are not tested.",
        "",
        *textwrap.wrap(_listed(untested), 100, break_on_hyphens=False),
    ]
    return "\n".join(parts) + "\n"


def general_reason(reason: str) -> str:
    """Return the reason without the names of classes and modules, which differ between models."""
    for pattern, replacement in _SPECIFIC:
        reason = re.sub(pattern, replacement, reason)
    return reason


def written_rows(text: str) -> Iterator[Row]:
    """Yield the rows of a page that `page` made, without the names of their classes."""
    hows = {
        "By the code of transformers": _BY_TRANSFORMERS,
        "By planish's own decoder": _NATIVE,
        "Refused": _REFUSED,
        "Without a tiny model": _NO_TINY_MODEL,
    }
    for section in text.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        how = hows[heading]
        for line in body.splitlines():
            *cells, listed = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
            for name in re.findall(r"`([\w-]+)`", listed):
                if how == _BY_TRANSFORMERS:
                    difference, *gaps = map(float, cells)
                    yield Row(name, "", how, "", difference, tuple(gaps))
                else:
                    yield Row(name, "", how, _unescaped(cells[0]) if cells else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _unescaped(text: str) -> str:
    return text.replace("&lt;", "<").replace("\\|", "|")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _time_out(*_: object) -> None:
    raise TimeoutError(f"no result within {TIMEOUT} seconds")


def main() -> None:
    """Measure the model types of the command line, and print or write the tables."""
    parser = argparse.ArgumentParser(description="which models of transformers planish runs")
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="default: all")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGALRM, _time_out)
    found = []
    for row in rows(arguments.model_types or list(model_types())):
        found.append(row)
        gaps = " ".join(f"{gap:.1e}" for gap in row.gaps)
        print(
            f"{row.model_type:24} {row.how:12} {row.difference or 0:.1e} {gaps} {row.reason}",
            flush=True,
        )
    if arguments.write:
        start, _, written = PAGE.read_text().partition(MARK)
        if arguments.model_types:
            changed = {row.model_type: row for row in written_rows(written)}
            changed |= {row.model_type: row for row in found}
            found = [changed[name] for name in model_types() if name in changed]
        PAGE.write_text(start + MARK + "\n" + page(found))


if __name__ == "__main__":
    main()
