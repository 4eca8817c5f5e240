"""One turn of an episode of messages: the policy's answer, its outcome, and their log."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planish import logtree
from planish.completers import StopCondition
from planish.renderers import Message
from planish.rl.types import Action, Logs, Metrics, StopReason


@dataclass(frozen=True)
class Turn:
    """The policy's answer as a message and as tokens."""

    message: Message
    action: Action

    @property
    def is_unreadable(self) -> bool:
        """Whether the answer calls tools, and none of its calls can be parsed."""
        return bool(self.message.get("unparsed_tool_calls")) and not self.message.get("tool_calls")


@dataclass(frozen=True)
class TurnOutcome:
    """The result of a turn."""

    reward: float
    stop_reason: StopReason | None = None
    """Why the episode ends here; None = it continues."""
    metrics: Metrics = field(default_factory=Metrics)
    logs: Logs = field(default_factory=Logs)
    is_parse_error: bool = False
    train_on_action: bool = True
    next_stop_condition: StopCondition | None = None
    replies: Sequence[Message] = ()
    """The messages after the policy's answer, for the log only. If earlier messages have changed,
    this is the whole conversation.
    """


def log_turn(number: int, turn: Turn, outcome: TurnOutcome) -> None:
    """Write a turn to the log tree."""
    ends = {} if outcome.stop_reason is None else {"stop_reason": outcome.stop_reason}
    with logtree.scope_header(f"Turn {number}"):
        logtree.conversation([turn.message, *outcome.replies])
        logtree.table_from_dict(
            {
                "reward": outcome.reward,
                **ends,
                "parse_error": outcome.is_parse_error,
                **outcome.metrics,
            }
        )
