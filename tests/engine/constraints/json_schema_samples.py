"""Samples of a model under every schema of the JSON-Schema-Test-Suite, checked with `jsonschema`.

The source distribution of `jsonschema` contains the test suite:

    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0
    tar -xzf jsonschema-4.26.0.tar.gz
    OMP_NUM_THREADS=2 python tests/engine/constraints/json_schema_samples.py jsonschema-4.26.0/json/tests 2000

The program compiles each schema once. It takes a number of samples at temperature 1 from the
embedded model, each under one of the schemas that compile. It prints one JSON object: the numbers
of schemas that compile and that are rejected, and of samples that are valid, that reach the maximum
number of tokens, that `jsonschema` cannot check, and that are wrong. It lists the wrong samples,
and exits with 1 if there are any.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.exceptions
import jsonschema.validators
import torch
from referencing.exceptions import Unresolvable

from planish.engine.constraints.cache import GrammarCache
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend
from planish.model.loading import load_decoder
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model
from planish.service import Sample
from planish.tokenizer import load_tokenizer
from planish.types import Constraint, ModelInput, SampleResponse, SamplingParams

PROMPT = 'Short JSON texts:\n1\n"a"\n{}\n[2]\nnull\n{"x": 1}\n[]\n"b"\n{"foo": "c"}\n'
"""With this prompt, most samples are short. Otherwise they reach MAX_TOKENS unless a schema limits
them.
"""
MAX_TOKENS = 100
BATCH = 128


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Check `pattern`. In JSON Schema the classes of letters and digits are ASCII, and that of
    white space is not. Python has one flag for all of them, so either reading may match.
    """
    if isinstance(value, str) and not any(
        re.search(pattern, value, flag) for flag in (re.ASCII, re.UNICODE)
    ):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


DRAFTS = {
    name: jsonschema.validators.extend(validator, {"pattern": _pattern})
    for name, validator in (
        ("draft4", jsonschema.Draft4Validator),
        ("draft6", jsonschema.Draft6Validator),
        ("draft7", jsonschema.Draft7Validator),
        ("draft2019-09", jsonschema.Draft201909Validator),
        ("draft2020-12", jsonschema.Draft202012Validator),
    )
}


class UncheckableError(Exception):
    """`jsonschema` cannot read a schema."""


@dataclass(frozen=True)
class Case:
    """A schema of the suite."""

    draft: str
    place: str
    """Its file and description."""
    schema: Any

    def error(self, text: str) -> str | None:
        """Return why `text` is wrong, or None if it is JSON that the schema accepts. Raise
        UncheckableError if `jsonschema` cannot read the schema: a pattern in another syntax than
        Python's, or a reference to a document that is elsewhere.
        """
        try:
            value = json.loads(text, parse_float=Decimal)
        except ValueError as error:
            return f"not JSON: {error}"
        try:
            problem = self._problem(value)
        except (re.error, Unresolvable) as error:
            raise UncheckableError(str(error)) from error
        return problem.message if problem is not None else None

    def _problem(self, value: Any) -> jsonschema.ValidationError | None:
        # 0.3 is a multiple of 0.1 in decimal numbers, and not in binary ones.
        schema = json.loads(json.dumps(self.schema), parse_float=Decimal)
        validator = DRAFTS[self.draft](schema)
        return jsonschema.exceptions.best_match(validator.iter_errors(value))


@dataclass
class Report:
    """The results of a run."""

    compiled: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """The commonest reasons of rejections."""
    valid: int = 0
    unfinished: int = 0
    unchecked: int = 0
    wrong: list[tuple[str, str, str, str]] = field(default_factory=list)
    """(place, schema, text, error) of each wrong sample."""


def read_suite(directory: Path) -> list[Case]:
    """Return the distinct schemas of each draft in a directory of the test suite."""
    found = {}
    for draft in DRAFTS:
        for path in sorted((directory / draft).glob("**/*.json")):
            for group in json.loads(path.read_text()):
                place = f"{path.relative_to(directory)}: {group['description']}"
                schema = group["schema"]
                if isinstance(schema, dict):
                    # The older drafts of the suite do not name their draft.
                    schema = {"$schema": DRAFTS[draft].META_SCHEMA["$schema"], **schema}
                found.setdefault((draft, json.dumps(schema)), Case(draft, place, schema))
    return list(found.values())


def check(cases: Sequence[Case], model: Path, count: int, seed: int = 0) -> Report:
    """Compile the schemas, and sample `count` texts under those that compile."""
    tokenizer = load_tokenizer(model)
    config = ModelConfig.from_directory(model)
    backend = choose_backend(config, torch.bfloat16, torch.device("cpu"), deterministic=False)
    decoder = load_decoder(model, backend)
    grammars = GrammarCache(lambda: tokenizer, decoder.config.vocab_size)

    def text_of(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    sampler = Sampler(decoder, SamplerSettings(), text_of, grammars)
    prompt = ModelInput.from_ints(tokenizer.encode(PROMPT))
    report, reasons = Report(), Counter[str]()
    accepted: list[tuple[Case, Constraint]] = []
    for case in cases:
        constraint = Constraint("json_schema", json.dumps(case.schema))
        try:
            grammars.check(constraint, "")
            accepted.append((case, constraint))
        except UserError as error:
            reasons[str(error).partition("cannot be used: ")[2][:80]] += 1
    report.compiled, report.rejected = len(accepted), len(cases) - len(accepted)
    report.reasons = dict(reasons.most_common(20))
    rng = random.Random(seed)
    # Each schema is sampled before one is sampled again.
    chosen = [
        case
        for _ in range(-(-count // len(accepted)))
        for case in rng.sample(accepted, len(accepted))
    ][:count]
    for first in range(0, count, BATCH):
        futures: list[tuple[Case, Future[SampleResponse]]] = []
        for number, (case, constraint) in enumerate(chosen[first : first + BATCH], first):
            params = SamplingParams(
                max_tokens=MAX_TOKENS, seed=seed + number, stop=[], constraint=constraint
            )
            futures.append((case, Future()))
            sampler.submit(Sample("suite", prompt, 1, params), None, "base", futures[-1][1])
        while sampler.busy:
            sampler.step()
        for case, future in futures:
            try:
                (sequence,) = future.result(timeout=0).sequences
            except UserError as error:
                report.wrong.append((case.place, json.dumps(case.schema), "", str(error)))
                continue
            if sequence.stop_reason == "length":
                report.unfinished += 1
                continue
            text = text_of(sequence.tokens)
            try:
                problem = case.error(text)
            except UncheckableError:
                report.unchecked += 1
                continue
            if problem is None:
                report.valid += 1
            else:
                report.wrong.append((case.place, json.dumps(case.schema), text, problem))
    return report


def main(directory: str, count: str, seed: str = "0") -> int:
    """Check a directory of the suite and print the report. Return the exit status."""
    cases = read_suite(Path(directory))
    report = check(cases, resolve_model(DEFAULT_MODEL), int(count), int(seed))
    print(json.dumps(asdict(report), indent=1, ensure_ascii=False))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
