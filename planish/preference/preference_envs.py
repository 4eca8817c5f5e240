"""Environments whose answers are rewarded for being preferred over the other answers of their
group.

    reward = (wins - losses) / matchups + (format - 1)

`format` is 1 for an answer that ended properly and 0 otherwise. So truncation costs 1. That is the
difference between a tie and a loss in every matchup. planish/preference/matchups.py decides which
answers are compared. A preference model decides which one wins. It sees the text of an answer as a
reader would, without reasoning and tool calls.

The wins and losses of a group sum to 0, whatever the policy learns. So the mean reward shows only
the format. To measure progress, compare with another policy
(planish/preference/comparison_evaluator.py).

All matchups are judged concurrently. An error of the judge is an error of the group's grading,
which the error strategy of the run handles.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import chz

from planish import ServiceClient, logtree
from planish.completers import StopCondition
from planish.errors import UserError
from planish.preference.judging import judge_comparisons, require_judge_fits
from planish.preference.matchups import (
    MatchupResult,
    Standing,
    TournamentPattern,
    make_matchups,
    require_chunks,
    standings,
)
from planish.preference.preference_models import PreferenceModel, PreferenceModelBuilder
from planish.preference.prompts import PromptBuilder, fitting_prompts
from planish.preference.types import Comparison, Messages
from planish.renderers import Renderer, get_text_content
from planish.rl.environments.datasets import ProblemDataset
from planish.rl.environments.problem_env import final_step
from planish.rl.environments.prompt_selection import Selection
from planish.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    Trajectory,
)
from planish.runlog.model_renderer import model_renderer
from planish.training.option_rules import at_least

FORMAT_COEF = 1.0
"""The weight of the format term in the reward."""


@dataclass(frozen=True)
class Answer:
    """A policy's answer to a prompt."""

    text: str
    is_complete: bool
    """Whether the answer ended properly."""

    @property
    def completion(self) -> Messages:
        """The answer as a conversation of one assistant message."""
        return [{"role": "assistant", "content": self.text}]


def read_answer(renderer: Renderer, tokens: Sequence[int]) -> Answer:
    """Parse sampled tokens into an answer."""
    message, termination = renderer.parse_response(list(tokens))
    return Answer(get_text_content(message), termination.is_clean)


@dataclass
class PreferenceEnv(Env):
    """An environment of one answer to a prompt. The reward is computed with the whole group."""

    prompt: Messages
    renderer: Renderer

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Return the tokens of the prompt, and what ends an answer."""
        return self.renderer.build_generation_prompt(
            self.prompt
        ), self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Return the end of the episode, with the reward 0. The group is graded as a whole."""
        answer = read_answer(self.renderer, action)
        with logtree.scope_header("Prompt"):
            logtree.conversation(self.prompt)
        with logtree.scope_header("Policy Response"):
            logtree.conversation(answer.completion)
        return final_step(self.renderer, 0.0, extra)


