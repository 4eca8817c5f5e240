"""Check the prompts of a dataset before a run begins, and leave out those that are too long.

A prompt that its chat format cannot express, or that leaves no room for an answer in the model's
context window, would end the run at the step that meets it. So builders check every prompt when
they make their dataset. A prompt that cannot be rendered is an error that names the problem. The
lengths are kept with the dataset, and a run compares them with the context window before its first
step (`require_prompt_fits`).

Tokenising all prompts would take seconds. So the length of a prompt is first bounded by its bytes
(`planish.renderers.codec.token_bounds`), and only prompts that may be too long are tokenised.
"""

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from planish import logtree
from planish.errors import UserError
from planish.renderers.codec import token_bounds
from planish.renderers.spelled_tokens import SpelledTokens
from planish.rl.types import Env, PromptLength, longest_of
from planish.types import ModelInput

P = TypeVar("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptLengths(Generic[P]):
    """The lengths of the first prompts of problems."""

    problems: Sequence[P]
    prompt_of: Callable[[P], ModelInput | None]
    place_of: Callable[[int], str]
    """Returns the name of the problem with an index, for messages."""
    bounds: Sequence[int]
    """A number of tokens for each problem that its prompt does not exceed."""

    def longest(self, above: int = 0) -> PromptLength | None:
        """Return the longest of the prompts that have more than `above` tokens; None if there is
        none. Only prompts whose bounds are larger are tokenised.
        """
        return longest_of(
            self._exact(index, above) for index, bound in enumerate(self.bounds) if bound > above
        )

    def _exact(self, index: int, above: int) -> PromptLength | None:
        prompt = prompt_with_place(self.prompt_of, self.problems[index], self.place_of, index)
        if prompt is None or prompt.length <= above:
            return None
        return PromptLength(prompt.length, self.place_of(index))


@dataclass(frozen=True)
class Selection(Generic[P]):
    """The problems of a dataset that are used."""

    problems: Sequence[P]
    lengths: PromptLengths[P] | None
    """The lengths of their prompts; None if they are not known."""


def select_problems(
    problems: Sequence[P],
    prompt_of: Callable[[P], ModelInput | None],
    place_of: Callable[[int], str],
    *,
    split: str,
    max_prompt_tokens: int | None = None,
) -> Selection[P]:
    """Return the problems whose prompts have at most `max_prompt_tokens` tokens (None: all). A
    warning counts the others, and another one the prompts whose texts spell special tokens.

    `prompt_of` returns the first prompt of a problem. If it returns None, the prompts are known
    only during rollouts, so no problem is checked. `place_of` names the problem with an index in
    messages. Raises UserError for a prompt that cannot be rendered, if no problem is left, and for
    `max_prompt_tokens` if the prompts are not known.
    """
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens={max_prompt_tokens}: give a whole number of at least 1")
    selected: list[int] = []
    bounds: list[int] = []
    too_long: list[PromptLength] = []
    spelled = SpelledTokens()
    for index, problem in enumerate(problems):
        found: list[str] = []
        length = length_bound(prompt_of, problem, found)
        if found:
            spelled.add(found, place_of(index))
        if length is None or (max_prompt_tokens is not None and length > max_prompt_tokens):
            prompt = prompt_with_place(prompt_of, problem, place_of, index)
            if prompt is None and max_prompt_tokens is None:
                return Selection(problems, None)
            if prompt is None:
                raise unknown_prompts_error(max_prompt_tokens)
            length = prompt.length
        if max_prompt_tokens is not None and length > max_prompt_tokens:
            too_long.append(PromptLength(length, place_of(index)))
            continue
        selected.append(index)
        bounds.append(length)
    if too_long:
        logger.warning(
            "%d of %d %s problems are left out, because their prompts have more than "
            "max_prompt_tokens=%d tokens; the first is %s, with %d tokens",
            len(too_long),
            len(problems),
            split,
            max_prompt_tokens,
            too_long[0].place,
            too_long[0].num_tokens,
        )
        if not selected:
            raise UserError(
                f"max_prompt_tokens={max_prompt_tokens}: the prompts of all {len(problems)} "
                f"{split} problems are longer; give a larger number, or shorter prompts"
            )
    spelled.warn(f"of {len(problems)} {split} prompts")
    used = [problems[index] for index in selected]
    lengths = PromptLengths(used, prompt_of, lambda number: place_of(selected[number]), bounds)
    return Selection(used, lengths)


def length_bound(
    prompt_of: Callable[[P], ModelInput | None], problem: P, spelled: list[str] | None = None
) -> int | None:
    """Return a number of tokens that a problem's prompt does not exceed. Return None if the prompt
    is not known or cannot be rendered. The special tokens that its texts spell are added to
    `spelled`.
    """
    try:
        with token_bounds() as found:
            prompt = prompt_of(problem)
    except Exception:  # the caller renders the prompt again, and reports the error
        return None
    if spelled is not None:
        spelled += found
    return None if prompt is None else prompt.length


def prompt_with_place(
    prompt_of: Callable[[P], ModelInput | None],
    problem: P,
    place_of: Callable[[int], str],
    index: int,
) -> ModelInput | None:
    """Return the first prompt of the problem with an index. An error names the problem."""
    try:
        return prompt_of(problem)
    except ValueError as error:
        raise UserError(f"{place_of(index)}: {error}") from error
    except Exception as error:
        error.add_note(f"in the prompt of {place_of(index)}")
        raise


def unknown_prompts_error(max_prompt_tokens: int | None) -> UserError:
    """Return the error of `max_prompt_tokens` if prompts are known only during rollouts."""
    return UserError(
        f"max_prompt_tokens={max_prompt_tokens}: the prompts are known only during rollouts, "
        "because initial_observation waits for something else; leave it out, and return "
        "InitialObservationOverflow for a long prompt"
    )


def initial_prompt(env: Env) -> ModelInput | None:
    """Return the first prompt of an environment; None if `initial_observation` waits for something,
    such as another player, or reports that the prompt is too long.
    """
    with logtree.scope_disable():
        initial = _result_without_waiting(env.initial_observation())
    return initial[0] if isinstance(initial, tuple) else None


def _result_without_waiting(coroutine: Coroutine[Any, Any, T]) -> T | None:
    """Run a coroutine up to its first wait. Return its result; None if it waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    return None


def require_prompt_fits(
    longest_prompt: Callable[[int], PromptLength | None],
    context_window: int | None,
    model_name: str,
    answer_tokens: int = 1,
) -> None:
    """Raise UserError if a prompt leaves no room for an answer of `answer_tokens` tokens in the
    context window (in tokens) of the model `model_name`. None = not known.

    `longest_prompt` returns the longest prompt of more than the given number of tokens.
    """
    if context_window is None:
        return
    longest = longest_prompt(max(0, context_window - answer_tokens))
    if longest is None:
        return
    raise UserError(
        f"{longest.place}: its prompt has {longest.num_tokens} tokens, which leave no room for an "
        f"answer of {answer_tokens} tokens in the context window of {context_window} tokens of "
        f"{model_name}; leave out long prompts with max_prompt_tokens="
        f"{max(1, context_window - answer_tokens)} or less, or remove the row"
    )
