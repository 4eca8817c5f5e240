"""Functions that export checkpoints. Their names are the ones that the public cookbooks use.

    from planish.export import weights

    adapter = weights.download(tinker_path="tinker://.../sampler_weights/final", output_dir="adapter")
    weights.build_lora_adapter(base_model="Qwen/Qwen3-8B", adapter_path=adapter, output_path="peft")
    weights.build_hf_model(base_model="Qwen/Qwen3-8B", adapter_path=adapter, output_path="merged")
    weights.publish_to_hf_hub(model_path="merged", repo_id="me/model")

docs/guide/export.md says what is written and how exact it is. The command line
equivalent is `planish export`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi

from planish.client.checkpoint_records import download_checkpoint, open_records
from planish.errors import UserError
from planish.export.merging import SHARD_BYTES
from planish.export.origin import Origin
from planish.export.writing import MARKER_FILE, ExportOptions, write_export

PathLike = str | os.PathLike[str]


def download(
    *,
    tinker_path: str,
    output_dir: PathLike,
    base_url: str | None = None,
    api_key: str | None = None,
    data_dir: PathLike | None = None,
) -> str:
    """Download the files of the checkpoint `tinker_path` into a new or empty directory, and return
    that directory.

    The checkpoint is read from the server at `base_url`. Without a server it is read from
    `data_dir`, the directory of this machine's checkpoints.
    """
    records = open_records(base_url, api_key, None if data_dir is None else Path(data_dir))
    out = Path(output_dir).expanduser()
    download_checkpoint(records, tinker_path, out, "output_dir=")
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
    """Merge an adapter into its base model and return the directory.

    `AutoModelForCausalLM.from_pretrained` can load the result.

    `base_model` is by default the one that the adapter names. Another one must have the same
    architecture; its weights are not checked. `dtype` is float32, bfloat16 or float16; None keeps
    that of the base model. `shard_bytes` limits the size of a file, and so the memory in use.
    `models` maps names to directories, as in ServiceClient. `overwrite` lets the files replace
    those of an earlier export in `output_path`.
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
    """Write an adapter that `PeftModel.from_pretrained` can load, and return its directory.

    The arguments, `overwrite` among them, are those of `build_hf_model`; the default of `dtype` is
    float32.
    """
    return _build(
        adapter_path, output_path, ExportOptions("peft", dtype, base_model, overwrite), models
    )


def publish_to_hf_hub(
    *, model_path: PathLike, repo_id: str, private: bool = True, token: str | None = None
) -> str:
    """Upload an export to the hub repository `repo_id`, and return its URL. A repository that is
    missing is created: `private`, or public.

    `token` is that of huggingface_hub: None uses the token of `hf auth login`, or HF_TOKEN. Other
    files in the repository are kept. Raises UserError for a directory that is no export.
    """
    directory = Path(model_path).expanduser()
    if not (directory / MARKER_FILE).is_file():
        raise UserError(
            f"model_path={directory} has no {MARKER_FILE}, so it is not a complete export; give a "
            "directory that build_hf_model or build_lora_adapter has written"
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
