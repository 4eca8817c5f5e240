"""GRPO in one notebook: sample answers, grade them, train on the advantages, plot the reward.

    marimo edit examples/tutorial_grpo.py                 as a notebook
    python examples/tutorial_grpo.py                      as a script, on sums
    python examples/tutorial_grpo.py dataset=openai/gsm8k model=Qwen/Qwen3-8B max_tokens=256
    python examples/tutorial_grpo.py dataset=DIRECTORY steps=3 batch_size=4 group_size=4

The notebook contains the whole algorithm. planish/recipes/rl_loop.py is the same loop with
checkpoints and metrics. tutorial_grpo.ipynb is this notebook for Jupyter, with recorded outputs.
"""

import importlib.util

if importlib.util.find_spec("marimo") is None:
    raise SystemExit("the tutorial needs marimo: pip install 'planish[notebooks]'")

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    return (mo,)


@app.cell
def _(mo):
    mo.md(r"""
    # Learning from rewards

    In supervised training, people write the answers. Here the model writes them: it tries every question several
    times, a program decides which tries were right, and training makes the right ones likelier. You do not have to
    show *how* to solve a problem. It is enough to recognise a solution.

    The algorithm is **GRPO** (group relative policy optimization). For one step:

    1. take a batch of questions;
    2. sample a *group* of answers to each question, from the current weights;
    3. reward each answer: 1 if it is right, 0 if not;
    4. an answer's *advantage* is its reward minus the mean reward of its group;
    5. raise the probability of answers with a positive advantage and lower that of the others.

    Why groups? A right answer to an easy question says little, because most tries are right. The mean of the group
    measures how easy the question is for the current model, so no second model has to estimate it.
    """)


@app.cell
def _():
    import os
    import random
    import re
    import sys

    import planish
    from planish.datasets.gsm8k import Problem, problem_prompt
    from planish.datasets.math_problems import load_problems
    from planish.model.sources.resolve import DEFAULT_MODEL
    from planish.renderers import get_renderer, get_text_content, recommended_renderer_name

    return (
        DEFAULT_MODEL,
        Problem,
        get_renderer,
        get_text_content,
        load_problems,
        os,
        planish,
        problem_prompt,
        random,
        re,
        recommended_renderer_name,
        sys,
    )


@app.cell
def _(mo):
    mo.md(r"""
    ## Settings

    The questions are sums, which a model of 135M parameters learns on a CPU. Each step samples 16 x 8 = 128 answers.
    For the school problems of GSM8K, set `dataset` to `openai/gsm8k`, `max_tokens` to 256 and `model` to one that is
    large enough, such as `Qwen/Qwen3-8B`. On the command line: `python examples/tutorial_grpo.py steps=3 batch_size=4`.

    The recorded outputs below come from two cores of a Xeon with AMX, which many other programs used at the same time.
    The notebook ran for eleven minutes. Sampling has no fixed seed here, so your numbers differ.
    """)


@app.cell
def _(DEFAULT_MODEL, os, re, sys):
    settings = {
        "model": DEFAULT_MODEL,
        "dataset": "",  # sums that are made here
        "steps": "15",
        "batch_size": "16",
        "group_size": "8",
        "test_size": "50",
        "max_tokens": "24",
        "learning_rate": "4e-4",
        "rank": "32",
        "plot": "",
    }
    given = dict(word.split("=", 1) for word in sys.argv[1:] if re.match("[a-z_]+=", word))
    unknown = given.keys() - settings.keys()
    if unknown:
        raise ValueError(f"unknown settings {sorted(unknown)}; known are {sorted(settings)}")
    settings.update(given)
    n_steps, batch_size, group_size, test_size = (
        int(settings[name]) for name in ("steps", "batch_size", "group_size", "test_size")
    )
    plot_path = os.path.expanduser(settings["plot"])
    return batch_size, group_size, n_steps, plot_path, settings, test_size


@app.cell
def _(mo):
    mo.md(r"""
    ## Model, renderer, sampling

    `ServiceClient()` without a URL creates an engine in this process. A *training client* is one LoRA adapter on a
    base model: it computes gradients, takes optimizer steps, and creates sampling clients for its current weights. The
    *renderer* turns chat messages into tokens in the format that this model family was trained on, and sampled tokens
    back into a message.
    """)


@app.cell
def _(get_renderer, planish, recommended_renderer_name, settings):
    service_client = planish.ServiceClient()
    training_client = service_client.create_lora_training_client(
        base_model=settings["model"], rank=int(settings["rank"])
    )
    tokenizer = training_client.get_tokenizer()
    renderer = get_renderer(recommended_renderer_name(settings["model"]), tokenizer)

    sampling_params = planish.SamplingParams(
        max_tokens=int(settings["max_tokens"]),
        stop=renderer.get_stop_sequences(),
    )
    adam_params = planish.AdamParams(
        learning_rate=float(settings["learning_rate"]), beta1=0.9, beta2=0.95
    )
    return adam_params, renderer, sampling_params, tokenizer, training_client


