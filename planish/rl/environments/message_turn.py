"""One turn of an episode of messages: what the policy wrote, what it leads to, and how the report
shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planish import logtree
from planish.completers import StopCondition
from planish.renderers import Message
from planish.rl.types import Action, Logs, Metrics, StopReason


@dataclass(frozen=True)
class Turn:
    """What the policy wrote."""

    message: Message
    action: Action

    @property
    def is_unreadable(self) -> bool:
        """It calls tools, but no call of it can be read."""
        return bool(self.message.get("unparsed_tool_calls")) and not self.message.get("tool_calls")


@dataclass(frozen=True)
class Outcome:
    """What a turn leads to."""

    reward: float
    stop: StopReason | None = None
    """Why the episode ends here; None = it goes on."""
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    is_parse_error: bool = False
    train_on_action: bool = True
    next_stop_condition: StopCondition | None = None
    replies: Sequence[Message] = ()
    """What followed the policy's message; the whole conversation, where that is another than
    before. For the report.
    """


def log_turn(number: int, turn: Turn, outcome: Outcome) -> None:
    ends = {} if outcome.stop is None else {"stop_reason": outcome.stop}
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
