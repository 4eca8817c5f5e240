"""Run a task as an evaluation between training steps."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from planish import SamplingClient
from planish.evaluation.evaluate import CONCURRENCY, evaluate
from planish.evaluation.metrics import with_log_names
from planish.evaluation.types import Sampling, Task
from planish.renderers import Renderer
from planish.runlog.evaluators import SamplingClientEvaluator


@dataclass(eq=False)
class TaskEvaluator(SamplingClientEvaluator):
    """An evaluator that runs a task and returns its metrics as eval/TASK/NAME.

    Among the metrics are score, num_correct, num_examples and num_errors. The fields are the
    arguments of `evaluate`. All policies are sampled with the same seeds, so the comparison of two
    policies has less noise.
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
        return with_log_names(self.task.name, results.metrics)
