# pyright: reportMissingImports=false
"""Small programs that use tinker-cookbook as a library, as its users write them: `python
cookbook_programs.py NAME RUN_DIRECTORY`.

`cookbook_run.py` runs them in an environment that has the cookbook and need not have planish.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chz
import datasets
import tinker
import torch
from tinker_cookbook import checkpoint_utils, completers, renderers, weights
from tinker_cookbook.distillation import sdft as sdft_loop, train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import (
    TwentyQuestionsDatasetBuilder,
)
from tinker_cookbook.recipes.sdft.datasets import SDFTDataset
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised.data import FromConversationFileBuilder, conversation_to_datum
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator, SamplerNLLEvaluator
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY, KNOWN, MODEL = (os.environ[f"COOKBOOK_{name}"] for name in ("TINY", "KNOWN", "MODEL"))
RENDERER = "qwen3_instruct"
TOKENIZER = get_tokenizer(TINY)
COMMON = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=TINY, renderer_name=RENDERER, max_length=256, batch_size=8
)


def renderer() -> renderers.Renderer:
    return renderers.get_renderer(RENDERER, TOKENIZER)


class ManyOfALetter(ProblemEnv):
    def __init__(self, question: str, renderer: renderers.Renderer) -> None:
        super().__init__(renderer, format_coef=0.0)
        self.question = question

    def get_question(self) -> str:
        return self.question

    def check_answer(self, sample_str: str) -> Any:
        return sample_str.count("e") / max(1, len(sample_str))

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "e"


class Letters(RLDataset):
    def __init__(self, length: int, group_size: int) -> None:
        self.length, self.group_size = length, group_size

    def __len__(self) -> int:
        return self.length

    def get_batch(self, index: int) -> list[ProblemGroupBuilder]:
        questions = [f"{chr(97 + index)}{row}" for row in range(4)]
        return [
            ProblemGroupBuilder(partial(ManyOfALetter, q, renderer()), self.group_size)
            for q in questions
        ]


@chz.chz
class LettersBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, RLDataset]:
        return Letters(10, 8), Letters(2, 1)


def rl(log: str) -> None:
    config = train.Config(
        **_shared(log),
        dataset_builder=LettersBuilder(),
        learning_rate=1e-2,
        max_tokens=12,
        kl_penalty_coef=0.001,
        kl_reference_config=train.KLReferenceConfig(base_model=TINY),
        compute_post_kl=True,
        eval_every=4,
        rolling_save_every=1,
    )
    asyncio.run(train.main(config))


def twenty_questions(log: str) -> None:
    questions = TwentyQuestionsDatasetBuilder(
        batch_size=1,
        group_size=2,
        model_name_for_tokenizer=TINY,
        renderer_name=RENDERER,
        num_epochs=1,
        answerer_base_model=KNOWN,
    )
    shared = {**_shared(log), "max_steps": 1, "eval_every": 0, "max_tokens": 8}
    asyncio.run(train.main(train.Config(**shared, dataset_builder=questions, learning_rate=1e-3)))


@chz.chz
class Pairs(ComparisonDatasetBuilder):
    def get_train_and_test_datasets(self) -> tuple[datasets.Dataset, datasets.Dataset]:
        rows = datasets.Dataset.from_list([{"n": n} for n in range(40)])
        return rows.select(range(32)), rows.select(range(32, 40))

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison:
        said: dict[str, Any] = {
            "prompt_conversation": [{"role": "user", "content": f"Say {example['n']}"}],
            "completion_A": [{"role": "assistant", "content": "yes"}],
            "completion_B": [{"role": "assistant", "content": "no!"}],
        }
        return LabeledComparison(Comparison(**said), "A")


def dpo(log: str) -> None:
    pairs = DPODatasetBuilderFromComparisons(common_config=COMMON, comparison_builder=Pairs())
    more = {
        "learning_rate": 3e-3,
        "num_epochs": 2,
        "save_every": 3,
        "eval_every": 4,
        "rolling_save_every": 1,
    }
    train_dpo.main(train_dpo.Config(**_shared(log), dataset_builder=pairs, **more))


def off_policy(log: str) -> None:
    """Towards a teacher that learned the same conversations."""
    teacher = _taught().save_weights_for_sampler("teacher").result().path
    source = train_off_policy.DatasetWithTeacher(
        dataset_builder=FromConversationFileBuilder(
            common_config=COMMON, file_path="conversations.jsonl"
        ),
        teacher_config=TeacherConfig(base_model=TINY, load_checkpoint_path=teacher),
    )
    more = {
        "learning_rate": 1e-2,
        "batch_size": 8,
        "n_teacher_targets": 10,
        "max_steps": 6,
        "save_every": 3,
    }
    asyncio.run(
        train_off_policy.main(
            train_off_policy.Config(**_shared(log), dataset_configs=[source], **more)
        )
    )


def sdft(log: str, kind: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "forward": {"topk": 10},
        "reverse": {"topk": 10, "reverse": True},
        "sampled": {"topk": 0, "loss_fn": "importance_sampling"},
    }
    numbers = range(32)
    data = SDFTDataset(
        [f"Say {n}" for n in numbers], [f"It is {n}." for n in numbers], 4, 2, renderer()
    )
    more = {
        "learning_rate": 1e-3,
        "max_tokens": 8,
        "max_steps": 3,
        "save_every": 2,
        "teacher_sync_every": 2,
    }
    asyncio.run(sdft_loop.main(sdft_loop.Config(**_shared(log), **more, **kinds[kind]), data))


def evaluators(log: str) -> None:
    training = _taught()
    data, _ = FromConversationFileBuilder(common_config=COMMON, file_path="conversations.jsonl")()
    path = training.save_weights_for_sampler("evaluated").result().path
    service = tinker.ServiceClient()
    sampler = service.create_sampling_client(model_path=path).result()
    sampled = asyncio.run(SamplerNLLEvaluator.from_dataset(data, tokenizer=TOKENIZER)(sampler))
    assert sampled == asyncio.run(NLLEvaluator.from_dataset(data, tokenizer=TOKENIZER)(training))
    assert sampled["test/nll"] < 2.0, sampled
    assert checkpoint_utils.get_renderer_name_from_checkpoint(service, path) == RENDERER
    asked: Any = [{"role": "user", "content": "Say 5"}]
    prompt, stop = renderer().build_generation_prompt(asked), renderer().get_stop_sequences()
    message = asyncio.run(
        completers.TinkerMessageCompleter(sampler, renderer(), max_tokens=12)(asked)
    )
    assert "It" in str(message["content"]), message
    drawn = asyncio.run(
        completers.TinkerTokenCompleter(sampler, max_tokens=12, context_window=8192)(prompt, stop)
    )
    assert len(drawn.tokens) == len(drawn.logprobs) > 0
    assert drawn.sequence_id


def inspect(log: str) -> None:
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.scorer import includes
    from tinker_cookbook.eval.inspect_evaluators import InspectEvaluatorBuilder

    samples = [Sample(input=f"Say {n}", target="It is") for n in range(8)]
    task = Task(dataset=MemoryDataset(samples, name="says"), scorer=includes())
    more = {"temperature": 0.0, "max_tokens": 12, "seed": 1, "log_dir": log}
    evaluator = InspectEvaluatorBuilder(
        tasks=task, renderer_name=RENDERER, model_name=TINY, **more
    )()
    found = asyncio.run(evaluator(_taught().save_weights_and_get_sampling_client().result()))
    assert found["says/accuracy"] == 1.0, found


def weights_(log: str) -> None:
    """Downloaded, as a PEFT adapter and merged, the logprobs are those of the server, which
    computes in its model's float32.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    training, place = _taught(), Path(log)
    place.mkdir(parents=True)
    tokens = _conversation(3).model_input.to_ints()
    sampler = training.save_weights_and_get_sampling_client().result()
    served = torch.tensor(
        sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()[1:]
    )
    state, external = (
        training.save_state("state").result().path,
        training.save_weights_external("ours").result().path,
    )
    for path, name in ((state, "state"), (external, "external")):
        weights.download(tinker_path=path, output_dir=str(place / name))
    built = {"base_model": MODEL, "adapter_path": str(place / "state")}
    weights.build_hf_model(**built, output_path=str(place / "merged"))
    weights.build_lora_adapter(**built, output_path=str(place / "peft"))

    def base(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    models = [base(str(place / "merged"))]
    models += [
        PeftModel.from_pretrained(base(MODEL), str(place / name))
        for name in ("peft", "state", "external")
    ]
    for model in models:
        scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        logprobs = scores[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        # The server computes in bfloat16 on CPUs.
        assert (logprobs - served).abs().max() < 0.2, (logprobs - served).abs().max()


def _taught() -> Any:
    """A training client whose model has learned some of the conversations."""
    service = tinker.ServiceClient(user_metadata={"recipe": "cookbook_programs"})
    metadata = {checkpoint_utils.RENDERER_NAME_METADATA_KEY: RENDERER}
    training = service.create_lora_training_client(
        TINY, rank=16, seed=1, user_metadata=metadata
    ).result()
    data = [_conversation(number) for number in range(16)]
    for _ in range(12):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    return training


def _conversation(number: int) -> tinker.Datum:
    said: Any = [
        {"role": "user", "content": f"Say {number}"},
        {"role": "assistant", "content": f"It is {number}."},
    ]
    return conversation_to_datum(said, renderer(), 256)


def _shared(log: str) -> dict[str, Any]:
    return {
        "log_path": log,
        "model_name": TINY,
        "recipe_name": "trial",
        "renderer_name": RENDERER,
        "lora_rank": 16,
    }


PROGRAMS: dict[str, Callable[..., None]] = {
    "rl": rl,
    "twenty_questions": twenty_questions,
    "dpo": dpo,
    "off_policy": off_policy,
    "sdft": sdft,
    "evaluators": evaluators,
    "inspect": inspect,
    "weights": weights_,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
