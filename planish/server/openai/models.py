"""Finds the models of the OpenAI-compatible endpoints by name, and keeps their samplers. The name
of a model is a base model's name, or the path of a checkpoint that the tenant may read.

Each tenant has a session for these samplers. The session begins at the first request and ends like
any other session. If a checkpoint is saved again under its name, it gets a new sampler, and the old
sampler is closed.

Requests are not journaled, because a client's connection ends when the process ends. Otherwise
these requests are treated like journaled requests: they wait for their tenant's turn, count against
the tenant's limits, and load their sampler if necessary.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from planish.detokenizer import Detokenizer, special_token_ids
from planish.errors import UnknownModelError
from planish.model.architecture.config import ModelConfig
from planish.renderers import FORMATS, Renderer, get_renderer, recommended_renderer_name
from planish.renderers.codec import Codec
from planish.renderers.termination import eos_ids
from planish.server.http.context import HttpState
from planish.server.http.openai_errors import ModelNotFoundError
from planish.server.openai.model_names import ModelList, resolve_name
from planish.server.openai.streaming import OpenStreams
from planish.server.results import Gone, NotFound, SessionSpec, Tenant
from planish.server.scheduling import FairQueue
from planish.server.server import Server
from planish.service import CreateSampler, Sample
from planish.tokenizer import ModelTokenizer, load_tokenizer
from planish.types import CheckpointPath, SampleResponse
from planish.wire.models import IdParts

R = TypeVar("R")

_MAX_SAMPLERS = 16
"""Maximum number of samplers kept per tenant. The least recently used one is closed first."""


MAX_CHARACTERS_PER_TOKEN = 16
"""A text may have this many characters for each token of the model's context. A token of English or
code has 3 to 5 characters on average. Only long runs of one character, such as spaces, have tokens
of more than 16 characters.
"""
TOKENIZER_BYTES_PER_CHARACTER = 540
"""The maximum memory that a tokenizer needs per character of its input, in bytes. We measured 90 to
360 bytes for ASCII and 540 bytes for an emoji of three tokens, with SmolLM2's tokenizer.
"""
MAX_TOKENIZED_BYTES = 1 << 20
"""Limit for the bodies of all requests that are tokenized at the same time, in bytes. One tenant
may use half of this limit while other tenants are active. A larger body is tokenized alone.
"""


class ModelTokenization:
    """One base model's tokenizer, renderers and limits."""

    def __init__(self, name: str, directory: Path) -> None:
        """Load the tokenizer from the model's directory."""
        self._name = name
        self._directory = directory
        tokenizer = load_tokenizer(directory)
        self.tokenizer: ModelTokenizer = tokenizer
        self.codec = Codec(self.tokenizer)
        self.detokenizer = Detokenizer.of_tokenizer(self.tokenizer)
        self.special_ids = special_token_ids(self.tokenizer)
        """Tokens that are left out of the text of a completion."""
        config = ModelConfig.from_directory(directory)
        self.eos_token_ids = frozenset(config.eos_token_ids) | eos_ids(self.codec)
        """Tokens that end a sequence."""
        self.max_context = config.max_context
        vocabulary = tokenizer.get_vocab()
        self.vocabulary_size = max(vocabulary.values()) + 1
        max_token_length = max(map(len, vocabulary))
        self.max_characters = config.max_context * min(max_token_length, MAX_CHARACTERS_PER_TOKEN)
        """The maximum number of characters of a text. Longer texts are rejected before they are
        tokenized.
        """
        self._renderers: dict[str, Renderer] = {}

    def renderer(self, name: str | None) -> Renderer:
        """Return the renderer `name`, or the model's recommended renderer if `name` is None. Raise
        UserError if there is no such renderer.
        """
        name = name or self._recommended_name
        if name not in self._renderers:
            self._renderers[name] = get_renderer(name, self.tokenizer)
        return self._renderers[name]

    @cached_property
    def _recommended_name(self) -> str:
        try:
            return recommended_renderer_name(self._name)
        except UnknownModelError:
            return recommended_renderer_name(self._directory)