@app.cell
def _(mo):
    mo.md(r"""
    ## The reward

    The prompt asks the model to put its result into `\boxed{}`. The content of the last box is compared with the known
    result. There is no other supervision. (`planish.datasets.grading` also accepts fractions, units and
    expressions.)
    """)


@app.cell
def _(re):
    def boxed(text: str) -> str | None:
        found = re.findall(r"\\boxed\{([^{}]*)\}", text)
        return found[-1].strip() if found else None

    def reward_of(text: str, answer: str) -> float:
        result = boxed(text)
        return float(result is not None and result.replace(",", "") == answer.replace(",", ""))

    return (reward_of,)


@app.cell
def _(reward_of):
    assert reward_of(r"48 + 24 = 72, so \boxed{72}", "72") == 1.0
    assert reward_of(r"\boxed{1,000}", "1000") == 1.0
    assert reward_of("The answer is 72.", "72") == 0.0  # right, but not in a box
    assert reward_of(r"\boxed{71} or rather \boxed{72}", "72") == 1.0  # the last box counts
    return


@app.cell
def _(mo):
    mo.md(r"""
    ## The questions

    A question has a known result, and nothing else is needed: no worked solution and no example of a good answer. The
    test questions are never trained on. The prompt contains solved examples before the question, so that the model knows
    the required format.
    """)


@app.cell
def _(Problem, load_problems, problem_prompt, random, renderer, settings, test_size, tokenizer):
    if settings["dataset"]:
        conversation_of = problem_prompt
        problems = load_problems(settings["dataset"], "train")
        test_problems = load_problems(settings["dataset"], "test")[:test_size]
    else:
        shown = [
            {"role": "user", "content": "What is 4 + 3?"},
            {"role": "assistant", "content": r"4 + 3 = \boxed{7}"},
            {"role": "user", "content": "What is 2 + 15?"},
            {"role": "assistant", "content": r"2 + 15 = \boxed{17}"},
        ]

        def conversation_of(problem):
            return [*shown, {"role": "user", "content": problem.question}]

        # Each pair of numbers is there in one order, and none is in the solved examples.
        pairs = [(a, b) for a in range(5, 25) for b in range(a, 25)]
        random.Random(0).shuffle(pairs)
        sums = [Problem(f"What is {a} + {b}?", str(a + b), solution="") for a, b in pairs]
        test_problems, problems = sums[:test_size], sums[test_size:]

    def prompt_of(problem):
        return renderer.build_generation_prompt(conversation_of(problem))

    print(f"{len(problems)} problems. What the model reads for the first one:\n")
    print(tokenizer.decode(prompt_of(problems[0]).to_ints()))
    return problems, prompt_of, test_problems


@app.cell
def _(mo):
    mo.md(r"""
    ## A group of answers

    Before any training, the model tries one question eight times. Sampling is random, so the answers differ. Their
    advantages sum to zero: if all tries are right, or all are wrong, there is nothing to learn from the group.
    """)


@app.cell
def _(get_text_content, renderer, reward_of, training_client):
    def grade(sequence, problem) -> tuple[float, str]:
        """Return the reward of a sampled answer, and its text."""
        message, _ = renderer.parse_response(sequence.tokens)
        text = get_text_content(message)
        return reward_of(text, problem.answer), text

    async def show_group(problem, prompt, sampling_params):
        sampler = await training_client.save_weights_and_get_sampling_client_async()
        response = await sampler.sample_async(
            prompt=prompt, num_samples=8, sampling_params=sampling_params
        )
        graded = [grade(sequence, problem) for sequence in response.sequences]
        mean = sum(reward for reward, _ in graded) / len(graded)
        print(f"{problem.question} The result is {problem.answer}.\n\nadvantage  answer")
        for reward, text in graded:
            print(f"{reward - mean:+9.2f}  {' '.join(text.split())}")

    return grade, show_group


@app.cell
async def _(problems, prompt_of, sampling_params, show_group):
    await show_group(problems[0], prompt_of(problems[0]), sampling_params)
    return


@app.cell
def _(mo):
    mo.md(r"""
    ## From an answer to a training example

    A `Datum` is one token sequence with one target, one sampled logprob and one advantage per position. Position *i*
    reads token *i* and predicts token *i + 1*. So the input is the prompt and the answer without its last token. The
    model should not learn the prompt, so positions in the prompt have advantage 0.

    The loss `importance_sampling` is $-\frac{p_{now}(token)}{p_{sampled}(token)} \cdot advantage$, summed over tokens. The
    ratio corrects for changes of the weights since the answer was sampled. Here the weights have not changed, so the
    ratio is 1 at every token, and its gradient is exactly the policy gradient.
    """)


