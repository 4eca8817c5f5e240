"""The display of a training step, also with several steps in progress."""

import asyncio
import io

from rich.console import Console

from planish.runlog.console import StepDisplay


def test_every_stage_of_an_asynchronous_run_is_named_with_its_step():
    out = io.StringIO()

    async def play(progress: StepDisplay, step: int) -> None:
        with progress.sampling(step, 4) as stage:
            for _ in range(4):
                await asyncio.sleep(0)
                stage.add_sampled_tokens(10)
                stage.advance()
            assert f"sampling, step {step} 4/4" in progress.status()

    async def run() -> None:
        with StepDisplay(8, 2, Console(file=out)) as progress:
            async with asyncio.TaskGroup() as tasks:
                for step in (2, 3):
                    tasks.create_task(play(progress, step))
                with progress.training(1, 2) as training:
                    await asyncio.sleep(0)
                    training.advance()
                    assert "sampling, step 2 0/4" in progress.status()
                    assert "sampling, step 3 0/4" in progress.status()
                    assert "training, step 1 1/2" in progress.status()
            with progress.evaluation("test", 3), progress.saving(2):
                assert "evaluating test 0/3" in progress.status()
                assert "saving, step 2" in progress.status()
            progress.step_done()
            progress.say("done [with] it")
            assert progress.status() == ""

    asyncio.run(run())
    assert out.getvalue() == "done [with] it\n"


def test_lines_printed_on_its_console_come_above_the_bars():
    out = io.StringIO()
    with StepDisplay(2, console=Console(file=out, force_terminal=True)) as progress:
        with progress.sampling(0, 1):
            progress.console.print("a table")
        progress.step_done()
    assert "a table" in out.getvalue()
    assert "sampling, step 0" in out.getvalue()
