"""Write the pictures of docs/guide/console.md, in an environment of make test-extras with chromium.
The curves and findings are those of two real runs, which train for a minute.

PYTHONPATH=tests:tests/rl python tests/console/screenshots.py
"""

import os
import shutil
import tempfile
from pathlib import Path

from counting_runs import train_two_runs
from http_thread import serving_app
from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
from sample_runs import reward_curve, rl_metrics, write_run

from planish.console.answers import Answers
from planish.console.app import create_app
from planish.console.catalog import Catalog
from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer

PICTURES = Path(__file__).parents[2] / "docs/guide/console"
FIRST, SECOND = "run=runs/rate-1e-4", "run=runs/rate-3e-4"
VIEWS = {
    "runs": "/",
    "curves": "/curves?run=real/short&run=real/long&smooth=5",
    "rollouts": f"/rollouts?{FIRST}&split=train&step_from=40",
    "group": f"/group?{FIRST}&split=train&step=12&group=1&colours=advantage",
    "evaluations": f"/evaluations?{FIRST}",
    "findings": "/findings?run=real/short",
}


def stuck_at_40(step: int, num_steps: int) -> dict[str, float]:
    late = step >= 40
    return rl_metrics(
        step,
        num_steps,
        **{
            "env/all/stop/max_tokens": 0.45 if late else 0.02,
            "env/all/by_group/frac_mixed": 0.15 if late else 0.6,
        },
    )


def faster(step: int, num_steps: int) -> dict[str, float]:
    reward = {"env/all/reward/total": reward_curve(step, 20, 0.05)}
    return rl_metrics(step, num_steps, **reward)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HOME"] = directory  # paths on the pictures begin with ~
        runs = Path(directory).resolve() / "runs"
        tokenizer = load_tokenizer(save_byte_tokenizer(Path(directory)))
        write_run(runs / "rate-1e-4", tokenizer, steps=80, eval_every=20, metrics=stuck_at_40)
        write_run(
            runs / "rate-3e-4",
            tokenizer,
            steps=60,
            num_steps=80,
            eval_every=20,
            is_final=False,
            checkpoint_at=60,
            learning_rate=3e-4,
            metrics=faster,
        )
        real = runs.parent / "real"
        train_two_runs(real, 80)
        with (
            serving_app(create_app(Answers(Catalog([runs, real])))) as url,
            sync_playwright() as play,
        ):
            browser = play.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            for name, address in VIEWS.items():
                page = browser.new_page(
                    viewport={"width": 1200, "height": 720}, color_scheme="light"
                )
                page.goto(url + address)
                page.wait_for_selector("main:not([aria-busy]) :is(h1, canvas)")
                page.wait_for_timeout(500)
                page.screenshot(path=PICTURES / f"{name}.png")
                page.close()
            browser.close()


if __name__ == "__main__":
    main()