@app.cell
def _(planish):
    def datum_of(prompt, sequence, advantage: float):
        before = prompt.length - 1
        count = len(sequence.tokens)
        return planish.Datum(
            model_input=prompt.append(planish.EncodedTextChunk(tokens=sequence.tokens[:-1])),
            loss_fn_inputs={
                "target_tokens": [0] * before + sequence.tokens,
                "logprobs": [0.0] * before + sequence.logprobs,
                "advantages": [0.0] * before + [advantage] * count,
            },
        )

    return (datum_of,)


@app.cell
def _(mo):
    mo.md(r"""
    ## The loop

    All requests of a step are in flight together. The engine batches them and computes shared prefixes (the solved
    example, the question of a group) once. A group in which all rewards are equal has only zero advantages; it is
    *degenerate* and is skipped. `forward_backward` and `optim_step` are both submitted before the loop waits for
    either result.
    """)


@app.cell
async def _(
    adam_params,
    batch_size,
    datum_of,
    grade,
    group_size,
    n_steps,
    planish,
    problems,
    prompt_of,
    sampling_params,
    test_problems,
    training_client,
):
    import asyncio

    async def sample(batch, num_samples, params):
        """Return (problem, prompt, sampled sequences) for each problem, from the current weights."""
        sampling_client = await training_client.save_weights_and_get_sampling_client_async()
        prompts = [prompt_of(problem) for problem in batch]
        responses = await asyncio.gather(
            *(
                sampling_client.sample_async(
                    prompt=prompt, num_samples=num_samples, sampling_params=params
                )
                for prompt in prompts
            )
        )
        answers = [response.sequences for response in responses]
        return list(zip(batch, prompts, answers, strict=True))

    async def accuracy() -> float:
        """Return the fraction of test questions that the most likely answer gets right."""
        greedy = planish.SamplingParams(
            max_tokens=sampling_params.max_tokens, stop=sampling_params.stop, temperature=0.0
        )
        groups = await sample(test_problems, 1, greedy)
        return sum(grade(answers[0], problem)[0] for problem, _, answers in groups) / len(groups)

    print(f"test questions right before training: {await accuracy():.0%}")
    history = []
    for step in range(n_steps):
        batch = [problems[(step * batch_size + row) % len(problems)] for row in range(batch_size)]
        groups = await sample(batch, group_size, sampling_params)

        datums, group_means, degenerate = [], [], 0
        for problem, prompt, answers in groups:
            rewards = [grade(sequence, problem)[0] for sequence in answers]
            mean = sum(rewards) / len(rewards)
            group_means.append(mean)
            if len(set(rewards)) == 1:
                degenerate += 1
                continue
            for sequence, reward in zip(answers, rewards, strict=True):
                datums.append(datum_of(prompt, sequence, reward - mean))

        if datums:
            backward = await training_client.forward_backward_async(
                datums, loss_fn="importance_sampling"
            )
            update = await training_client.optim_step_async(adam_params)
            await backward.result_async()
            await update.result_async()

        history.append({"step": step, "reward": sum(group_means) / batch_size})
        print(
            f"step {step:2d} | reward {history[-1]['reward']:.3f} | "
            f"degenerate {degenerate / batch_size:.0%} | datums {len(datums)}"
        )
    print(f"test questions right after training: {await accuracy():.0%}")
    return (history,)


@app.cell
def _(mo):
    mo.md(r"""
    ## The curve

    The reward of a step is the mean over its answers, which are sampled at temperature 1. The test questions are
    answered greedily, with the most likely token at each position. In the recorded run the reward rises from 0.06 to
    about 0.7, and the share of test questions that are right from 14% to 78%. The reward falls at times, because each
    step has other questions and takes a large step of the optimizer.

    On GSM8K the curve of this small model stays flat: it is hardly ever right, so nearly every group is degenerate and
    has no signal (`docs/lab/results.md`). Such a task needs a larger model, or easier questions first.
    """)


@app.cell
def _(history, plot_path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot([row["step"] for row in history], [row["reward"] for row in history], marker="o")
    axes.set(xlabel="step", ylabel="mean reward", title="GRPO", ylim=(0, 1))
    axes.grid(alpha=0.3)
    if plot_path:
        figure.savefig(plot_path)
    plt.gca()
    return


@app.cell
def _(mo):
    mo.md(r"""
    The question from the beginning, after training:
    """)


@app.cell
async def _(history, problems, prompt_of, sampling_params, show_group):
    assert history  # this cell comes after the loop
    await show_group(problems[0], prompt_of(problems[0]), sampling_params)
    return


@app.cell
def _(mo):
    mo.md(r"""
    ## Summary

    * The comparison within a group replaces a learned estimate of how hard a question is.
    * Groups with equal rewards carry no signal. If many groups are degenerate, use other questions, larger groups, or a
      warm start.
    * Training uses the logprobs that the sampler returned. Sampler and trainer are the same model here, so the logprobs
      agree with the trainer's (metric `optim/kl_sample_train_v2` of the recipe).

    Next: `planish/recipes/rl_loop.py` adds checkpoints, resume, metrics and evaluation to this loop.
    """)


if __name__ == "__main__":
    app.run()
