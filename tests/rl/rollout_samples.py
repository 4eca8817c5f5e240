"""Rollouts for tests of rollout files, with any text and any number of turns."""

from collections.abc import Sequence

from planish import logtree
from planish.completers import TokensWithLogprobs
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Metrics, RolloutError, Trajectory, TrajectoryGroup, Transition
from planish.types import ModelInput

END = 258
"""<|im_end|> of the byte tokenizer."""
NASTY = "</script><img src=x onerror=alert(1)> \"q\" 'a' &amp; \x00\x1b[31m\r\n\tمرحبا 中文 😀 é"


def spoken(
    text: str, logprobs: Sequence[float] | None = None, *, is_cut_off: bool = False
) -> TokensWithLogprobs:
    """Return the byte tokens of `text` as sampled, with a stop token unless truncated."""
    tokens = [*text.encode(), *([] if is_cut_off else [END])]
    given = (
        [-0.01 * (1 + index % 300) for index in range(len(tokens))]
        if logprobs is None
        else list(logprobs)
    )
    return TokensWithLogprobs(tokens, given, "length" if is_cut_off else "stop")


def turn(prompt: str, answer: TokensWithLogprobs, reward: float = 1.0, **fields) -> Transition:
    return Transition(
        ModelInput.from_ints(list(prompt.encode())),
        answer,
        reward,
        fields.pop("done", True),
        **fields,
    )


def single(prompt: str, text: str, reward: float, metrics: Metrics | None = None) -> Trajectory:
    """Return a trajectory of one question and its answer."""
    return Trajectory(
        [turn(prompt, spoken(text), reward, metrics=metrics or {})], ModelInput.empty(), "completed"
    )


def several(prompt: str, answers: Sequence[str], reward: float) -> Trajectory:
    """Return a trajectory whose turns extend each other. The environment says "next?" between turns
    and "bye" at the end.
    """
    seen = list(prompt.encode())
    turns = []
    for number, text in enumerate(answers, start=1):
        answer = spoken(text)
        is_last = number == len(answers)
        turns.append(
            Transition(ModelInput.from_ints(seen), answer, reward if is_last else 0.0, is_last)
        )
        seen = [*seen, *answer.tokens, *(b"bye" if is_last else b"next?")]
    return Trajectory(turns, ModelInput.from_ints(seen), "completed")


def group(
    number: int,
    trajectories: Sequence[Trajectory],
    *,
    final_rewards: Sequence[float] | None = None,
    metrics: Sequence[Metrics] | None = None,
    errors: Sequence[RolloutError] = (),
    tree: logtree.Node | None = None,
    sampler_step: int | None = None,
    tags: Sequence[str] = ("sums",),
) -> GroupRollout:
    of_group = TrajectoryGroup(
        list(trajectories),
        [0.0] * len(trajectories) if final_rewards is None else list(final_rewards),
        [{} for _ in trajectories] if metrics is None else list(metrics),
        list(errors),
    )
    return GroupRollout(number, list(tags), of_group, sampler_step, tree)


def logged_tree(
    number: int, prompt: str, texts: Sequence[str], rewards: Sequence[float]
) -> logtree.Node:
    """Return the logtree of a group of question environments."""
    with logtree.capture(f"Group {number}") as tree:
        for index, (text, reward) in enumerate(zip(texts, rewards, strict=True)):
            with logtree.scope_header(f"Trajectory {index}"):
                with logtree.scope_header("Prompt"):
                    logtree.conversation([{"role": "user", "content": prompt}])
                with logtree.scope_header("Policy Response"):
                    logtree.conversation([{"role": "assistant", "content": text}])
                with logtree.scope_header("Reward"):
                    logtree.table_from_dict({"reference_answer": "four", "reward": reward})
    return tree


def questions(groups: int = 3, size: int = 4) -> list[GroupRollout]:
    """Return groups of single-turn trajectories."""
    rollouts = []
    for number in range(groups):
        prompt = f"What is {number} + 2?"
        texts = [f"I think it is {number + index}." for index in range(size)]
        rewards = [float(index == 2) - 0.1 * (index == 3) for index in range(size)]
        trajectories = [
            single(prompt, text, reward, {"correct": float(reward > 0)})
            for text, reward in zip(texts, rewards, strict=True)
        ]
        tree = logged_tree(number, prompt, texts, rewards)
        rollouts.append(group(number, trajectories, tree=tree, sampler_step=7))
    return rollouts
