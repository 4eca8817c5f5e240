"""Sampling: the sampler schedules requests, prefills prompts and decodes tokens.

The path of a sample, by module:

    sampler.py      submit: a `Sample` operation becomes a `Request` (requests.py)
    scheduler.py    the request gets a `Prompt` and, as memory allows, `RunningSample`s
                    (reservations.py); samples that do not fit any more are preempted
    slots.py        the prompt and its samples get slots in the KV cache
    prefill.py      steps compute the prompt after its cached prefix (prefix_cache.py)
    plan.py         each step (decoding_steps.py), the newest token of every sample becomes a row of
                    a `StepPlan`
    model_runner.py the rows become hidden states and logits (cuda_graph_runner.py on a GPU)
    selection.py    the logits become the next tokens, and samples end (stopping.py)
    active_batch.py samples that ended, and prompts without samples, free their memory
    delivery.py     the sequences become the response of the request

`SamplingParams` in types.py checks the range of each option, wire/sampling.py sends the options
over the wire, and validation.py has the checks that need the model. Where a new option belongs
depends on what it changes:

    logits before sampling                      adjustments.py
    filters of likely tokens                    token_sampling.py, and `filter_` of the backend
    which tokens are allowed                    masks.py (`allowed_tokens`)
    when a sample ends                          stopping.py
    what the response contains                  selection.py records it, and delivery.py returns it
    which scores of the prompt are computed     prompt_scores.py
"""
