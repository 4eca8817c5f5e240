"""The variable PLANISH_KERNELS, which says which kernels may be used."""

import os

from planish.errors import UserError


def kernels_setting() -> str:
    """Return the value of PLANISH_KERNELS, "auto" by default. Raises UserError if it is unknown."""
    setting = os.environ.get("PLANISH_KERNELS", "auto")
    if setting not in ("auto", "native", "torch", "triton"):
        raise UserError(f"PLANISH_KERNELS={setting!r}: give 'auto', 'native' or 'torch'")
    return setting
