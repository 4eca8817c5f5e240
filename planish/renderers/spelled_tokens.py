"""Count the rows of a dataset whose texts spell special tokens, and name them in one warning.

A renderer encodes such a text as ordinary characters. That is right for a text about a chat format.
It is wrong for texts that a chat template has rendered, or to which an end-of-sequence token was
added: the model would learn to write the token's characters.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from planish.renderers.codec import token_bounds
from planish.renderers.renderer import Renderer

_log = logging.getLogger(__name__)
_logged: set[str] = set()
"""The warnings that were logged in this process. A dataset is read several times in a run."""


class SpelledTokens:
    """The number of rows whose texts spell special tokens, and the first of these rows."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._first = ""

    def add(self, spelled: Sequence[str], where: str) -> None:
        """Count a row if its texts spell at least one token. `where` names the row."""
        if spelled:
            self._num_rows += 1
            self._first = self._first or f"{spelled[0]!r} in {where}"

    def add_rendered(
        self, messages: object, renderer: Renderer, render: Callable[[], Any], where: str
    ) -> None:
        """Count a row if texts of its messages are encoded as text and spell a token.

        `render` renders the messages. It is called only if the messages contain such a token at
        all: some formats write it as a token, as that of reasoning.
        """
        if renderer.codec.guarded_pattern.search(str(messages)):
            with token_bounds() as spelled:
                render()
            self.add(spelled, where)

    def warn(self, rows: str) -> None:
        """Log the count, unless this process has logged the same warning before. `rows` names all
        rows in the message.
        """
        if not self._num_rows:
            return
        text = (
            f"{self._num_rows} {rows} spell special tokens in their texts, first {self._first}; "
            "they are encoded as text, not as these tokens. Give messages, not texts that a chat "
            "template has rendered"
        )
        if text not in _logged:
            _logged.add(text)
            _log.warning("%s", text)
