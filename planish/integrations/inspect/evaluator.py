# pyright: reportMissingImports=false
"""Run Inspect's tasks as evaluations between training steps."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from inspect_ai import eval_async
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, Model

from planish import SamplingClient
from planish.errors import PlanishError
from planish.evaluation.models import OpenedModel
from planish.integrations.inspect.entry import provider
from planish.integrations.inspect.model import MAX_CONNECTIONS
from planish.renderers import Renderer
from planish.runlog.checkpoints import choose_renderer
from planish.runlog.evaluators import SamplingClientEvaluator


@dataclass(eq=False)
class InspectEvaluator(SamplingClientEvaluator):
    """Measures eval/TASK/SCORER/METRIC, eval/TASK/num_examples and eval/TASK/num_errors of each of
    the tasks.
    """

    tasks: Any
    """Passed to Inspect's `eval_async`, as are `limit` and `log_dir`."""
    _: KW_ONLY
    name: str = "inspect"
    config: GenerateConfig | None = None
    """Overrides the tasks' own generation options."""
    renderer: Renderer | None = None
    """None = the base model's default."""
    context_window: int | None = None
    limit: int | None = None
    log_dir: str | None = None
    max_connections: int = MAX_CONNECTIONS

    async def __call__(self, sampling_client: SamplingClient) -> Mapping[str, float]:
        base_model = sampling_client.get_base_model()
        renderer = self.renderer or choose_renderer(
            None, base_model, sampling_client.get_tokenizer()
        )
        opened = OpenedModel(base_model, sampling_client, renderer, self.context_window)
        logs = await eval_async(
            self.tasks,
            # Only models made by `provider` have a name in Inspect's registry, and so in its logs.
            model=Model(provider(base_model, model=opened), self.config or GenerateConfig()),
            limit=self.limit,
            log_dir=self.log_dir,
            max_connections=self.max_connections,
            fail_on_error=False,
        )
        return {name: value for log in logs for name, value in metrics_of(log).items()}


def metrics_of(log: EvalLog) -> dict[str, float]:
    """Return the metrics of a task. Failed samples are counted in num_errors. Raises PlanishError
    if the task as a whole failed.
    """
    if log.status != "success" or log.results is None:
        reason = log.error.message if log.error else "none of its samples could be scored"
        raise PlanishError(
            f"Inspect's task {log.eval.task} returned no results: {reason}; see {log.location}"
        )
    results, prefix = log.results, f"eval/{log.eval.task}"
    metrics = {
        f"{prefix}/{score.name}/{name}": float(metric.value)
        for score in results.scores
        for name, metric in score.metrics.items()
    }
    return metrics | {
        f"{prefix}/num_examples": results.total_samples,
        f"{prefix}/num_errors": results.total_samples - results.completed_samples,
    }
