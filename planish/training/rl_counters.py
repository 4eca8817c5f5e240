"""What is counted over the whole run, also across its resumptions: the checkpoints carry it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from planish.rl.data_processing import TrainingSequence
from planish.rl.rollout.metrics import token_counts
from planish.rl.rollout.rollouts import GroupRollout
from planish.rl.types import Metrics, RolloutError
from planish.runlog.run_directory import CheckpointRecord


@dataclass
class Counters:
    tokens: Counter[str]
    errors: Counter[str]
    step_tokens: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, record: CheckpointRecord | None) -> Self:
        extra = record.extra if record else {}
        return cls(
            Counter(extra.get("cumulative_tokens", {})), Counter(extra.get("rollout_errors", {}))
        )

    def row(self) -> dict[str, dict[str, int]]:
        return {"cumulative_tokens": dict(self.tokens), "rollout_errors": dict(self.errors)}

    def count(
        self,
        rollouts: Sequence[GroupRollout],
        groups: Sequence[object],
        data_D: Sequence[TrainingSequence],
        errors_of_dropped: Sequence[RolloutError] = (),
    ) -> None:
        """One step: the groups that were not dropped, all it had, what was trained on, and what
        failed in those dropped.
        """
        trained = sum(len(sequence.tokens_N) - 1 for sequence in data_D)
        self.step_tokens = Counter({**token_counts(rollouts), "trained": trained})
        self.tokens.update(self.step_tokens)
        errors = [error for rollout in rollouts for error in rollout.group.rollout_errors]
        for error in [*errors, *errors_of_dropped]:
            self.errors.update([error.error_type, "total"])
        self.errors.update({"groups_skipped": len(groups) - len(rollouts)})

    def metrics(self) -> Metrics:
        """tokens/... of the step, tokens/cumulative/..., and rollout_errors/... once there was one."""
        errors = {f"rollout_errors/{name}": count for name, count in self.errors.items()}
        return {
            **{f"tokens/{name}": count for name, count in self.step_tokens.items()},
            **{f"tokens/cumulative/{name}": count for name, count in self.tokens.items()},
            **(errors if any(self.errors.values()) else {}),
        }
