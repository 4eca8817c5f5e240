"""The table that maps the names of tinker_cookbook to names of planish.

Each entry of `MODULES` describes one module of the cookbook. Its names are looked up first in
`names`, then in `fallback`, a module of planish whose names have the same meaning as the
cookbook's. A name in neither raises an error. `REFUSED` has the reasons for modules that planish
lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CookbookModule:
    """One module of the cookbook."""

    fallback: str | None = None
    """The module of planish that has the names which are not in `names`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """For a name of the cookbook, its target, written MODULE:NAME."""
    difference: str = ""
    """How the module differs from the cookbook's, for docs/reference/porting.md."""


_A = "planish.cookbook.adapters"
_RENDERERS = CookbookModule(
    "planish.renderers",
    {
        "ParseTermination": "planish.renderers:Termination",
        "AudioPart": f"{_A}.renderers:AudioPart",
        "Role": "builtins:str",
        "ensure_text": f"{_A}.renderers:ensure_text",
        "format_content_as_string": f"{_A}.renderers:format_content_as_string",
        "get_renderer": f"{_A}.renderers:get_renderer",
    },
    "no audio; the formats are those of `planish.renderers.FORMATS`",
)
_TOOL_USE = CookbookModule("planish.tool_use")
_LOGTREE = CookbookModule("planish.logtree")

