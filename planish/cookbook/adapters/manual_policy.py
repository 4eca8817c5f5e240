"""A person as the policy."""

import asyncio
import sys
from dataclasses import dataclass

from planish.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from planish.reports.rollout_tokens import decode_keys
from planish.rl.rollout.single_rollout import do_single_rollout
from planish.rl.types import Env, Trajectory
from planish.tokenizer import ModelTokenizer
from planish.types import ModelInput


@dataclass(eq=False)
class ManualPolicy(TokenCompleter):
    """Prints the prompt and reads the answer from the terminal. With `multiline`, an empty line
    ends the answer.
    """

    tokenizer: ModelTokenizer
    multiline: bool = True
    show_observation: bool = True

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        if self.show_observation:
            print(decode_keys(model_input.to_keys(), self.tokenizer.decode))
        text = await asyncio.to_thread(self._read)
        tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        return TokensWithLogprobs(tokens, None)

    def _read(self) -> str:
        print("Your action:", flush=True)
        lines: list[str] = []
        for line in sys.stdin:
            line = line.rstrip("\n")
            if self.multiline and not line:
                break
            lines.append(line)
            if not self.multiline:
                break
        return "\n".join(lines)


def print_trajectory_summary(trajectory: Trajectory) -> None:
    """Print the number of turns and the rewards."""
    print(f"Total steps: {len(trajectory.transitions)}")
    print(f"Total reward: {trajectory.step_rewards}")
    for number, turn in enumerate(trajectory.transitions):
        if turn.reward:
            print(f"  step {number}: reward {turn.reward}")


async def play_env(
    env: Env, tokenizer: ModelTokenizer, multiline: bool = True, show_observation: bool = True
) -> Trajectory:
    """Run one episode in which a person is the policy, and print its rewards."""
    trajectory = await do_single_rollout(ManualPolicy(tokenizer, multiline, show_observation), env)
    print_trajectory_summary(trajectory)
    return trajectory
