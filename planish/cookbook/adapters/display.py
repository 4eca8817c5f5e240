"""Trajectories as text."""

from planish.reports.rollout_tokens import decode_keys
from planish.rl.types import Trajectory
from planish.tokenizer import ModelTokenizer


def format_trajectory(
    trajectory: Trajectory, tokenizer: ModelTokenizer, only_last_transition: bool = False
) -> str:
    """Return each turn with its prompt, answer, reward and metrics."""
    turns = list(enumerate(trajectory.transitions))
    lines = []
    for number, turn in turns[-1:] if only_last_transition else turns:
        lines += [
            f"--- Turn {number} ---",
            f"Observation: {decode_keys(turn.ob.to_keys(), tokenizer.decode)}",
            f"Action: {tokenizer.decode(turn.ac.tokens)}",
            f"Reward: {turn.reward}",
            f"Episode done: {turn.episode_done}",
            f"Metrics: {turn.metrics}",
        ]
    return "\n".join(lines) + "\n"
