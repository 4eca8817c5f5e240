from collections.abc import Callable

import pytest
from trained_adapters import Trained, train_adapter

from planish.testing import tiny_model


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Callable[..., Trained]:
    """Train an adapter on a tiny model for two steps and save it; the same arguments give the same
    one.
    """
    made: dict[tuple[object, ...], Trained] = {}

    def train(
        family: str = "llama",
        *,
        tied: bool = True,
        attn: bool = True,
        mlp: bool = True,
        unembed: bool = True,
        kind: str = "sampler_weights",
        base_dtype: str = "float32",
    ) -> Trained:
        key = (family, tied, attn, mlp, unembed, kind, base_dtype)
        if key not in made:
            root = tmp_path_factory.mktemp("trained")
            base = tiny_model(root / "base", family, tied=tied, dtype=base_dtype)
            made[key] = train_adapter(root / "data", base, attn, mlp, unembed, kind)
        return made[key]

    return train
