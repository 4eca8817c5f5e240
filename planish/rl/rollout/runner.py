"""Rollouts of groups for training and evaluation, in this process or in a pool of processes."""

import time
from dataclasses import dataclass

from planish import logtree
from planish.completers import TokenCompleter
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rollout.processes.pool import RolloutPool
from planish.rl.rollout.rollouts import GroupRollout, do_group_rollout
from planish.rl.rollout.strategy import RolloutStrategy
from planish.rl.types import EnvGroupBuilder, RolloutError
from planish.runlog.console import Stage


@dataclass(frozen=True)
class GroupRolloutRunner:
    """Rolls out the groups of a run."""

    strategy: RolloutStrategy
    termination: TerminationRewardPolicy | None
    pool: RolloutPool | None = None

    async def run(
        self,
        builder: EnvGroupBuilder,
        policy: TokenCompleter,
        *,
        batch: str,
        group_idx: int,
        seed: int,
        sampler_step: int | None,
        is_logged: bool,
        progress: Stage | None = None,
        errors_of_dropped: list[RolloutError] | None = None,
    ) -> GroupRollout | None:
        """Roll out one group; return None if the strategy dropped it. The failures of a dropped
        group are added to `errors_of_dropped`.

        `batch` is the batch's name in error messages. With `is_logged`, the result includes the
        logs of the environments.
        """
        failures: list[RolloutError] = []
        start = time.perf_counter()
        do_rollout = self.pool.do_group_rollout if self.pool is not None else do_group_rollout
        log_scope = logtree.capture(f"Group {group_idx}") if is_logged else logtree.scope_disable()
        with log_scope as tree:
            try:
                group = await do_rollout(
                    builder,
                    policy,
                    self.strategy,
                    self.termination,
                    seed=seed,
                    on_turn=lambda turn: (
                        progress.add_sampled_tokens(len(turn.tokens)) if progress else None
                    ),
                    failures=failures,
                )
            except Exception as error:
                error.add_note(f"in group {group_idx} of {batch}")
                raise
        if progress is not None:
            progress.advance()
        if group is None:
            if errors_of_dropped is not None:
                errors_of_dropped += failures
            return None
        seconds = time.perf_counter() - start
        return GroupRollout(
            group_idx, builder.logging_tags(), group, sampler_step, tree, seconds, builder.teacher()
        )
