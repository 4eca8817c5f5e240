"""One episode, with the cookbook's arguments."""

from planish.completers import TokenCompleter
from planish.rl.rollout.single_rollout import do_single_rollout as play
from planish.rl.types import Env, Trajectory


async def do_single_rollout(policy: TokenCompleter, env: Env) -> Trajectory:
    """Play one episode."""
    return await play(policy, env)
