"""Draw the reward curve of a run as an SVG picture, for the README.

    python tools/reward_curve.py runs/demo docs/lab/results/demo.svg

The picture has no background, and its grey is readable on white and on black.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 28, 40
METRIC = "reward/total"


def rewards_of(run: Path) -> list[float]:
    """Return the mean reward of each step of a run."""
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row[METRIC] for row in map(json.loads, rows) if METRIC in row]


def svg_of(rewards: Sequence[float], title: str) -> str:
    """Return the picture of rewards from 0 to 1."""

    def x(step: float) -> float:
        return LEFT + step / (len(rewards) - 1) * (WIDTH - LEFT - RIGHT)

    def y(reward: float) -> float:
        return TOP + (1 - reward) * (HEIGHT - TOP - BOTTOM)

    points = " ".join(f"{x(step):.1f},{y(reward):.1f}" for step, reward in enumerate(rewards))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#808080">',
        f"<title>{title}</title>",
        f'<text x="{LEFT}" y="16">{title}</text>',
    ]
    lines += [
        f'<path d="M{LEFT} {y(level):.1f}H{WIDTH - RIGHT}" stroke="#808080" stroke-opacity="0.4"/>'
        f'<text x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level}</text>'
        for level in (0, 0.5, 1)
    ]
    lines += [
        f'<text x="{x(step):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{step}</text>'
        for step in range(0, len(rewards), 4)
    ]
    lines += [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>',
        f'<polyline points="{points}" fill="none" stroke="#3b82f6" stroke-width="2"/>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main(run: str, picture: str) -> None:
    """Draw the curve of the run in a directory into a file."""
    svg = svg_of(rewards_of(Path(run)), "make demo: mean reward of 256 answers per step")
    Path(picture).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
