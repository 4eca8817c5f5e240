"""Run a task as an evaluation between training steps."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from planish import SamplingClient
from planish.evaluation.evaluate import CONCURRENCY, evaluate
from planish.evaluation.metrics import named
from planish.evaluation.types import Sampling, Task
from planish.renderers import Renderer
from planish.runlog.evaluators import SamplingClientEvaluator


@dataclass(eq=False)
class TaskEvaluator(SamplingClientEvaluator):
    """An evaluator whose metrics are those of the task, as eval/TASK/NAME.

    Among them are score, num_correct, num_examples and num_errors. The fields are the arguments of
    `evaluate`. The sampling seeds are the same for every policy, so policies are compared with
    equal luck.
    """

    task: Task
    sampling: Sampling | None = None
    _: KW_ONLY
    k: Sequence[int] | None = None
    renderer: Renderer | None = None
    context_window: int | None = None
    concurrency: int = CONCURRENCY

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task.name

    async def __call__(self, sampling_client: SamplingClient) -> Mapping[str, float]:
        results = await evaluate(
            sampling_client,
            self.task,
            self.sampling,
            k=self.k,
            renderer=self.renderer,
            context_window=self.context_window,
            concurrency=self.concurrency,
        )
        return named(self.task.name, results.metrics)
