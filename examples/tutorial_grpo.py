"""GRPO in one notebook: sample answers, grade them, train on the advantages, plot the reward.

    marimo edit examples/tutorial_grpo.py                 as a notebook
    python examples/tutorial_grpo.py                      as a script, on GSM8K from the hub
    python examples/tutorial_grpo.py dataset=DIRECTORY steps=3 batch_size=4 group_size=4

The notebook contains the whole algorithm. planish/recipes/rl_loop.py is the same loop with
checkpoints and metrics.
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
    import re
    import sys

    import planish
    from planish.datasets.gsm8k import problem_prompt
    from planish.datasets.math_problems import load_problems
    from planish.model.sources import DEFAULT_MODEL
    from planish.renderers import get_renderer, get_text_content, recommended_renderer_name

    return (
        DEFAULT_MODEL,
        get_renderer,
        get_text_content,
        load_problems,
        os,
        planish,
        problem_prompt,
        re,
        recommended_renderer_name,
        sys,
    )


@app.cell
def _(mo):
    mo.md(r"""
    ## Settings

    `python examples/tutorial_grpo.py steps=3 batch_size=4` changes them on the command line. With the defaults, each step
    samples 16 x 8 = 128 answers.
    """)


@app.cell
def _(DEFAULT_MODEL, mo, os, sys):
    settings = {
        "model": DEFAULT_MODEL,
        "dataset": "openai/gsm8k",
        "steps": "10",
        "batch_size": "16",
        "group_size": "8",
        "max_tokens": "256",
        "learning_rate": "4e-5",
        "rank": "32",
        "plot": "",
    }
    given = (
        dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
        if mo.app_meta().mode == "script"
        else {}
    )
    unknown = given.keys() - settings.keys()
    if unknown:
        raise ValueError(f"unknown settings {sorted(unknown)}; known are {sorted(settings)}")
    settings.update(given)
    n_steps, batch_size, group_size = (
        int(settings[name]) for name in ("steps", "batch_size", "group_size")
    )
    plot_path = os.path.expanduser(settings["plot"])
    return batch_size, group_size, n_steps, plot_path, settings


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

    GSM8K has about 7500 school-level word problems with worked solutions. Only the final number of each solution is
    used. The prompt contains one solved example before the question, so that the model knows the required format.
    """)


@app.cell
def _(load_problems, problem_prompt, renderer, settings, tokenizer):
    problems = load_problems(settings["dataset"], "train")
    print(
        f"{len(problems)} problems. What the model reads for the first one, answer {problems[0].answer}:\n"
    )
    print(tokenizer.decode(renderer.build_generation_prompt(problem_prompt(problems[0])).to_ints()))
    return (problems,)


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
    get_text_content,
    group_size,
    n_steps,
    problem_prompt,
    problems,
    renderer,
    reward_of,
    sampling_params,
    training_client,
):
    import asyncio

    history = []
    for step in range(n_steps):
        batch = [problems[(step * batch_size + row) % len(problems)] for row in range(batch_size)]

        # This client samples from the current weights. Later steps do not change them.
        sampling_client = await training_client.save_weights_and_get_sampling_client_async()

        prompts = [renderer.build_generation_prompt(problem_prompt(problem)) for problem in batch]
        responses = await asyncio.gather(
            *(
                sampling_client.sample_async(
                    prompt=prompt, num_samples=group_size, sampling_params=sampling_params
                )
                for prompt in prompts
            )
        )

        datums, group_means, degenerate = [], [], 0
        for problem, prompt, response in zip(batch, prompts, responses, strict=True):
            rewards = []
            for sequence in response.sequences:
                message, _ = renderer.parse_response(sequence.tokens)
                rewards.append(reward_of(get_text_content(message), problem.answer))
            mean = sum(rewards) / len(rewards)
            group_means.append(mean)
            if len(set(rewards)) == 1:
                degenerate += 1
                continue
            for sequence, reward in zip(response.sequences, rewards, strict=True):
                datums.append(datum_of(prompt, sequence, reward - mean))

        if datums:
            backward = await training_client.forward_backward_async(
                datums, loss_fn="importance_sampling"
            )
            update = await training_client.optim_step_async(adam_params)
            await backward.result_async()
            await update.result_async()

        history.append(
            {
                "step": step,
                "reward": sum(group_means) / batch_size,
                "degenerate": degenerate / batch_size,
            }
        )
        print(
            f"step {step:2d} | reward {history[-1]['reward']:.3f} | "
            f"degenerate {history[-1]['degenerate']:.0%} | datums {len(datums)}"
        )
    return (history,)


@app.cell
def _(mo):
    mo.md(r"""
    ## The curve

    For a small model on GSM8K the curve is flat at first. The model is hardly ever right, so nearly every group is
    degenerate and has no signal. After a short supervised warm start (`python -m planish.recipes.sl_loop`) some groups
    are mixed, and answers keep to the format. Right answers stay rare with 135M parameters (`docs/lab/results.md`).
    `make demo` shows a task where the curve rises within minutes.
    """)


@app.cell
def _(history, mo, plot_path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([row["step"] for row in history], [row["reward"] for row in history], marker="o")
    axes.set(xlabel="step", ylabel="mean reward", title="GRPO on GSM8K")
    axes.grid(alpha=0.3)
    if plot_path:
        figure.savefig(plot_path)
    mo.as_html(figure)
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
