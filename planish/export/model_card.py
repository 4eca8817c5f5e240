"""Write the model card (README.md) of an export: its origin, its rounding error, and how to use it.

The header is the hub's YAML metadata, so that the hub's page shows base model and licence. The
licence is copied from the files of the base model. If they state none, neither does the card.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load

from planish.errors import UserError
from planish.export.lora_update import LoraUpdate
from planish.export.merging import RoundingError
from planish.export.origin import Origin
from planish.model.architecture.config import ModelConfig
from planish.model.sources.embedded import EMBEDDED_MODELS
from planish.model.sources.resolve import HUB_NAME, models_home
from planish.renderers.recommend import recommended_renderer_name

Format = Literal["peft", "merged"]
README = "README.md"
_MAX_METRICS = 40
_HUB_CACHE_PATH = re.compile(r"/models--([A-Za-z0-9_.-]+?)--([A-Za-z0-9_.-]+)/snapshots/")


@dataclass(frozen=True)
class ExportBase:
    """The base model of an export."""

    name: str
    directory: Path | None
    """The directory with its files; None if they are not on this machine and were not needed."""
    is_training_base: bool = True
    """Whether these are the weights that the adapter was trained on, as far as is known."""

    @property
    def is_on_hub(self) -> bool:
        """Whether `hub_name` is a name of the hub."""
        return HUB_NAME.fullmatch(self.hub_name) is not None and not Path(self.hub_name).exists()

    @property
    def hub_name(self) -> str:
        """The model's name on the hub if its files are in the hub's cache; otherwise `name`."""
        match = (
            _HUB_CACHE_PATH.search(self.directory.absolute().as_posix()) if self.directory else None
        )
        return "/".join(match.groups()) if match else self.name

    @property
    def was_converted(self) -> bool:
        """Whether the weights were converted from a GGUF file. They then differ from those on the
        hub, even under the same name.
        """
        return (
            self.directory is not None
            and models_home().absolute() in self.directory.absolute().parents
        )

    def license(self) -> Mapping[str, str]:
        """Return license, license_name and license_link from the README.md of the model, as far as
        given.
        """
        if self.directory is None:
            return {}
        embedded = EMBEDDED_MODELS.get(self.name)
        if embedded is not None and self.directory.name == embedded.directory_name:
            return {"license": embedded.license}
        card = self.directory / README
        fields = (metadata_load(card) or {}) if card.is_file() else {}
        return {
            name: str(fields[name])
            for name in ("license", "license_name", "license_link")
            if fields.get(name)
        }


def model_card(
    export_format: Format,
    base: ExportBase,
    update: LoraUpdate,
    origin: Origin,
    dtype: str,
    rounding: RoundingError,
) -> str:
    """Return the text of the model card."""
    sections = [
        f"---\n{_hub_metadata(export_format, base)}\n---",
        f"# {_title(export_format, base)}",
        _summary(export_format, base, update, dtype),
        _provenance(base, update, origin),
        *([_rounding_note(dtype, rounding)] if export_format == "merged" else []),
        "## Use",
        *(_use_peft(base, update) if export_format == "peft" else _use_merged()),
        *_run_sections(origin),
    ]
    return "\n\n".join(sections) + "\n"


def _hub_metadata(export_format: Format, base: ExportBase) -> str:
    data: dict[str, Any] = {
        "library_name": "peft" if export_format == "peft" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["planish", "lora"],
        **base.license(),
    }
    if base.is_on_hub:
        data |= {
            "base_model": base.hub_name,
            "base_model_relation": "adapter" if export_format == "peft" else "finetune",
        }
    return ModelCardData(**data).to_yaml().strip()


def _title(export_format: Format, base: ExportBase) -> str:
    return f"{'Adapter for' if export_format == 'peft' else 'Fine-tuned'} {Path(base.name).name}"


def _summary(export_format: Format, base: ExportBase, update: LoraUpdate, dtype: str) -> str:
    model = "A Hugging Face model with the adapter merged into its weights"
    config = update.config
    files = "A PEFT adapter" if export_format == "peft" else model
    licence = base.license().get("license")
    modules = sorted({name.rpartition(".")[2] for name in (*update.pairs, *config.modules_to_save)})
    rows = {
        "base model": f"`{_public_name(base)}`",
        "licence of the base model": licence
        or "its files do not state it; see the page of the model",
        "LoRA": f"rank {config.rank}, alpha {config.alpha:g}, factor {config.scaling:g} on B A",
        "modules": ", ".join(f"`{name}`" for name in modules),
        "dtype": dtype,
    }
    return f"{files}, made by planish.\n\n" + _table(rows)


def _public_name(base: ExportBase) -> str:
    """Return a name fit to publish: the hub's name, or only the last part of a local path."""
    return base.hub_name if base.is_on_hub else Path(base.name).name


