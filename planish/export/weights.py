"""Weights out of planish, by the names that the public cookbooks have for it.

    from planish.export import weights

    adapter = weights.download(tinker_path="tinker://.../sampler_weights/final", output_dir="adapter")
    weights.build_lora_adapter(base_model="Qwen/Qwen3-8B", adapter_path=adapter, output_path="peft")
    weights.build_hf_model(base_model="Qwen/Qwen3-8B", adapter_path=adapter, output_path="merged")
    weights.publish_to_hf_hub(model_path="merged", repo_id="me/model")

What is written, and how exact it is: docs/export.md. From the command line: `planish export`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi

from planish.client.checkpoint_records import downloaded, records_of
from planish.errors import UserError
from planish.export.merging import SHARD_BYTES
from planish.export.origin import Origin
from planish.export.writing import MARKER, ExportOptions, write_export

PathLike = str | os.PathLike[str]


def download(
    *,
    tinker_path: str,
    output_dir: PathLike,
    base_url: str | None = None,
    api_key: str | None = None,
    data_dir: PathLike | None = None,
) -> str:
    """The files of a checkpoint, of a server or of this machine's own, in a directory that is new
    or empty; returns it.
    """
    records = records_of(base_url, api_key, None if data_dir is None else Path(data_dir))
    out = Path(output_dir).expanduser()
    downloaded(records, tinker_path, out, "output_dir=")
    return str(out)


def build_hf_model(
    *,
    base_model: str | None = None,
    adapter_path: PathLike,
    output_path: PathLike,
    dtype: str | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    models: Mapping[str, str] | None = None,
) -> str:
    """Merge an adapter into its base model, as a directory for
    `AutoModelForCausalLM.from_pretrained`; returns it.

    `base_model`: None is the one that the adapter names; another of the same architecture is taken
    at your word. `dtype` is float32, bfloat16 or float16; None keeps that of the base.
    `shard_bytes`: largest file, and what is in memory at a time. `models`: names as directories, as
    in ServiceClient.
    """
    options = ExportOptions("merged", dtype, base_model, overwrite, shard_bytes)
    return _build(adapter_path, output_path, options, models)


def build_lora_adapter(
    *,
    base_model: str | None = None,
    adapter_path: PathLike,
    output_path: PathLike,
    dtype: str | None = None,
    overwrite: bool = False,
    models: Mapping[str, str] | None = None,
) -> str:
    """An adapter as a directory for `PeftModel.from_pretrained`; returns it. Arguments as of
    `build_hf_model`; dtype None is float32.
    """
    return _build(
        adapter_path, output_path, ExportOptions("peft", dtype, base_model, overwrite), models
    )


def publish_to_hf_hub(
    *, model_path: PathLike, repo_id: str, private: bool = True, token: str | None = None
) -> str:
    """Upload an export to the hub, into a repository that is made if there is none; returns its
    URL.

    `token` as in huggingface_hub: None takes that of `hf auth login`, or HF_TOKEN. Files of the
    repository that the export has not stay.
    """
    directory = Path(model_path).expanduser()
    if not (directory / MARKER).is_file():
        raise UserError(
            f"model_path={directory}: it has no {MARKER}, so it is no whole export; give one of build_hf_model"
        )
    api = HfApi(token=token)
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(repo_id=repo_id, folder_path=directory, commit_message="Made by planish")
    return str(url)


def _build(
    adapter_path: PathLike,
    output_path: PathLike,
    options: ExportOptions,
    models: Mapping[str, str] | None,
) -> str:
    origin = Origin(Path(adapter_path).expanduser())
    return str(write_export(origin, Path(output_path).expanduser(), options, models).directory)


__all__ = ["build_hf_model", "build_lora_adapter", "download", "publish_to_hf_hub"]