@dataclass(frozen=True)
class ServedModel:
    """A model that a request names: a base model or a checkpoint."""

    name: str
    base_model: str
    tokenization: ModelTokenization
    renderer_name: str | None
    """The renderer with which the checkpoint was trained, according to the checkpoint's metadata.
    None for a base model, and if the metadata does not name a known renderer.
    """
    created: float
    """When the checkpoint was saved, in seconds since 1970; 0 for a base model. If this time
    changes, the checkpoint was saved again under its name.
    """


@dataclass
class _TenantSamplers:
    """One tenant's session and its samplers."""

    session_id: str | None = None
    num_created: int = 0
    samplers: OrderedDict[str, tuple[float, str]] = field(
        default_factory=OrderedDict[str, tuple[float, str]]
    )
    """Maps a model's name to (`ServedModel.created`, id of its sampler), least recently used
    first.
    """
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class OpenAIModels:
    """The models that tenants can name, and their samplers."""

    def __init__(
        self,
        server: Server,
        directories: Mapping[str, Path],
        aliases: Mapping[str, str] = {},
    ) -> None:
        """`directories` maps the names of the served base models to their directories, and
        `aliases` maps further names to checkpoints.
        """
        self.server = server
        self.list = ModelList(server, directories, aliases)
        self._aliases = aliases
        self._directories = directories
        self._tokenizations: dict[str, ModelTokenization] = {}
        self._load_lock = asyncio.Lock()
        self._samplers_by_tenant: dict[str, _TenantSamplers] = {}
        self._running_requests: Counter[str] = Counter()
        """The number of running requests of each sampler."""
        self._replaced_samplers: set[str] = set()
        """Samplers to be closed when their running requests end."""
        self._tokenizing_queue = FairQueue(MAX_TOKENIZED_BYTES, MAX_TOKENIZED_BYTES // 2)
        self.open_streams = OpenStreams()

    async def run_tokenizer(self, tenant: Tenant, request: Request, work: Callable[[], R]) -> R:
        """Return the result of `work()`, which tokenizes the texts of a request. `work` runs in a
        thread when it is the tenant's turn.

        `request.state.body` must be the body of the request. Raise Abandoned if tokenizing the same
        body has repeatedly crashed the server.
        """
        guard, body = self.server.crash_guard, request.state.body
        state: HttpState = request.app.state.http
        turn = await self._tokenizing_queue.acquire_slots(tenant.name, len(body), len(body))
        try:
            if not guard.is_active:
                return await asyncio.to_thread(state.paced, tenant, work)
            key = f"text of {tenant.name}:{hashlib.sha256(body).hexdigest()[:32]}"
            async with guard.running(key):
                return await asyncio.to_thread(state.paced, tenant, work)
        finally:
            turn.release()

    async def find(self, tenant: Tenant, name: str) -> ServedModel:
        """Return the model with this name. Raise ModelNotFoundError if the name is neither a base
        model nor a checkpoint that the tenant may read.
        """
        if name in self._directories:
            return ServedModel(name, name, await self._tokenization(name), None, 0.0)
        try:
            path = await resolve_name(self.server, name, self._aliases)
            path = str(CheckpointPath.parse(path))
            info = await self.server.checkpoints.info(tenant, path)
        except (NotFound, ValueError):
            raise ModelNotFoundError(
                f"the model {name[:200]!r} does not exist, or belongs to another tenant; name one "
                "of GET /v1/models: a base model, or a checkpoint by its tinker:// path or as "
                "RUN/latest"
            ) from None
        if info.base_model not in self._directories:
            raise ModelNotFoundError(
                f"{path} was made on {info.base_model!r}, which is not served here"
            )
        renderer = (info.checkpoint.user_metadata or {}).get("renderer_name")
        return ServedModel(
            path,
            info.base_model,
            await self._tokenization(info.base_model),
            renderer if renderer in FORMATS else None,
            info.checkpoint.time.timestamp(),
        )

    async def entry(self, tenant: Tenant, name: str) -> dict[str, Any]:
        """Return the entry of the model `name` in GET /v1/models. Raise ModelNotFoundError if the
        name is neither a base model nor a checkpoint that the tenant may read.
        """
        model = await self.find(tenant, name)
        if model.name == model.base_model:
            return self.list.base_model(model.name)
        return self.list.checkpoint(name, model.name, model.base_model, model.created)

    async def check(self, tenant: Tenant, model: ServedModel, operations: Sequence[Sample]) -> None:
        """Raise ValueError if an operation is invalid, and TooManyRequests or Unavailable if the
        operations cannot be accepted now. Cancelling the call ends the compilation of a constraint.
        """
        self.server.tenant_limits.check(tenant.name, 0)
        for operation in operations:
            await self.server.sampling.check(tenant, model.base_model, operation)

    async def sample(self, tenant: Tenant, sampler_id: str, operation: Sample) -> SampleResponse:
        """Sample from the sampler `sampler_id`, which replaces `operation.sampler_id`. Cancelling
        the call cancels the request.
        """
        self.server.tenant_limits.add_request(tenant.name, 0)
        self._running_requests[sampler_id] += 1
        try:
            self.server.tenant_limits.use_tokens(tenant.name, operation.prompt.length)
            self.server.engine.check_open()
            return await self.server.sampling.sample(
                tenant, replace(operation, sampler_id=sampler_id)
            )
        finally:
            self.server.tenant_limits.remove_request(tenant.name, 0)
            self._running_requests[sampler_id] -= 1
            if not self._running_requests[sampler_id]:
                del self._running_requests[sampler_id]
                if sampler_id in self._replaced_samplers:
                    await self._close_when_idle(sampler_id)

    async def sampler_id(self, tenant: Tenant, model: ServedModel) -> str:
        """Return the id of a sampler of the model."""
        tenant_samplers = self._samplers_by_tenant.setdefault(tenant.name, _TenantSamplers())
        async with tenant_samplers.lock:
            session_id = await self._session_id(tenant, tenant_samplers)
            created, sampler_id = tenant_samplers.samplers.get(model.name, (0.0, ""))
            if created != model.created or self.server.samplers.get(sampler_id) is None:
                await self._close(tenant_samplers, model.name)
                is_path = model.name not in self._directories
                parts = IdParts(session_id, tenant_samplers.num_created)
                tenant_samplers.num_created += 1
                source = {"model_path": model.name} if is_path else {"base_model": model.name}
                self.server.engine.check_open()
                # A tenant over its storage quota can still use its models: this class keeps few
                # samplers, and each adds only a row.
                sampler_id = await self.server.samplers.create(
                    tenant, CreateSampler(parts.sampler_id, **source), checks_storage=False
                )
                tenant_samplers.samplers[model.name] = (model.created, sampler_id)
                while len(tenant_samplers.samplers) > _MAX_SAMPLERS:
                    await self._close(tenant_samplers, next(iter(tenant_samplers.samplers)))
            tenant_samplers.samplers.move_to_end(model.name)
            return sampler_id

    async def _session_id(self, tenant: Tenant, tenant_samplers: _TenantSamplers) -> str:
        """Return the id of the tenant's session. Create a session if the tenant has none, or if its
        session has ended.
        """
        if tenant_samplers.session_id is not None:
            try:
                await self.server.sessions.touch(tenant, tenant_samplers.session_id)
            except (Gone, NotFound):
                tenant_samplers.session_id = None
        if tenant_samplers.session_id is None:
            self.server.engine.check_open()
            tenant_samplers.session_id = await self.server.sessions.create(
                tenant, SessionSpec(["openai"])
            )
            tenant_samplers.num_created, tenant_samplers.samplers = 0, OrderedDict()
        return tenant_samplers.session_id

    async def _close(self, tenant_samplers: _TenantSamplers, name: str) -> None:
        _, sampler_id = tenant_samplers.samplers.pop(name, (0.0, ""))
        await self._close_when_idle(sampler_id)

    async def _close_when_idle(self, sampler_id: str) -> None:
        """Close a sampler once no request uses it."""
        if self._running_requests[sampler_id]:
            self._replaced_samplers.add(sampler_id)
            return
        self._replaced_samplers.discard(sampler_id)
        sampler = self.server.samplers.get(sampler_id)
        if sampler is not None:
            await self.server.samplers.close(sampler, "a newer sampler replaced it")

    async def _tokenization(self, name: str) -> ModelTokenization:
        async with self._load_lock:
            if name not in self._tokenizations:
                self._tokenizations[name] = await asyncio.to_thread(
                    ModelTokenization, name, self._directories[name]
                )
            return self._tokenizations[name]
