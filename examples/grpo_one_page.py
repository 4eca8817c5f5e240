"""GRPO on one page: a language model of 135M parameters learns to add.

    python examples/grpo_one_page.py        24 steps, a few minutes on two cores
    python examples/grpo_one_page.py 4      4 steps

Each step samples a group of answers to each of several sums, and grades them by a program. The
advantage of an answer is its reward minus the mean reward of its group. The loss of a token is

    -exp(logprob now - logprob when it was sampled) * advantage

Its gradient makes answers that are better than their group's mean more likely, and the others less
likely. All of it is on this page. Three parts of published GRPO are left out, because this task
does without them: the advantage is not divided by the standard deviation of the group, the ratio
is not clipped (the weights have not changed since the sampling, so it is 1), and there is no KL
penalty. planish/recipes/rl_loop.py adds checkpoints, resume, evaluation and metrics.
"""

import random
import sys

import planish

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 24
SUMS_PER_STEP = 16
ANSWERS_PER_SUM = 16
LEARNING_RATE = 2e-4
EXAMPLES = "What is 4 + 3?\n7\n\nWhat is 12 + 25?\n37\n\n"

service = planish.ServiceClient()
trainer = service.create_lora_training_client("HuggingFaceTB/SmolLM2-135M-Instruct", seed=0)
tokenizer = trainer.get_tokenizer()

# The data: all sums of two numbers up to 10. The 20 test sums are never trained on.
sums = [(a, b) for a in range(11) for b in range(a, 11)]
random.Random(0).shuffle(sums)
train_sums, test_sums = sums[:-20], sums[-20:]


def sample_answers(sums, num_samples, temperature, seed):
    """Return (prompt tokens, sampled answers) for each sum, from the current weights."""
    sampler = trainer.save_weights_and_get_sampling_client()
    prompts = [tokenizer.encode(f"{EXAMPLES}What is {a} + {b}?\n") for a, b in sums]
    futures = []
    for index, prompt in enumerate(prompts):
        params = planish.SamplingParams(
            max_tokens=8, temperature=temperature, stop=["\n"], seed=seed + index
        )
        futures.append(sampler.sample(planish.ModelInput.from_ints(prompt), num_samples, params))
    # All requests are in flight, so the engine samples them in one batch.
    answers = [future.result().sequences for future in futures]
    return list(zip(prompts, answers, strict=True))


def grade(answer, a, b):
    """Return the reward of an answer: 1 if it is the result and nothing else, otherwise 0."""
    text = str(tokenizer.decode(answer.tokens))
    return float(text.strip() == str(a + b))


def make_datum(prompt, answer, advantage):
    """Return the training example: position i reads token i and predicts token i + 1."""
    tokens = prompt + answer.tokens
    zeros = [0.0] * (len(prompt) - 1)  # the model does not learn to write the prompt
    return planish.Datum(
        model_input=planish.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": zeros + answer.logprobs,
            "advantages": zeros + [advantage] * len(answer.tokens),
        },
    )


def accuracy():
    """Return the fraction of test sums that the most likely answer gets right."""
    groups = sample_answers(test_sums, num_samples=1, temperature=0.0, seed=0)
    grades = [
        grade(answers[0], a, b) for (a, b), (_, answers) in zip(test_sums, groups, strict=True)
    ]
    return sum(grades) / len(grades)


print(f"test sums right before training: {accuracy():.0%}")
for step in range(STEPS):
    batch = random.Random(step).sample(train_sums, SUMS_PER_STEP)
    seed = step * SUMS_PER_STEP
    groups = sample_answers(batch, ANSWERS_PER_SUM, temperature=1.0, seed=seed)

    data = []
    all_rewards = []
    for (a, b), (prompt, answers) in zip(batch, groups, strict=True):
        rewards = [grade(answer, a, b) for answer in answers]
        mean = sum(rewards) / len(rewards)
        for answer, reward in zip(answers, rewards, strict=True):
            if reward != mean:  # a group of equal rewards has no gradient
                data.append(make_datum(prompt, answer, reward - mean))
        all_rewards += rewards

    print(f"step {step}: reward {sum(all_rewards) / len(all_rewards):.2f}", flush=True)
    if data:
        gradient = trainer.forward_backward(data, "importance_sampling")
        update = trainer.optim_step(planish.AdamParams(learning_rate=LEARNING_RATE))
        gradient.result()
        update.result()
print(f"test sums right after training: {accuracy():.0%}")
