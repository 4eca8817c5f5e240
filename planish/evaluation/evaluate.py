"""Run an evaluation: ask the questions, save each answer when it is complete, compute the metrics.

Invariants:

All questions are read, checked and rendered before the first token is sampled.

If sampling is deterministic (docs/architecture.md), answers depend only on (seed, question,
sample). So neither `concurrency` nor an interruption changes the answers.

Questions start in order, and `concurrency` of them are in flight at a time, so that batches are
full. One request samples all answers to a question, so the prompt is computed once.

An error that does not concern a single question, such as a lost server, ends the evaluation. The
answers so far are kept.
"""

import asyncio
import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planish import SamplingClient
from planish.errors import UserError
from planish.evaluation.answering import Answerer, RenderedQuestion, render_choices, render_question
from planish.evaluation.files import Answers, EvaluationDirectory
from planish.evaluation.metrics import check_k, metrics_of
from planish.evaluation.types import ChoiceTask, Sampling, Task
from planish.processes.interruption import gather_or_cancel
from planish.renderers import Renderer
from planish.runlog.checkpoints import choose_renderer
from planish.runlog.console import Stage, StepDisplay

CONCURRENCY = 64
"""The default number of questions in flight."""
VERSIONS = ("planish", "torch", "transformers", "math-verify")
"""The packages whose versions are saved with the results."""


@dataclass(frozen=True)
class Results:
    """The content of results.json."""

    task: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    metrics: Mapping[str, float]
    """The metrics by name; docs/guide/evaluation.md defines them."""


async def evaluate(
    sampling_client: SamplingClient,
    task: Task,
    sampling: Sampling | None = None,
    *,
    k: Sequence[int] | None = None,
    renderer: Renderer | None = None,
    context_window: int | None = None,
    concurrency: int = CONCURRENCY,
    out: str | Path | None = None,
    model_name: str | None = None,
    weights: str | None = None,
    display: StepDisplay | None = None,
) -> Results:
    """Evaluate a model on a task and return the results.

    `sampling` gives the sampling options; the default is Sampling(). `k` gives the values of k in
    pass@k; the default is 1. Only tasks with sampled answers accept these two arguments.

    `renderer` is the chat format; None selects the one known for the base model.

    `context_window` is the maximum number of tokens of a prompt and its answer together. If a
    prompt leaves no tokens for an answer, its answers have an error, and the evaluation continues.
    Without `context_window`, such a prompt ends the evaluation.

    `concurrency` is the number of questions that are asked at the same time.

    `out` is a directory in which answers are saved. If `out` already contains this evaluation, the
    evaluation is resumed.

    `model_name` is the model's name in the files; by default its checkpoint or its base model.

    `weights` identifies the weights behind that name, so that an evaluation of other weights is not
    resumed by mistake. `open_model` computes it.
    """
    params, k_values = resolve_sampling(task, sampling, k, concurrency)
    renderer = renderer or choose_renderer(
        None, sampling_client.get_base_model(), sampling_client.get_tokenizer()
    )
    model = {
        "name": model_name
        or getattr(sampling_client, "model_path", None)
        or sampling_client.get_base_model(),
        "base_model": sampling_client.get_base_model(),
        "renderer": renderer.name,
        "weights": weights,
    }
    settings = {} if params is None else asdict(params)
    render = render_choices if isinstance(task, ChoiceTask) else render_question
    rendered_questions = [render(question, renderer) for question in task.questions]
    config = {
        "task": task.name,
        "digest": task.digest,
        **model,
        **settings,
        "context_window": context_window,
    }
    answerer = Answerer(sampling_client, renderer, context_window)

    async def answer_question(question: RenderedQuestion) -> Answers:
        if params is None or isinstance(task, ChoiceTask):
            return [await answerer.choose(question)]
        return await answerer.sample(question, task, params)

    with nullcontext() if out is None else EvaluationDirectory(out, config) as directory:
        num_samples = 1 if params is None else params.samples
        saved_answers = directory.answers(task, num_samples) if directory else {}
        question_numbers = {question.number for question in task.questions}
        answers = {
            number: found for number, found in saved_answers.items() if number in question_numbers
        }
        progress = _Progress(directory, answers, display)
        if display:
            for _ in answers:
                display.step_done()
        await _answer_all(
            [one for one in rendered_questions if one.question.number not in answers],
            answer_question,
            progress,
            concurrency,
        )
        results = Results(
            task={
                "name": task.name,
                "source": task.source,
                "digest": task.digest,
                "num_questions": len(task.questions),
            },
            model=model,
            settings={**settings, "k": list(k_values), "context_window": context_window},
            versions=_versions(),
            metrics=metrics_of([answers[question.number] for question in task.questions], k_values),
        )
        if directory:
            directory.write_results(asdict(results))
    return results


@dataclass
class _Progress:
    """Saves the answers, and shows how many questions are done."""

    directory: EvaluationDirectory | None
    answers: dict[int, Answers]
    display: StepDisplay | None
    stage: Stage | None = None

    def begin(self, num_questions: int) -> None:
        self.stage = self.display.open_stage("answering", num_questions) if self.display else None

    def save(self, question_answers: Answers) -> None:
        self.answers[question_answers[0].question] = question_answers
        if self.directory:
            self.directory.append(question_answers)
        if self.stage and self.display:
            self.stage.advance()
            self.stage.add_sampled_tokens(
                sum(len(getattr(answer, "tokens", ())) for answer in question_answers)
            )
            self.display.step_done()


async def _answer_all(
    rendered_questions: Sequence[RenderedQuestion],
    answer_question: Callable[[RenderedQuestion], Any],
    progress: _Progress,
    concurrency: int,
) -> None:
    semaphore = asyncio.Semaphore(concurrency)
    progress.begin(len(rendered_questions))

    async def answer_one(question: RenderedQuestion) -> None:
        async with semaphore:
            progress.save(await answer_question(question))

    await gather_or_cancel(answer_one(question) for question in rendered_questions)


def resolve_sampling(
    task: Task, sampling: Sampling | None, k: Sequence[int] | None, concurrency: int
) -> tuple[Sampling | None, tuple[int, ...]]:
    """Return the sampling options and the values of k. Raises UserError if the task cannot use
    them, or for a `concurrency` below 1.

    For a task that scores choices, return None and ().
    """
    if concurrency < 1:
        raise UserError(f"concurrency={concurrency}: give a whole number of at least 1")
    if not task.questions:
        raise UserError(f"task {task.name} has no questions; give a task with at least one")
    if isinstance(task, ChoiceTask):
        if sampling is not None or k is not None:
            raise UserError(
                f"task {task.name} compares the logprobs of choices and samples nothing; leave out "
                "samples, k, max_tokens, temperature and seed"
            )
        return None, ()
    params = sampling or Sampling()
    k_values = tuple(k) if k is not None else (1,)
    check_k(k_values, params.samples)
    return params, k_values


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in VERSIONS
    }
