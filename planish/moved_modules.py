"""Modules under their former names, which work for one release with a DeprecationWarning.

`import planish.rl.problem_env` imports `planish.rl.environments.problem_env`, and both names are
one module. Inside planish only the new names are used.
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
    "commands.records": "client.checkpoint_records",
    "console": "runlog.console",
    "curves": "runlog.curves",
    "dataset_rows": "datasets.rows",
    "engine.adapter_stacks": "model.kernels.reference.adapter_stacks",
    "engine.adapters": "engine.training.adapters",
    "engine.attention": "model.kernels.reference.attention",
    "engine.checkpoint_files": "engine.checkpoints.files",
    "engine.checkpoint_labels": "engine.checkpoints.store",
    "engine.datums": "engine.training.datums",
    "engine.drawing": "engine.sampling.token_sampling",
    "engine.gpu_adapters": "model.kernels.triton.adapters",
    "engine.gpu_attention": "model.kernels.triton.sampling_attention",
    "engine.gpu_forest": "model.kernels.triton.tree_attention",
    "engine.graph_passes": "engine.sampling.cuda_graph_runner",
    "engine.heap": "engine.release_memory",
    "engine.kv_cache": "model.kv_cache",
    "engine.losses": "engine.training.losses",
    "engine.native_attention": "model.kernels.cpp.attention",
    "engine.operations": "engine.training_operations",
    "engine.ordered_attention": "model.kernels.reference.ordered_attention",
    "engine.owner": "engine.engine_thread",
    "engine.packing": "model.prefix_tree",
    "engine.passes": "engine.sampling.model_runner",
    "engine.positions": "model.positions",
    "engine.prefix_cache": "engine.sampling.prefix_cache",
    "engine.prompt_scores": "engine.sampling.prompt_logprobs",
    "engine.randomness": "engine.sampling.randomness",
    "engine.row_tiling": "model.kernels.reference.row_tiling",
    "engine.sample_checks": "engine.sampling.validation",
    "engine.sampler": "engine.sampling.sampler",
    "engine.sampling_attention": "model.kernels.reference.sampling_attention",
    "engine.sampling_head": "engine.sampling.sampling_head",
    "engine.scheduler": "engine.sampling.scheduler",
    "engine.sending": "model.transfer",
    "engine.stopping": "engine.sampling.stopping",
    "engine.tenants": "engine.training_models",
    "engine.trainer": "engine.training.trainer",
    "evaluation.inspect_evaluator": "integrations.inspect.evaluator",
    "evaluation.inspect_messages": "integrations.inspect.messages",
    "evaluation.inspect_model": "integrations.inspect.model",
    "evaluation.inspect_options": "integrations.inspect.options",
    "evaluators": "runlog.evaluators",
    "home": "files",
    "inspect_entry": "integrations.inspect.entry",
    "interruption": "processes.interruption",
    "learning_rates": "training.learning_rates",
    "loss_options": "service",
    "mean": "runlog.statistics",
    "metric_logs": "runlog.metrics_log",
    "metric_services": "runlog.metric_services",
    "metrics_table": "runlog.metrics_table",
    "model_renderer": "runlog.model_renderer",
    "native": "model.kernels.cpp",
    "native.build": "model.kernels.cpp.build",
    "native.cpu": "model.kernels.cpp.ops",
    "native.cpu_check": "model.kernels.cpp.checks",
    "native.cpu_head": "model.kernels.cpp.head",
    "native.cpu_pass": "model.kernels.cpp.decode_pass",
    "native.cpu_products": "model.kernels.cpp.matmul",
    "native.gpu_check": "model.kernels.triton.self_test",
    "native.kernels": "model.kernels.choose",
    "native.self_test": "model.kernels.cpp.self_test",
    "native.threads": "model.kernels.cpp.threads",
    "native.triton_common": "model.kernels.triton.common",
    "native.triton_decode": "model.kernels.triton.decode_kernels",
    "native.triton_elementwise": "model.kernels.triton.elementwise_kernels",
    "native.triton_forest": "model.kernels.triton.tree_kernels",
    "native.triton_lora": "model.kernels.triton.lora_kernels",
    "native.verdicts": "model.kernels.verdicts",
    "plotting": "runlog.plotting",
    "problems": "datasets",
    "problems.grading": "datasets.grading",
    "problems.grading_worker": "datasets.grading_worker",
    "problems.gsm8k": "datasets.gsm8k",
    "problems.math_datasets": "datasets.math_problems",
    "problems.process_grader": "datasets.process_grader",
    "provenance": "runlog.provenance",
    "recipes.boxed_problems": "rl.environments.boxed_problems",
    "recipes.generated_dataset": "rl.environments.datasets",
    "recipes.grpo": "rl.answers",
    "recipes.self_play": "rl.environments.self_play",
    "rl.config": "training.rl_config",
    "rl.conversation": "rl.environments.conversation",
    "rl.counters": "training.rl_learner",
    "rl.datasets": "rl.environments.datasets",
    "rl.evaluation": "rl.rollout.evaluation",
    "rl.group_play": "rl.rollout.group_rollout",
    "rl.loop": "training.rl_learner",
    "rl.message_env": "rl.environments.message_env",
    "rl.message_turn": "rl.environments.message_turn",
    "rl.metrics": "rl.rollout.metrics",
    "rl.playing": "rl.rollout.runner",
    "rl.problem_env": "rl.environments.problem_env",
    "rl.rollout_files": "reports.rollout_files",
    "rl.rollout_limits": "rl.limits",
    "rl.rollout_log": "reports.rollout_log",
    "rl.rollout_overview": "reports.rollout_overview",
    "rl.rollout_page": "reports.rollout_page",
    "rl.rollout_player": "rl.rollout.processes.worker",
    "rl.rollout_pool": "rl.rollout.processes.pool",
    "rl.rollout_process": "rl.rollout.processes.process",
    "rl.rollout_strategy": "rl.rollout.strategy",
    "rl.rollout_summaries": "reports.rollout_rows",
    "rl.rollout_tokens": "reports.rollout_tokens",
    "rl.rollout_tree": "reports.rollout_tree",
    "rl.rollout_views": "reports.rollout_views",
    "rl.rollout_wire": "rl.rollout.processes.peer",
    "rl.rollouts": "rl.rollout.rollouts",
    "rl.single_rollout": "rl.rollout.single_rollout",
    "rl.train": "training.train_rl",
    "rl.training_step": "training.rl_step",
    "rl.verifiers_datasets": "integrations.verifiers.datasets",
    "rl.verifiers_env": "integrations.verifiers.environments",
    "rl.verifiers_library": "integrations.verifiers.library",
    "rl.verifiers_messages": "integrations.verifiers.messages",
    "runs": "runlog.run_directory",
    "schedules": "training.schedules",
    "supervised.config": "training.supervised_config",
    "supervised.context": "training.supervised_context",
    "supervised.loop": "training.supervised_learner",
    "supervised.train": "training.train_supervised",
    "timing": "runlog.spans",
    "weights": "export.weights",
    "worker_process": "sandbox.worker_process",
    "worker_program": "sandbox.worker_program",
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


def current_name(name: str) -> str:
    """Return the present form of a dotted name, `planish.rl.config.Config` or, as chz writes it,
    `planish.rl.config:Config`. Any other text is returned as it is.
    """
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