MODULES: dict[str, CookbookModule] = {
    "checkpoint_utils": CookbookModule(f"{_A}.checkpoints"),
    "cli_utils": CookbookModule(f"{_A}.run_helpers"),
    "completers": CookbookModule("planish.completers"),
    "display": CookbookModule(f"{_A}.display"),
    "distillation.datasets": CookbookModule(
        "planish.distillation.datasets",
        {
            "PromptOnlyDatasetBuilder": "planish.distillation.prompts:PromptOnlyDatasetBuilder",
            "PromptOnlyEnv": "planish.distillation.prompts:PromptOnlyEnv",
            "TeacherConfig": "planish.distillation.teachers:TeacherConfig",
        },
        "PromptOnlyDatasetBuilder has `dataset`, any dataset of prompts, instead of `dataset_name`",
    ),
    "distillation.train_off_policy": CookbookModule("planish.distillation.off_policy"),
    "distillation.train_on_policy": CookbookModule(
        "planish.distillation.on_policy",
        {
            "Config": f"{_A}.training:OnPolicyConfig",
            "main": f"{_A}.training:train_on_policy",
        },
    ),
    "eval.evaluators": CookbookModule(
        "planish.runlog.evaluators",
        {
            "EvaluatorBuilder": f"{_A}.names:EvaluatorBuilder",
            "SamplingClientEvaluatorBuilder": f"{_A}.names:EvaluatorBuilder",
        },
    ),
    "eval.inspect_evaluators": CookbookModule(
        "planish.integrations.inspect.evaluator",
        {"InspectEvaluatorBuilder": "planish.integrations.inspect.evaluator:InspectEvaluator"},
        "needs planish[inspect]; InspectEvaluatorBuilder is another name of InspectEvaluator",
    ),
    "exceptions": CookbookModule(f"{_A}.names"),
    "hyperparam_utils": CookbookModule("planish.training.learning_rates"),
    "image_processing_utils": CookbookModule(
        f"{_A}.images",
        difference="get_image_processor raises an error: renderers find it themselves",
    ),
    "model_info": CookbookModule(
        f"{_A}.models",
        difference="facts about a model come from its files, not from a table of names",
    ),
    "preference.comparison_policy_evaluator": CookbookModule(
        "planish.preference.comparison_evaluator",
        difference="ComparisonEvaluator takes prompts and a reference: FixedReference or "
        "PolicyReference",
    ),
    "preference.dpo_datasets": CookbookModule("planish.preference.datasets"),
    "preference.preference_datasets": CookbookModule(
        "planish.preference.datasets",
        {
            "ChatDatasetBuilderFromComparisons": f"{_A}.preferences:ChatDatasetBuilderFromComparisons",
            "ComparisonDatasetBuilder": f"{_A}.preferences:ComparisonDatasetBuilder",
        },
    ),
    "preference.train_dpo": CookbookModule(
        "planish.preference.dpo",
        {"Config": f"{_A}.training:DPOConfig", "main": f"{_A}.training:train_dpo"},
    ),
    "preference.types": CookbookModule(
        "planish.preference.types",
        {
            "PreferenceModel": "planish.preference.preference_models:PreferenceModel",
            "PreferenceModelBuilder": "planish.preference.preference_models:PreferenceModelBuilder",
            "PreferenceModelBuilderFromChatRenderer": f"{_A}.preferences:PreferenceModelBuilderFromChatRenderer",
        },
    ),
    "recipes.chat_sl.chat_datasets": CookbookModule(f"{_A}.chat_datasets"),
    "recipes.math_rl.math_env": CookbookModule(f"{_A}.math_problems"),
    "recipes.math_rl.math_grading": CookbookModule(f"{_A}.math_problems"),
    "recipes.preference.datasets": CookbookModule(f"{_A}.preferences"),
    "renderers": _RENDERERS,
    "renderers.base": _RENDERERS,
    "renderers.tml_v0": CookbookModule(names={"TmlV0Renderer": f"{_A}.renderers:TmlV0Renderer"}),
    "rl.data_processing": CookbookModule("planish.rl.data_processing"),
    "rl.message_env": CookbookModule("planish.rl.environments.message_env"),
    "rl.metric_util": CookbookModule("planish.rl.rollout.evaluation"),
    "rl.play_w_env": CookbookModule(f"{_A}.manual_policy"),
    "rl.preference_envs": CookbookModule(
        "planish.preference.preference_envs",
        {
            "PairwisePreferenceRLDatasetBuilder": f"{_A}.preferences:PairwisePreferenceRLDatasetBuilder",
            "TournamentPattern": "planish.preference.matchups:TournamentPattern",
        },
    ),
    "rl.problem_env": CookbookModule(
        "planish.rl.environments.problem_env",
        {"logger": f"{_A}.names:logger"},
        "check_answer returns True or False",
    ),
    "rl.rollout_limits": CookbookModule("planish.rl.limits"),
    "rl.rollout_logging": CookbookModule(
        names={"RolloutSummaryExportConfig": f"{_A}.names:RolloutSummaryExportConfig"},
        difference="planish's loop writes rollouts itself and does not use "
        "RolloutSummaryExportConfig",
    ),
    "rl.rollout_strategy": CookbookModule("planish.rl.rollout.strategy"),
    "rl.rollouts": CookbookModule("planish.rl.rollout.rollouts"),
    "rl.train": CookbookModule(
        "planish.training.train_rl",
        {
            "AsyncConfig": f"{_A}.training:AsyncConfig",
            "Config": f"{_A}.training:RLConfig",
            "KLReferenceConfig": "planish.training.rl_config:KLReferenceConfig",
            "StreamMinibatchConfig": "planish.training.rl_config:StreamMinibatchConfig",
            "main": f"{_A}.training:train_rl",
            "run_evaluations_parallel": f"{_A}.training:run_evaluations_parallel",
        },
        "the loop and the files are planish's: docs/guide/environments.md, "
        "docs/reference/metrics.md",
    ),
    "rl.types": CookbookModule("planish.rl.types"),
    "sandbox": CookbookModule(
        f"{_A}.sandboxes",
        {"SandboxFusionClient": f"{_A}.sandbox_fusion:SandboxFusionClient"},
        "planish.sandbox runs programs on this machine",
    ),
    "sandbox.modal_sandbox": CookbookModule(
        f"{_A}.sandboxes", difference="its classes raise an error: planish has no client for Modal"
    ),
    "sandbox.sandbox_interface": CookbookModule(f"{_A}.sandboxes"),
    "sandbox.sandboxfusion": CookbookModule(f"{_A}.sandbox_fusion"),
    "stores.storage": CookbookModule(f"{_A}.stores"),
    "stores.training_store": CookbookModule(f"{_A}.stores"),
    "supervised.common": CookbookModule(f"{_A}.supervised_data"),
    "supervised.data": CookbookModule(
        f"{_A}.supervised_data",
        {
            "FromConversationFileBuilder": "planish.supervised.datasets:FromConversationFileBuilder",
            "conversation_to_datum": "planish.renderers:conversation_to_datum",
        },
    ),
    "supervised.train": CookbookModule(
        "planish.training.train_supervised",
        {"Config": f"{_A}.training:SLConfig", "main": f"{_A}.training:train_sl"},
    ),
    "supervised.types": CookbookModule(
        "planish.supervised.types",
        {
            "ChatDatasetBuilderCommonConfig": f"{_A}.supervised_data:ChatDatasetBuilderCommonConfig",
        },
    ),
    "tokenizer_utils": CookbookModule(f"{_A}.models"),
    "tool_use": _TOOL_USE,
    "tool_use.agent_tool_message_env": CookbookModule("planish.tool_use.agent_env"),
    "tool_use.tools": CookbookModule("planish.tool_use.tools"),
    "utils.git_rev": CookbookModule(f"{_A}.run_helpers"),
    "utils.logtree": _LOGTREE,
    "utils.logtree_formatters": _LOGTREE,
    "utils.lr_scheduling": CookbookModule(f"{_A}.names"),
    "utils.misc_utils": CookbookModule(f"{_A}.small_functions"),
    "utils.ml_log": CookbookModule(
        f"{_A}.metric_logger", difference="metrics go to metrics.jsonl, the console and W&B"
    ),
    "utils.session_naming": CookbookModule(f"{_A}.run_helpers"),
    "weights": CookbookModule("planish.export.weights"),
}

REFUSED = {
    "audio_processing_utils": "planish reads text and images only",
    "capture": "planish makes no HTTP requests that could be captured",
    "chat_app": "use `planish chat`",
    "distillation.sdft": "self-distillation is not supported; docs/guide/distillation.md describes "
    "what is",
    "inference": "`planish export` writes models for other inference engines",
    "third_party": "`planish serve` has OpenAI-compatible endpoints",
    "xmux": "start runs from a shell",
}
"""The modules of the cookbook that planish lacks, with the reason or a replacement."""
