"""Look up the values of PEFT's `rank_pattern` and `alpha_pattern` by the name of a module.

Each key is a regular expression for the end of a module's name, from the beginning or from a dot
on; the first key that matches decides. The files of an adapter come from strangers, and Python's
`re` needs exponential time for some expressions. llguidance matches in linear time, because it
never backtracks. Most keys are plain names, which are compared directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from planish.errors import DamagedFileError, UnsupportedError

MAX_KEY_LENGTH = 2000
MAX_OPERATOR_KEYS = 500
"""The maximum number of keys that are no plain names."""
MAX_WORK = 5_000_000
"""The maximum of keys times names, where a key with operators counts `_OPERATOR_COST` times."""
_OPERATOR_COST = 100
_PLAIN_NAME = re.compile(r"[\w.-]*")
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
}


class ModulePatterns:
    """One of PEFT's patterns: values by regular expressions for the names of modules."""

    def __init__(self, field: str, values: object) -> None:
        """`field`: the name of the field in adapter_config.json, for messages. `values`: its
        content. Raises DamagedFileError if `values` is not an object, and UnsupportedError for a
        key that cannot be matched.
        """
        if not isinstance(values, Mapping | None):
            raise DamagedFileError(
                f"{field} is {values!r}, not an object of patterns with their values"
            )
        self.name = field
        self._values: dict[str, Any] = dict(values or {})
        num_operator_keys = sum(not _PLAIN_NAME.fullmatch(key) for key in self._values)
        if num_operator_keys > MAX_OPERATOR_KEYS:
            raise UnsupportedError(
                f"{field} has {num_operator_keys:,} regular expressions; planish reads at most "
                f"{MAX_OPERATOR_KEYS}, and any number of plain names"
            )
        self._matchers = [(key, _matcher(field, key)) for key in self._values]
        self._cost = len(self._values) + _OPERATOR_COST * num_operator_keys
        self._work = 0
        self.used_keys: set[str] = set()
        """The keys that decided a value so far."""

    def value(self, module: str, default: Any) -> Any:
        """Return the value of the first key that matches the module's name, else `default`."""
        self._work += self._cost
        if self._work > MAX_WORK:
            raise UnsupportedError(
                f"{self.name} has {len(self._values):,} keys, which are too many for an adapter "
                "of so many modules; write one key for modules of the same value"
            )
        for key, matches in self._matchers:
            if matches(module):
                self.used_keys.add(key)
                return self._values[key]
        return default

    @property
    def unused_keys(self) -> list[str]:
        """The keys that have decided no value."""
        return [key for key in self._values if key not in self.used_keys]


def _matcher(field: str, key: str) -> Callable[[str], bool]:
    if len(key) > MAX_KEY_LENGTH:
        raise UnsupportedError(
            f"{field} has a key of {len(key):,} characters; planish reads keys of at most "
            f"{MAX_KEY_LENGTH:,}"
        )
    return partial(_is_end, key) if _PLAIN_NAME.fullmatch(key) else _automaton(field, key)


def _is_end(key: str, module: str) -> bool:
    """Return whether a key that is a plain name matches the end of a module's name.

    In a regular expression, each dot of the key matches any character.
    """
    start = len(module) - len(key)
    is_part = start == 0 or (start > 0 and module[start - 1] == ".")
    return is_part and all(
        ours in (".", theirs) for ours, theirs in zip(key, module[start:], strict=True)
    )


def _automaton(field: str, key: str) -> Callable[[str], bool]:
    """Return a function that matches names with llguidance."""
    # The import is here because few adapters have such keys.
    from llguidance import LLMatcher

    # llguidance knows no anchors. At the ends of a key they can be expressed without them.
    is_anchored = key.startswith("^") and "|" not in key
    body = key[1:] if is_anchored else key
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    expression = f"({body})" if is_anchored else rf"(.*\.)?({body})"
    tokenizer = _byte_tokenizer()
    matcher = LLMatcher(
        tokenizer, LLMatcher.grammar_from_regex(expression), log_level=0, limits=_parser_limits()
    )

    def check(state: LLMatcher) -> None:
        if state.is_error():
            reason = " ".join(state.get_error().split())
            raise UnsupportedError(
                f"{field} has the key {key!r}, which cannot be matched in linear time ({reason}); "
                "write it without look-around and back-references"
            )

    check(matcher)

    def matches(module: str) -> bool:
        state = matcher.deep_copy()
        name = module.encode()
        is_match = state.try_consume_tokens(list(name)) == len(name) and state.is_accepting()
        check(state)
        return is_match

    return matches


@cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _parser_limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**_LIMITS)
