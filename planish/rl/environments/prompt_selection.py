"""Check the prompts of a dataset before a run begins, and leave out those that are too long.

A prompt that its chat format cannot express, or that leaves no room for an answer in the model's
context window, would end the run at the step that meets it. So builders render every prompt when
they make their dataset. A prompt that cannot be rendered is an error that names the problem. The
longest prompt is kept with the dataset, and a run compares it with the context window before its
first step (`require_prompt_fits`).
"""

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from planish import logtree
from planish.errors import UserError
from planish.rl.types import Env, PromptLength
from planish.types import ModelInput

P = TypeVar("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection(Generic[P]):
    """The problems of a dataset that are used."""

    problems: Sequence[P]
    longest_prompt: PromptLength | None
    """The longest prompt; None if the lengths are not known, or if there are no problems."""


def select_problems(
    problems: Sequence[P],
    prompt_of: Callable[[P], ModelInput | None],
    place_of: Callable[[int], str],
    *,
    split: str,
    max_prompt_tokens: int | None = None,
) -> Selection[P]:
    """Return the problems whose prompts have at most `max_prompt_tokens` tokens (None: all). A
    warning counts the others.

    `prompt_of` returns the first prompt of a problem. If it returns None, the prompts are known
    only during rollouts, so no problem is checked. `place_of` names the problem with an index in
    messages. Raises UserError for a prompt that cannot be rendered, if no problem is left, and for
    `max_prompt_tokens` if the prompts are not known.
    """
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens={max_prompt_tokens}: give a whole number of at least 1")
    selected: list[P] = []
    too_long: list[PromptLength] = []
    longest: PromptLength | None = None
    for index, problem in enumerate(problems):
        try:
            prompt = prompt_of(problem)
        except ValueError as error:
            raise UserError(f"{place_of(index)}: {error}") from error
        except Exception as error:
            error.add_note(f"in the prompt of {place_of(index)}")
            raise
        if prompt is None and max_prompt_tokens is None:
            return Selection(problems, None)
        if prompt is None:
            raise unknown_prompts_error(max_prompt_tokens)
        if max_prompt_tokens is not None and prompt.length > max_prompt_tokens:
            too_long.append(PromptLength(prompt.length, place_of(index)))
            continue
        selected.append(problem)
        if longest is None or prompt.length > longest.num_tokens:
            longest = PromptLength(prompt.length, place_of(index))
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
    return Selection(selected, longest)


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
    longest: PromptLength | None,
    context_window: int | None,
    model_name: str,
    answer_tokens: int = 1,
) -> None:
    """Raise UserError if the longest prompt leaves no room for an answer of `answer_tokens` tokens
    in the context window (in tokens) of the model `model_name`. None = not known.
    """
    if longest is None or context_window is None:
        return
    if longest.num_tokens + answer_tokens <= context_window:
        return
    raise UserError(
        f"{longest.place}: its prompt has {longest.num_tokens} tokens, which leave no room for an "
        f"answer of {answer_tokens} tokens in the context window of {context_window} tokens of "
        f"{model_name}; leave out long prompts with max_prompt_tokens="
        f"{max(1, context_window - answer_tokens)} or less, or remove the row"
    )
