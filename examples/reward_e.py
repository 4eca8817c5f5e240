"""What happens if each letter "e" of an answer is rewarded: answers stop ending.

    python examples/reward_e.py

docs/reference/metrics.md has the numbers of a run, and what they show.
"""

import planish
from planish.renderers import get_renderer
from planish.rl.answers import answer_datum

client = planish.ServiceClient().create_lora_training_client(
    "HuggingFaceTB/SmolLM2-135M-Instruct", rank=32, seed=0
)
tokenizer = client.get_tokenizer()
renderer = get_renderer("chatml", tokenizer)
prompt = renderer.build_generation_prompt(
    [{"role": "user", "content": "Write one sentence about the sea."}]
)
for step in range(10):
    params = planish.SamplingParams(max_tokens=96, seed=step, stop=renderer.get_stop_sequences())
    answers = (
        client.save_weights_and_get_sampling_client().sample(prompt, 32, params).result().sequences
    )
    rewards = [tokenizer.decode(answer.tokens).count("e") for answer in answers]
    mean, tokens = sum(rewards) / len(rewards), sum(len(answer.tokens) for answer in answers)
    entropy = -sum(sum(answer.logprobs) for answer in answers) / tokens
    cut_off = sum(answer.stop_reason == "length" for answer in answers) / len(answers)
    print(
        f"{step}: reward {mean:.1f}, {tokens / len(answers):.0f} tokens, {cut_off:.0%} cut off, entropy {entropy:.2f}"
    )
    data = [
        answer_datum(prompt, a.tokens, a.logprobs, (r - mean) / 10)
        for a, r in zip(answers, rewards, strict=True)
    ]
    client.forward_backward(data, "importance_sampling")
    client.optim_step(planish.AdamParams(learning_rate=3e-4)).result()
