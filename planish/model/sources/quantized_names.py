"""Names of quantized models that planish does not load, and the models that they were made from.

Adapters trained with QLoRA name such a base model. It has the weights of an unquantized model, which
planish loads and quantizes itself.
"""

import re

_SUFFIXES: tuple[tuple[str, str, str], ...] = (
    (r"(?:-unsloth)?-bnb-4bit", "bitsandbytes in 4 bits", "nf4"),
    (r"-bnb-8bit", "bitsandbytes in 8 bits", "int8"),
    (r"-AWQ(?:-INT4|-4bit)?", "AWQ", "nf4"),
    (r"-GPTQ(?:-Int4|-4bit)?", "GPTQ", "nf4"),
    (r"-GPTQ-(?:Int8|8bit)", "GPTQ", "int8"),
)
"""Ends of names, what they stand for, and the scheme of planish that is closest."""


def unquantized_model(name: str) -> tuple[str, str, str] | None:
    """Return the name of the unquantized model, the quantization and planish's closest scheme.

    Returns None if the name is not that of a model quantized with bitsandbytes, AWQ or GPTQ.
    """
    for suffix, quantization, scheme in _SUFFIXES:
        match = re.fullmatch(rf"(.+?){suffix}/?", name, re.IGNORECASE)
        if match is not None:
            return match[1], quantization, scheme
    return None


def unquantized_remedy(name: str) -> str | None:
    """Return a sentence that names the unquantized model and the option, or None."""
    found = unquantized_model(name)
    if found is None:
        return None
    unquantized, quantization, scheme = found
    other = "" if scheme == "nf4" and "bitsandbytes" in quantization else ", the closest scheme"
    return (
        f"{name!r} is quantized with {quantization}, which planish does not load. Give the "
        f"unquantized model {unquantized!r} with `--quantize {scheme}` (quantize={scheme!r}{other})"
    )