def _provenance(base: ExportBase, update: LoraUpdate, origin: Origin) -> str:
    manifest = update.manifest
    rows: dict[str, str] = {}
    if origin.name:
        rows["checkpoint"] = f"`{origin.name}`"
    if manifest is not None:
        metadata = dict(manifest.user_metadata)
        rows["recipe"] = metadata.pop("recipe_name", "not recorded")
        recorded = metadata.pop("renderer_name", None)
        rows["renderer (chat format)"] = recorded or _default_renderer(base)
        metadata.pop("log_path", None)  # a path of the author's machine
        rows["optimizer steps"] = str(manifest.step)
        rows["saved"] = f"{manifest.time:%Y-%m-%d %H:%M} UTC"
        rows["base weights, fingerprint"] = f"`{manifest.weights}`"
        rows |= {name: str(value) for name, value in metadata.items()}
    notes = []
    if base.was_converted:
        notes.append(
            "The base weights were converted from a GGUF file, so they differ from those that the "
            "hub has under this name."
        )
    directory = base.directory if base.is_training_base else None
    if directory is not None and ModelConfig.from_directory(directory).fp8 is not None:
        notes.append(
            "The checkpoint of the base model stores the linears in fp8. The adapter was trained "
            "on their dequantized weights."
        )
    if not base.is_training_base:
        notes.append("This is another base model than the adapter was trained on.")
    if manifest is not None and manifest.quantize:
        notes.append(
            f"The adapter was trained on base weights quantized with {manifest.quantize}, and also "
            "corrects their rounding errors. On other base weights its results may differ."
        )
    if manifest is None:
        notes.append("The adapter was not saved by planish, so its training is unknown.")
    return "## Origin\n\n" + "\n\n".join(filter(None, [_table(rows) if rows else "", *notes]))


def _default_renderer(base: ExportBase) -> str:
    """Return which renderer programs use if the checkpoint records none."""
    for name in filter(None, (base.hub_name, base.directory)):
        with suppress(UserError):
            return f"not recorded; the default of this base model is `{recommended_renderer_name(name)}`"
    return "not recorded"


def _rounding_note(dtype: str, rounding: RoundingError) -> str:
    return (
        f"The sums were computed in float32 and rounded once to {dtype}. The norm of the rounding "
        f"errors is {rounding.relative_error:.2%} of the norm of the trained update. Rounding "
        "removes parts of the update that are small compared with a weight. To keep the whole "
        "update, export in float32, or use the adapter with the base model."
    )


def _use_peft(base: ExportBase, update: LoraUpdate) -> Sequence[str]:
    sections = [
        "With transformers and PEFT:",
        _code_block(
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, "
            "AutoTokenizer\n\n"
            f'base = "{_public_name(base)}"\ntokenizer = AutoTokenizer.from_pretrained(base)\n'
            "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, "
            'dtype="auto"), "DIRECTORY")',
            "python",
        ),
    ]
    if not base.is_on_hub:
        sections.append(
            f"`{_public_name(base)}` is a local name of the base model and no name of the hub, so "
            "`AutoPeftModelForCausalLM` cannot find it. Replace it by the base model's directory "
            "or by its name on the hub, also in adapter_config.json (`base_model_name_or_path`)."
        )
    if update.trains_head:
        sections.append(
            "The adapter changes the output head (`train_unembed`). PEFT loads it. TRL 1.16 "
            "rejects it, and vLLM serves it only in versions that apply adapters to the head of "
            "this architecture: use the merged model there. An adapter that was trained with "
            "`train_unembed=False` works in all three. If head and embedding of the base model are "
            "one matrix, do not call `merge_and_unload`, which would change the embedding too; "
            "`planish export --format merged` gives the head a matrix of its own."
        )
    else:
        rank = max(8, 1 << (update.config.rank - 1).bit_length())
        sections += [
            "The adapter leaves the output head alone, so PEFT and TRL load it as it is. With "
            "vLLM:",
            _code_block(
                f"vllm serve {_public_name(base)} --enable-lora --max-lora-rank {rank} \\\n"
                "    --lora-modules tuned=DIRECTORY",
                "sh",
            ),
        ]
    sections += [
        "Merge it into the base model:",
        _code_block("planish export DIRECTORY MERGED --format merged", "sh"),
    ]
    return sections


def _use_merged() -> Sequence[str]:
    return [
        "With transformers:",
        _code_block(
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")\n'
            'model = AutoModelForCausalLM.from_pretrained("DIRECTORY", dtype="auto")',
            "python",
        ),
        "With vLLM, and with planish:",
        _code_block(
            "vllm serve DIRECTORY\nplanish chat --model DIRECTORY\nplanish serve --model "
            "tuned=DIRECTORY",
            "sh",
        ),
    ]


def _run_sections(origin: Origin) -> Sequence[str]:
    if origin.run is None:
        return []
    sections = [
        "## Options of the run",
        _code_block(
            json.dumps(origin.run.config, indent=2, ensure_ascii=False, default=str), "json"
        ),
    ]
    if origin.run.step is not None:
        shown_metrics = dict(list(origin.run.metrics.items())[:_MAX_METRICS])
        rows = {
            f"`{name}`": f"{value:.6g}"
            for name, value in shown_metrics.items()
            if not name.startswith("time/")
        }
        sections += [f"## Metrics of its step {origin.run.step}", _table(rows)]
    return sections


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    )


def _code_block(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
