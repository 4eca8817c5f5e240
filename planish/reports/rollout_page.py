"""The rollout page: the groups, trajectories and tokens of one iteration, as HTML.

The page needs no other file and no network. It shows text that a model wrote, so a content security
policy allows the page's own script only. Texts are plain text in the HTML, so that a browser can
search them. The script colours tokens by their logprobs. One HTML element per token would make the
page large, so each answer has a few attributes with the numbers of all its tokens.
"""

import hashlib
import math
import re
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from planish.logtree.html import css_of, to_html
from planish.logtree.nodes import Node
from planish.reports.rollout_overview import format_short, iteration_overview
from planish.reports.rollout_tokens import DisplayDetokenizer
from planish.reports.rollout_tree import format_number
from planish.reports.rollout_views import GroupView, group_view
from planish.rl.rollout.rollouts import GroupRollout

_TEMPLATES = Environment(
    loader=ChoiceLoader(
        [PackageLoader("planish.reports", "."), PackageLoader("planish.logtree", ".")]
    ),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _signed(value: float) -> str:
    return format_short(value) if value <= 0 else f"+{format_short(value)}"


def _initially_open(group: GroupView) -> set[int]:
    """Return the indices of the trajectories that are unfolded at first: the best and the worst."""
    records = [trajectory.record for trajectory in group.trajectories]
    by_reward = sorted(records, key=lambda record: record.total_reward)
    return {by_reward[-1].index, by_reward[0].index}


def _sort_key(reward: float) -> str:
    """Return a reward as the script reads it. NaN and infinite rewards sort below all others."""
    return repr(float(reward)) if math.isfinite(reward) else "-1e308"


_TEMPLATES.filters.update(
    format_short=format_short,
    format_number=format_number,
    signed=_signed,
    initially_open=_initially_open,
    sort_key=_sort_key,
)
TOKEN_SCRIPT = Path(__file__).with_name("token_text.js")
"""An ES module that the console uses too. The page is one classic script, which exports nothing."""
_SCRIPT = (
    '"use strict";\n'
    + re.sub(r"^export ", "", TOKEN_SCRIPT.read_text(), flags=re.MULTILINE)
    + Path(__file__).with_name("rollout_page.js").read_text()
)
_SCRIPT_HASH = b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()


def rollout_page(
    title: str,
    iteration: int,
    groups: Sequence[GroupRollout],
    num_shown: int,
    advantages_P_G: Sequence[Sequence[float | None]] | None,
    detokenizer: DisplayDetokenizer,
    *,
    sections: Sequence[Node] = (),
    files: Sequence[str] = (),
    rollouts_file: str | None = None,
) -> str:
    """Return the page as HTML. Its head summarises all `groups`; the rest shows the first
    `num_shown` groups, and then `sections`. Groups without trajectories, because their grader
    abstained, are not shown.

    `advantages_P_G` has a row for each of `groups`; None if the groups are not trained on. `files`
    are names of files in the same directory, to which the page links. `rollouts_file` is the one
    with the texts of all groups.
    """
    rows_P = [None] * len(groups) if advantages_P_G is None else advantages_P_G
    groups_with_advantages = list(zip(groups, rows_P, strict=True))
    group_views = [
        group_view(rollout, advantages_G, detokenizer)
        for rollout, advantages_G in groups_with_advantages[:num_shown]
        if rollout.group.trajectories_G
    ]
    trees = [rollout.tree for rollout in groups[:num_shown] if rollout.tree is not None]
    return _TEMPLATES.get_template("rollout_page.html").render(
        title=title,
        written_at=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        overview=iteration_overview(iteration, groups),
        groups=group_views,
        num_hidden_groups=len(groups) - len(group_views),
        sections=[to_html(node) for node in sections],
        files=files,
        rollouts_file=rollouts_file,
        iteration=iteration,
        css=css_of(*trees, *sections),
        script=Markup(_SCRIPT),
        script_hash=_SCRIPT_HASH,
    )