@dataclass(frozen=True)
class PairwisePreferenceGroupBuilder(EnvGroupBuilder):
    """A group of `num_envs` answers to one prompt.

    It can be pickled if its preference model can.
    """

    convo_prefix: Messages
    policy_model_name: str
    policy_renderer_name: str | None
    preference_model: PreferenceModel
    num_envs: int = 4
    tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS
    matchup_group_size: int = 4

    def __post_init__(self) -> None:
        require_tournament(self.num_envs, self.matchup_group_size, name="num_envs")

    async def make_envs(self) -> Sequence[Env]:
        """Return an environment for each answer of the group."""
        return [PreferenceEnv(self.convo_prefix, self._renderer) for _ in range(self.num_envs)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Let the preference model compare the answers; return a reward and metrics for each."""
        answers_G = [
            read_answer(self._renderer, trajectory.transitions[-1].ac.tokens)
            for trajectory in trajectory_group
        ]
        matchups = make_matchups(len(answers_G), self.tournament_pattern, self.matchup_group_size)
        preferences = await judge_comparisons(
            self.preference_model,
            [
                Comparison(
                    self.convo_prefix,
                    answers_G[matchup.a].completion,
                    answers_G[matchup.b].completion,
                )
                for matchup in matchups
            ],
        )
        results = [MatchupResult(*pair) for pair in zip(matchups, preferences, strict=True)]
        standings_G = standings(len(answers_G), results)
        _log_matchups(results)
        return [
            reward_and_metrics(answer, standing)
            for answer, standing in zip(answers_G, standings_G, strict=True)
        ]

    def logging_tags(self) -> list[str]:
        """Return the tag of the metrics of these groups."""
        return ["pair_pref"]

    @property
    def _renderer(self) -> Renderer:
        return model_renderer(self.policy_model_name, self.policy_renderer_name)


def reward_and_metrics(answer: Answer, standing: Standing) -> tuple[float, Metrics]:
    """Return the reward of an answer and its components."""
    format_score = float(answer.is_complete)
    reward = standing.win_minus_loss + FORMAT_COEF * (format_score - 1.0)
    return reward, {"win_minus_loss": standing.win_minus_loss, "format": format_score}


def require_tournament(
    group_size: int, matchup_group_size: int, *, name: str = "group_size"
) -> None:
    """Raise UserError for groups or chunks of fewer than two answers. `name` is the option with the
    size of groups.
    """
    if group_size < 2:
        raise UserError(
            f"{name}={group_size}: give at least 2: answers are compared within their group"
        )
    require_chunks(matchup_group_size)


def _log_matchups(results: Sequence[MatchupResult]) -> None:
    with logtree.scope_header("Matchups"):
        rows = [
            {"A": r.matchup.a, "B": r.matchup.b, "preference": f"{r.preference:.4f}"}
            for r in results
        ]
        logtree.table(rows, caption="-1: A is better, 1: B is better")


@chz.chz
class TournamentOptions:
    """Which prompts are used, and how the answers to a prompt are compared."""

    matchup_group_size: int = chz.field(
        default=4,
        doc="number of answers in a chunk; all answers of a chunk are compared",
        metadata=at_least(2, "at least {}: answers are compared with each other"),
    )
    max_prompt_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens in a prompt; longer ones are left out and counted; none = no limit",
    )


@chz.chz
class PairwisePreferenceRLDatasetBuilder(TournamentOptions, RLDatasetBuilder):
    """The options of a dataset of prompts, each with a group of answers that are compared.

    It has no test set. To evaluate, use planish/preference/comparison_evaluator.py.
    """

    prompt_builder: PromptBuilder
    preference_model_builder: PreferenceModelBuilder
    policy_model_name: str
    policy_renderer_name: str | None = chz.field(
        default=None, doc="chat format; none = the model's own"
    )
    batch_size: int = chz.field(default=16, doc="prompts per step")
    group_size: int = chz.field(default=4, doc="answers per prompt")
    tournament_pattern: TournamentPattern = TournamentPattern.ALL_PAIRS_BOTH_WAYS
    seed: int = chz.field(default=0, doc="seed of the order of the prompts")
    service_client: ServiceClient | None = chz.field(
        default=None, doc="service client of the preference model; none = it opens its own"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        require_tournament(self.group_size, self.matchup_group_size)
        selection = await asyncio.to_thread(self._prompts)
        preference_model = await asyncio.to_thread(
            self.preference_model_builder, self.service_client
        )

        def make_group(prompt: Messages) -> PairwisePreferenceGroupBuilder:
            return PairwisePreferenceGroupBuilder(
                prompt,
                self.policy_model_name,
                self.policy_renderer_name,
                preference_model,
                self.group_size,
                self.tournament_pattern,
                self.matchup_group_size,
            )

        train = ProblemDataset(
            selection.problems,
            make_group,
            self.batch_size,
            shuffle_seed=self.seed,
            lengths=selection.lengths,
            check_answers=partial(require_judge_fits, preference_model, selection.problems),
        )
        return train, None

    def _prompts(self) -> Selection[Messages]:
        renderer = model_renderer(self.policy_model_name, self.policy_renderer_name)
        prompts = self.prompt_builder().train
        if not prompts:
            raise UserError("there are no prompts to train on; give at least one")
        return fitting_prompts(prompts, renderer, "train", self.max_prompt_tokens)
