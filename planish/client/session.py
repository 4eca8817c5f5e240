"""What the clients of one ServiceClient share: the service, ids that are not in use, and tokenizers
that are read once.
"""

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


_NO_OPTION = {
    "weights_access_token": "there are no access tokens here; checkpoints of this machine need none",
    "optimizer": "AdamW is the one optimizer here; leave it out or give AdamOptimizerConfig()",
    "loss_type_input": "custom losses take logprobs; leave it out or give 'logprobs'",
}


class RefusedMethodError(UnsupportedError, AttributeError):
    """A method of the public SDK that planish does not have. `hasattr` sees no such attribute."""


class RefusesMethods:
    """A client whose missing methods say why they are missing."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Methods of the public SDK that planish does not have, each with the reason. `NAME_async` is
    refused with NAME.
    """

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        reason = self.refused.get(name.removesuffix("_async"))
        if reason is not None:
            raise RefusedMethodError(f"{kind}.{name} is not offered: {reason}")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")


class Session:
    def __init__(self, service: Service, user_metadata: Mapping[str, str]) -> None:
        self.service = service
        self.user_metadata = dict(user_metadata)
        self._id = secrets.token_hex(8)
        self._models = itertools.count()
        self._samplers = itertools.count()
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self._lock = threading.Lock()

    def new_model_id(self) -> str:
        return f"{self._id}:train:{next(self._models)}"

    def new_sampler_id(self) -> str:
        return f"{self._id}:sample:{next(self._samplers)}"

    def tokenizer(self, base_model: str) -> PreTrainedTokenizerBase:
        """The base model's tokenizer, as `transformers` loads it; one object for all clients, which
        stays when the service is closed.
        """
        with self._lock:
            if base_model not in self._tokenizers:
                self._tokenizers[base_model] = load_tokenizer(
                    self.service.tokenizer_directory(base_model)
                )
            return self._tokenizers[base_model]


def refuse_options(**given: object) -> None:
    """UnsupportedError for options of the public SDK that have no meaning here; None and False are
    their defaults.
    """
    for name, value in given.items():
        if value:
            raise UnsupportedError(f"{name}: {_NO_OPTION[name]}")


def refuse_to_pickle(self: object) -> NoReturn:
    """The `__reduce__` of clients: a copy would free what the original holds, in another process
    there is nothing to hold.
    """
    raise TypeError(
        f"a {type(self).__name__} cannot be copied or pickled: it belongs to the process that made it; in another one, "
        "make a ServiceClient and go on from the path of a checkpoint"
    )


def discard(service: Service, operation: Operation[Any]) -> None:
    """Submit an operation that frees something, from a finalizer: what is gone already, or closed,
    is fine.
    """
    with suppress(EngineClosedError, UserError):
        service.submit(operation)
