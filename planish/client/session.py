"""`Session`, the state that all clients of one ServiceClient share, and helpers for the clients."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from planish.errors import EngineClosedError, UnsupportedError, UserError
from planish.service import Operation, Service
from planish.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_UNSUPPORTED_OPTIONS = {
    "weights_access_token": "planish has no access tokens; leave it out",
    "optimizer": "planish has only AdamW; leave it out or give AdamOptimizerConfig()",
    "loss_type_input": "custom losses take logprobs; leave it out or give 'logprobs'",
}


class RefusedMethodError(UnsupportedError, AttributeError):
    """A method of the tinker SDK that planish does not have. `hasattr` returns False for it."""


class RefusesMethods:
    """Base class of clients whose error for a missing SDK method gives the reason."""

    refused_methods: ClassVar[Mapping[str, str]] = {}
    """Methods of the tinker SDK that planish does not have: name to reason. An entry NAME also
    covers NAME_async.
    """

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        reason = self.refused_methods.get(name.removesuffix("_async"))
        if reason is not None:
            raise RefusedMethodError(f"{kind}.{name} is not offered: {reason}")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")


class Session:
    """The service, the counters for new ids, and the loaded tokenizers."""

    def __init__(self, service: Service, user_metadata: Mapping[str, str]) -> None:
        """`user_metadata` is stored with every checkpoint of the session."""
        self.service = service
        self.user_metadata = dict(user_metadata)
        self._id = secrets.token_hex(8)
        self._model_numbers = itertools.count()
        self._sampler_numbers = itertools.count()
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self._lock = threading.Lock()

    def new_model_id(self) -> str:
        """Return an unused id for a training model."""
        return f"{self._id}:train:{next(self._model_numbers)}"

    def new_sampler_id(self) -> str:
        """Return an unused id for a sampler."""
        return f"{self._id}:sample:{next(self._sampler_numbers)}"

    def tokenizer(self, base_model: str) -> PreTrainedTokenizerBase:
        """Return the base model's tokenizer. It is loaded once, and available after the service is
        closed.
        """
        with self._lock:
            if base_model not in self._tokenizers:
                self._tokenizers[base_model] = load_tokenizer(
                    self.service.tokenizer_directory(base_model)
                )
            return self._tokenizers[base_model]


def reject_options(**options: object) -> None:
    """Raise UnsupportedError for an option of the tinker SDK that planish does not have, unless it
    is None or False.
    """
    for name, value in options.items():
        if value:
            raise UnsupportedError(f"{name}: {_UNSUPPORTED_OPTIONS[name]}")


def reject_pickling(self: object) -> NoReturn:
    """Raise TypeError. Clients use this as `__reduce__`, because the finalizer of a copy would free
    the original's model, and another process does not have the model.
    """
    raise TypeError(
        f"a {type(self).__name__} cannot be copied or pickled, because it belongs to the process "
        "that created it; in another process, create a ServiceClient and load a checkpoint by its "
        "path"
    )


def release_resource(service: Service, operation: Operation[Any]) -> None:
    """Submit an operation that frees a model or sampler. Do nothing if the model or sampler is
    already freed, or if the service is closed.
    """
    with suppress(EngineClosedError, UserError):
        service.submit(operation)
