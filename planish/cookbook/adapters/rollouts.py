"""One episode, with the cookbook's arguments."""

from planish.completers import TokenCompleter
from planish.rl.rollout import single_rollout
from planish.rl.types import Env, Trajectory


async def do_single_rollout(policy: TokenCompleter, env: Env) -> Trajectory:
    """Run one episode."""
    return await single_rollout.do_single_rollout(policy, env)
