"""ServiceClient, the entry point: it starts an engine in this process or a session with a server,
and creates the clients for training and sampling.
"""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from planish.client.futures import in_thread
from planish.client.local import connect, resolve_server_url, start_engine
from planish.client.rest_client import RestClient
from planish.client.sampling_client import SamplingClient, create_sampling_client
from planish.client.session import (
    RefusesMethods,
    Session,
    reject_options,
    reject_pickling,
    release_resource,
)
from planish.client.training_client import TrainingClient
from planish.errors import UnsupportedError, UserError
from planish.service import CreateModel, Service, UnloadModel
from planish.types import CheckpointPath, GetServerCapabilitiesResponse, LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from planish.fleet.vllm.options import VllmSampler


class ServiceClient(RefusesMethods):
    """An engine in this process or on a server. `close`, or the end of a `with` block, finishes
    queued work and frees all models and samplers.

    Without either, the program waits at exit for checkpoints that are being saved, and drops all
    other queued work.
    """

    refused_methods: ClassVar[Mapping[str, str]] = {
        "copy_weights": "local checkpoints can be loaded by their path",
        "create_custom_loss": "give the function itself to forward_backward_custom",
        "get_console_url": "planish has no console; `planish runs` lists training runs",
        "holder": "planish clients have no connection holder",
        "sample": "it is a method of the client that create_sampling_client returns",
        "forward_backward": "it is a method of the client that create_lora_training_client returns",
    }

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        models: Mapping[str, str] | None = None,
        data_dir: str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        deterministic: bool | None = None,
        micro_batch_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        prefix_cache_bytes: int | None = None,
        max_batch: int | None = None,
        substitute_losses: Mapping[str, str] | None = None,
        quantize: str | None = None,
        tensor_parallel: int | None = None,
        engine: str = "thread",
        replicas: int | None = None,
        ray: str | None = None,
        sampler: str | VllmSampler = "engine",
        service: Service | None = None,
    ) -> None:
        """Start an engine in this process, or connect to a server if there is a URL.

        `base_url` is the URL of a server (default: the environment's PLANISH_BASE_URL), and
        `api_key` its key (default: PLANISH_API_KEY, else TINKER_API_KEY).

        The other options are for an engine on this machine. `models` maps names of base models to
        directories, or to themselves, for models that are used together on a GPU. `data_dir` is the
        directory for checkpoints (default: PLANISH_DATA, else ~/.local/share/planish/runs). The
        options from `dtype` to `tensor_parallel` are the fields of
        `planish.engine.settings.EngineSettings`; None means the default. With `engine="process"`,
        the engine runs in a process of its own, with the same results. The engine then does not
        share Python's interpreter lock with the caller. If the process dies, operations raise
        EngineClosedError.

        `replicas` starts so many engines, each on a device of its own, with the same results as one
        engine (docs/operators/scaling.md). `ray` is the address of a Ray cluster: "auto" or
        HOST:PORT. Both need planish[ray]. With `sampler="vllm"`, or the URLs of vLLM servers with
        commas between them, samples come from vLLM, whose logprobs are not exactly those of
        training (docs/operators/scaling.md).

        `user_metadata` is stored with every checkpoint. `service` is an existing service to use
        instead of a new engine or session; `close` does not close it.
        """
        if project_id is not None:
            raise UnsupportedError(
                f"project_id={project_id!r}: planish has no projects; use user_metadata"
            )
        settings = {
            "dtype": dtype,
            "device": device,
            "deterministic": deterministic,
            "micro_batch_tokens": micro_batch_tokens,
            "kv_cache_bytes": kv_cache_bytes,
            "prefix_cache_bytes": prefix_cache_bytes,
            "max_batch": max_batch,
            "substitute_losses": substitute_losses,
            "quantize": quantize,
            "tensor_parallel": tensor_parallel,
        }
        if isinstance(user_metadata, str):
            raise UserError(
                f"user_metadata={user_metadata!r}: give a dictionary, or base_url=... for the URL "
                "of a server"
            )
        metadata = _check_metadata(user_metadata)
        if service is not None:
            if base_url is not None or api_key is not None:
                raise UserError(
                    "base_url and api_key open a new session, but service is an existing one; give "
                    "either service, or base_url and api_key"
                )
            session_service = service
        elif url := resolve_server_url(
            base_url,
            api_key,
            {
                "models": models,
                "data_dir": data_dir,
                **settings,
                "engine": None if engine == "thread" else engine,
                "replicas": replicas,
                "ray": ray,
                "sampler": None if sampler == "engine" else sampler,
            },
        ):
            session_service = connect(url, api_key, metadata)
        else:
            session_service = start_engine(
                models, data_dir, settings, engine, replicas, ray, sampler
            )
        self._owns_service = service is None
        self._session = Session(session_service, metadata)

    __reduce__ = reject_pickling

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(finish=kind is None)

    def close(self, status: str = "success", detail: str | None = None) -> None:
        """Finish queued operations and free everything. Ctrl-C drops queued operations.

        With `status` "errored" or "interrupted", queued operations are dropped. `detail` has no
        effect. Raises UserError for another `status`.
        """
        if status not in ("success", "errored", "interrupted"):
            raise UserError(f"status={status!r}: give 'success', 'errored' or 'interrupted'")
        self._close(finish=status == "success")

    close_async = in_thread(close)

    def _close(self, finish: bool) -> None:
        if self._owns_service:
            self._session.service.close(finish)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """Create an adapter of `rank` on a base model. `seed` makes its initial weights
        reproducible. `train_attn`, `train_mlp` and `train_unembed` say whether the linears of the
        attention, those of the MLP, and the head are trained. `user_metadata` is saved with
        checkpoints.

        `optimizer` may be None or AdamOptimizerConfig(), because planish has only AdamW. Raises
        UnknownModelError for a base model that is not there.
        """
        _check_optimizer(optimizer)
        lora = LoraConfig(
            rank, seed, train_unembed=train_unembed, train_mlp=train_mlp, train_attn=train_attn
        )
        return self._create(
            CreateModel(
                self._session.new_model_id(),
                base_model,
                lora,
                user_metadata=self._metadata(user_metadata),
            )
        )

    create_lora_training_client_async = in_thread(create_lora_training_client)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """Create an adapter with the weights of the checkpoint at `path` and new optimizer state.

        Give `base_model` only to use another base model, of the same architecture, than the
        checkpoint's. planish has no access tokens, so `weights_access_token` must be None.
        """
        reject_options(weights_access_token=weights_access_token)
        _check_optimizer(optimizer)
        return self._create_from_state(path, base_model, user_metadata, with_optimizer=False)

    create_training_client_from_state_async = in_thread(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Create an adapter that resumes bit for bit from the checkpoint of `save_state` at `path`.
        The other arguments are those of `create_training_client_from_state`: `base_model`,
        `user_metadata` and `weights_access_token`.
        """
        reject_options(weights_access_token=weights_access_token)
        return self._create_from_state(path, base_model, user_metadata, with_optimizer=True)

    create_training_client_from_state_with_optimizer_async = in_thread(
        create_training_client_from_state_with_optimizer
    )

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Create a client that samples from a base model, or from the checkpoint (of either kind)
        at `model_path`. Raises UserError if neither is given.

        `retry_config` of the tinker SDK has no effect: a local engine needs no retries, and the
        connection to a server has its own. `record_stability_info`: see `planish.service.Sample`.
        """
        if model_path is None and base_model is None:
            raise UserError("create_sampling_client: give model_path (a checkpoint) or base_model")
        if isinstance(model_path, str) and "://" not in model_path:
            raise UserError(
                f"model_path={model_path!r} is not the path of a checkpoint (tinker://...); for a "
                f"base model give base_model={model_path!r}"
            )
        return create_sampling_client(self._session, base_model, model_path, record_stability_info)

    create_sampling_client_async = in_thread(create_sampling_client)

    def create_rest_client(self) -> RestClient:
        """Create a client that lists base models and checkpoints, and deletes checkpoints."""
        return RestClient(self._session.service)

    def get_tokenizer(self, base_model: str) -> PreTrainedTokenizerBase:
        """Return a base model's tokenizer. The model is not loaded."""
        return self._session.tokenizer(base_model)

    get_tokenizer_async = in_thread(get_tokenizer)

    def get_telemetry(self) -> None:
        """Return None: planish sends no telemetry."""

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the base models that are available."""
        return self._session.service.capabilities()

    get_server_capabilities_async = in_thread(get_server_capabilities)

    def _create_from_state(
        self,
        path: str,
        base_model: str | None,
        user_metadata: Mapping[str, str] | None,
        with_optimizer: bool,
    ) -> TrainingClient:
        CheckpointPath.parse(
            path
        )  # reject None, which would create an adapter without a checkpoint
        operation = CreateModel(
            self._session.new_model_id(),
            base_model,
            from_path=path,
            with_optimizer=with_optimizer,
            user_metadata=self._metadata(user_metadata),
        )
        return self._create(operation)

    def _create(self, operation: CreateModel) -> TrainingClient:
        service = self._session.service
        future = service.submit(operation)
        try:
            return TrainingClient(self._session, future.result())
        except BaseException:  # including Ctrl-C
            future.cancel()
            release_resource(service, UnloadModel(operation.model_id))
            raise

    def _metadata(self, user_metadata: Mapping[str, str] | None) -> dict[str, str]:
        return {**self._session.user_metadata, **_check_metadata(user_metadata)}


def _check_metadata(user_metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    if user_metadata is not None and not isinstance(user_metadata, Mapping):
        raise UserError(f"user_metadata={user_metadata!r}: give a dictionary of strings to strings")
    return user_metadata or {}


def _check_optimizer(optimizer: Any) -> None:
    reject_options(optimizer=None if getattr(optimizer, "type", None) == "adamw" else optimizer)
