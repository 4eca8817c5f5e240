"""A structured log of rollouts, for people (HTML) and programs (JSON). Environments write to it
while they run.

    with logtree.init_trace("My check", path="check.html") as trace:
        with logtree.scope_header("Prompt"):
            logtree.conversation([{"role": "user", "content": "2 + 2 = ?"}])
        with logtree.scope_header("Reward"):
            logtree.table_from_dict({"correct": True, "reward": 1.0})

The same calls in an environment's `step` appear in the rollout files of a training run. Outside a
trace they do nothing. The names are those of the public cookbooks.
"""

from planish.logtree.content import (
    ConversationFormatter,
    Formatter,
    conversation,
    details,
    header,
    log_formatter,
    log_html,
    log_text,
    table,
    table_from_dict,
    table_from_dict_of_lists,
    table_node,
)
from planish.logtree.nodes import Node
from planish.logtree.trace import (
    Trace,
    capture,
    flush_trace,
    init_trace,
    optional_enable_logging,
    scope_details,
    scope_disable,
    scope_div,
    scope_header,
    scope_header_decorator,
)

__all__ = [
    "ConversationFormatter",
    "Formatter",
    "Node",
    "Trace",
    "capture",
    "conversation",
    "details",
    "flush_trace",
    "header",
    "init_trace",
    "log_formatter",
    "log_html",
    "log_text",
    "optional_enable_logging",
    "scope_details",
    "scope_disable",
    "scope_div",
    "scope_header",
    "scope_header_decorator",
    "table",
    "table_from_dict",
    "table_from_dict_of_lists",
    "table_node",
]
