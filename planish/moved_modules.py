"""Modules under their former names, which work for one release with a DeprecationWarning.

`import planish.rl.problem_env` imports `planish.rl.environments.problem_env`, and both names are
one module. Inside planish only the new names are used. Modules that were internal, such as those
of the engine and the kernels, have no former name here.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "chat_endpoint": "integrations.openai_endpoint",
    "checkpointing": "runlog.checkpoints",
    "cli": "commands.cli",
    "console": "runlog.console",
    "curves": "runlog.curves",
    "dataset_rows": "datasets.rows",
    "engine.losses": "engine.training.losses",
    "evaluation.inspect_evaluator": "integrations.inspect.evaluator",
    "evaluation.inspect_messages": "integrations.inspect.messages",
    "evaluation.inspect_model": "integrations.inspect.model",
    "evaluators": "runlog.evaluators",
    "inspect_entry": "integrations.inspect.entry",
    "interruption": "processes.interruption",
    "learning_rates": "training.learning_rates",
    "loss_options": "service",
    "mean": "runlog.statistics",
    "metric_logs": "runlog.metrics_log",
    "model_renderer": "runlog.model_renderer",
    "plotting": "runlog.plotting",
    "problems": "datasets",
    "problems.grading": "datasets.grading",
    "problems.gsm8k": "datasets.gsm8k",
    "problems.math_datasets": "datasets.math_problems",
    "provenance": "runlog.provenance",
    "recipes.boxed_problems": "rl.environments.boxed_problems",
    "recipes.generated_dataset": "rl.environments.datasets",
    "recipes.grpo": "rl.answers",
    "recipes.self_play": "rl.environments.self_play",
    "rl.config": "training.rl_config",
    "rl.conversation": "rl.environments.conversation",
    "rl.datasets": "rl.environments.datasets",
    "rl.evaluation": "rl.rollout.evaluation",
    "rl.loop": "training.rl_learner",
    "rl.message_env": "rl.environments.message_env",
    "rl.message_turn": "rl.environments.message_turn",
    "rl.metrics": "rl.rollout.metrics",
    "rl.problem_env": "rl.environments.problem_env",
    "rl.rollout_files": "reports.rollout_files",
    "rl.rollout_limits": "rl.limits",
    "rl.rollout_strategy": "rl.rollout.strategy",
    "rl.rollout_summaries": "reports.rollout_rows",
    "rl.rollouts": "rl.rollout.rollouts",
    "rl.train": "training.train_rl",
    "rl.verifiers_datasets": "integrations.verifiers.datasets",
    "rl.verifiers_env": "integrations.verifiers.environments",
    "runs": "runlog.run_directory",
    "schedules": "training.schedules",
    "supervised.config": "training.supervised_config",
    "supervised.loop": "training.supervised_learner",
    "supervised.train": "training.train_supervised",
    "timing": "runlog.spans",
    "weights": "export.weights",
}
"""Former name -> name, both within planish."""


class _FormerNames(MetaPathFinder):
    """Finds modules by their former names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("planish.") or name.removeprefix("planish.") not in MOVED:
            return None
        new_name = current_name(name)
        # Frames of the import system do not count: this is the line that asks for the module.
        warnings.warn(f"{name} is now {new_name}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, _Loader(importlib.import_module(new_name)))


class _Loader(Loader):
    """Gives a module that has been imported already."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the spec of the former name here.
        module.__spec__ = self.spec


RENAMED = {"planish.recipes.shorter:DrawnPrompts": "planish.recipes.shorter:GeneratedPrompts"}
"""Classes of options under their former names, as chz writes them."""


def current_name(name: str) -> str:
    """Return the present form of a dotted name, `planish.rl.config.Config` or, as chz writes it,
    `planish.rl.config:Config`. Any other text is returned as it is.
    """
    if name in RENAMED:
        return RENAMED[name]
    module, colon, attribute = name.partition(":")
    package, *words = module.split(".")
    for count in range(len(words), 0, -1):
        former = ".".join(words[:count])
        if package == "planish" and former in MOVED:
            return ".".join((package, MOVED[former], *words[count:])) + colon + attribute
    return name


def find_former_names() -> None:
    """Let the former names be imported. It must look before Python's own finder, which would load
    `planish.problems.gsm8k` once more from the folder of `planish.datasets`.
    """
    sys.meta_path.insert(0, _FormerNames())
