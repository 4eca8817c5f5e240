"""Decoding with a JSON schema, compared with decoding without a constraint.

    OMP_NUM_THREADS=2 python benchmarks/constraints.py
    python benchmarks/constraints.py rows=1,16 new_tokens=16 rounds=2

Each measurement samples `new_tokens` tokens for each of a number of rows that continue one prompt.
No sample ends early: the schema asks for an endless list of objects, and there are no stop tokens.
Measurements with and without the schema alternate. `slower` is the median over the rounds of the
constrained seconds divided by the unconstrained seconds, minus 1. The script prints one JSON
object.
"""

import json
import statistics
import time

import chz
from workloads import LIST_SCHEMA

import planish
from planish.model.sources.resolve import DEFAULT_MODEL


@chz.chz
class Options:
    model: str = DEFAULT_MODEL
    rows: tuple[int, ...] = (1, 16, 128)
    new_tokens: int = 64
    rounds: int = 3


def main(options: Options) -> None:
    constraint = planish.Constraint("json_schema", json.dumps(LIST_SCHEMA))
    with planish.ServiceClient() as service_client:
        sampler = service_client.create_sampling_client(base_model=options.model)
        tokens = sampler.get_tokenizer().encode("A list of people, as JSON:\n")
        prompt = planish.ModelInput.from_ints(tokens)

        def seconds(rows: int, given: planish.Constraint | None, seed: int) -> float:
            params = planish.SamplingParams(
                max_tokens=options.new_tokens, seed=seed, stop=[], constraint=given
            )
            began = time.perf_counter()
            response = sampler.sample(prompt, rows, params).result()
            assert all(len(s.tokens) == options.new_tokens for s in response.sequences)
            return time.perf_counter() - began

        report = {}
        for rows in options.rows:
            pairs = [
                (seconds(rows, None, number), seconds(rows, constraint, number))
                for number in range(options.rounds + 1)
            ][1:]  # the first round warms up
            plain, constrained = (statistics.median(times) for times in zip(*pairs, strict=True))
            slower = statistics.median(after / before - 1 for before, after in pairs)
            report[rows] = {
                "tokens_per_second": round(rows * options.new_tokens / plain, 1),
                "constrained_tokens_per_second": round(rows * options.new_tokens / constrained, 1),
                "slower": round(slower, 3),
            }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    chz.nested_entrypoint(main)
