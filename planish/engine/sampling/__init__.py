"""Sampling: the sampler schedules requests, prefills prompts and decodes tokens.

The path of a sample, by module:

    sampler.py      submit: a `Sample` operation becomes a `Request` (requests.py)
    scheduler.py    the request gets a `Prompt` and, as memory allows, `RunningSample`s
                    (reservations.py); samples that do not fit any more are preempted
    prefill.py      the prompt gets a slot in the KV cache (slots.py), and steps compute it after
                    its cached prefix (prefix_cache.py)
    plan.py         each step (decoding_steps.py), the newest token of every sample becomes a row of
                    a `StepPlan`; samples get their slots at their first one
    model_runner.py the rows become hidden states and logits (cuda_graph_runner.py on a GPU)
    selection.py    the logits become the next tokens, and samples end (stopping.py)
    active_batch.py samples that ended, and prompts without samples, free their memory
    delivery.py     the sequences become the response of the request

`SamplingParams` in types.py checks the range of each option, wire/sampling.py sends the options
over the wire, and validation.py has the checks that need the model. Where a new option belongs
depends on what it changes:

    logits before sampling                      adjustments.py
    filters of likely tokens                    token_sampling.py, and `filter_` of the backend:
                                                kernels/reference/token_sampling.py (two forms),
                                                kernels/triton/filter_kernels.py, and their test in
                                                kernel_check/operation_check.py
    which tokens are allowed                    masks.py (`allowed_tokens`)
    when a sample ends                          stopping.py; min_tokens also forbids stop tokens
                                                (masks.py, and `Request.allowed_bits`)
    what the response contains                  selection.py records it, and delivery.py returns it
    which scores of the prompt are computed     prompt_scores.py

The endpoints read options in server/openai (requests.py, response_requests.py, response_input.py)
and server/messages (requests.py, conversation.py). fleet/vllm/requests.py lists the options that
mean the same in vLLM; a request with another option runs on planish's engine.
"""
