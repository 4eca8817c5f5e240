"""A search for constraints that take too much memory or time.

    OMP_NUM_THREADS=1 python tests/engine/constraints/constraint_search.py 2000

The program writes random constraints with large and nested numbers over the keywords of JSON
Schema, and the operators of regular expressions and of Lark grammars. It compiles each in a
constraint process with the default limits, and continues samples of it with random allowed tokens.
It prints one JSON object: how many constraints were used to the end, were rejected by llguidance,
or exceeded a limit, and how much CPU time and memory they took. It exits with 1 if a process
exceeded its limits or if this process grew, as the engine's process would.
"""

import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from planish.engine.constraints.cache import GrammarCache
from planish.engine.constraints.grammar import MaskLayout
from planish.engine.constraints.processes import ProcessEndedError, ProcessTemplate, TokenizerSpec
from planish.engine.constraints.worker import ProcessLimits
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model
from planish.tokenizer import load_tokenizer
from planish.types import MAX_CONSTRAINT_BYTES

STEPS, SAMPLES = 40, 2
_SLACK_BYTES = 32 << 20
"""The memory that a process may take besides its limit: copies of the template's pages."""
_LARGE = (
    0,
    1,
    2,
    3,
    7,
    16,
    64,
    255,
    1000,
    4096,
    9973,
    65_536,
    99_991,
    999_983,
    9_999_991,
    2**31,
    2**53,
)
_FORMATS = (
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)


@dataclass(frozen=True)
class Given:
    """A constraint to try."""

    kind: str
    text: str


class Writer:
    """Writes random constraints."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def constraint(self) -> Given:
        """Return a constraint of at most MAX_CONSTRAINT_BYTES bytes."""
        while True:
            kind = self._random.choice(("json_schema", "json_schema", "regex", "lark"))
            text = {
                "json_schema": lambda: json.dumps(self._root()),
                "regex": lambda: self._regex(5),
                "lark": self._lark,
            }[kind]()
            if 0 < len(text.encode()) <= MAX_CONSTRAINT_BYTES:
                return Given(kind, text)

    def _number(self) -> int:
        if self._random.random() < 0.3:
            return self._random.randrange(1, 10 ** self._random.randint(1, 12))
        return self._random.choice(_LARGE)

    def _decimal(self) -> float | int:
        number = self._number() * self._random.choice((1, 1, -1))
        return number if self._random.random() < 0.6 else number / 10 ** self._random.randint(1, 9)

    def _root(self) -> dict[str, Any]:
        schema = self._schema(self._random.randint(0, 4))
        if self._random.random() < 0.3:
            schema["$defs"] = {"a": self._schema(2), "b": {"$ref": "#/$defs/a"}}
        return schema

    def _schema(self, depth: int) -> dict[str, Any]:
        kinds = ("float", "integer", "string", "enum", "const", "boolean", "ref")
        nested = ("object", "array", "tuple", "anyOf", "oneOf", "allOf", "types", "if")
        kind = self._random.choice(kinds if depth <= 0 else kinds + nested + nested)
        schema = getattr(self, f"_{kind}")(depth)
        if self._random.random() < 0.05:
            schema |= {
                "title": "t",
                "description": "d" * self._random.randint(0, 100),
                "default": 1,
            }
        return schema

    def _some(self, **options: Any) -> dict[str, Any]:
        """Return some of the keywords. Each value is a function that makes the value."""
        return {name: make() for name, make in options.items() if self._random.random() < 0.4}

    def _numeric(self, kind: str) -> dict[str, Any]:
        value = self._decimal if kind == "number" else self._number
        return {
            "type": kind,
            **self._some(
                minimum=self._decimal,
                maximum=self._decimal,
                exclusiveMinimum=self._decimal,
                exclusiveMaximum=self._decimal,
                multipleOf=lambda: abs(value()) or 1,
            ),
        }

    def _float(self, depth: int) -> dict[str, Any]:
        return self._numeric("number")

    def _integer(self, depth: int) -> dict[str, Any]:
        return self._numeric("integer")

    def _string(self, depth: int) -> dict[str, Any]:
        return {
            "type": "string",
            **self._some(
                minLength=self._number,
                maxLength=self._number,
                pattern=lambda: self._regex(3),
                format=lambda: self._random.choice(_FORMATS),
            ),
        }

    def _enum(self, depth: int) -> dict[str, Any]:
        count = self._random.choice((1, 3, 50, 500))
        return {"enum": [f"{self._random.getrandbits(40):x}" for _ in range(count)]}

    def _const(self, depth: int) -> dict[str, Any]:
        return {
            "const": self._random.choice((1, "a" * (self._number() % 5000), None, [1, {"a": 2}]))
        }

    def _boolean(self, depth: int) -> dict[str, Any]:
        return {"type": self._random.choice(("boolean", "null"))}

    def _ref(self, depth: int) -> dict[str, Any]:
        return {"$ref": self._random.choice(("#", "#/$defs/a", "#/$defs/b"))}

    def _object(self, depth: int) -> dict[str, Any]:
        count = self._random.choice((0, 1, 2, 5, 20, 60))
        names = [f"key_{number}" for number in range(count)]
        return {
            "type": "object",
            "properties": {name: self._schema(depth - 1 - count // 5) for name in names},
            "required": [name for name in names if self._random.random() < 0.3],
            **self._some(
                additionalProperties=lambda: self._random.choice(
                    (True, False, self._schema(depth - 2))
                ),
                patternProperties=lambda: {self._regex(2): self._schema(depth - 2)},
                minProperties=self._number,
                maxProperties=self._number,
                propertyNames=lambda: self._string(0),
            ),
        }

    def _array(self, depth: int) -> dict[str, Any]:
        return {
            "type": "array",
            **self._some(
                items=lambda: self._schema(depth - 1),
                minItems=self._number,
                maxItems=self._number,
                contains=lambda: self._schema(depth - 2),
                minContains=self._number,
            ),
        }

    def _tuple(self, depth: int) -> dict[str, Any]:
        count = self._random.choice((1, 4, 30))
        return {
            "type": "array",
            "prefixItems": [self._schema(depth - 2) for _ in range(count)],
            **self._some(items=lambda: False, minItems=self._number),
        }

    def _several(self, keyword: str, depth: int) -> dict[str, Any]:
        count = self._random.choice((1, 2, 4, 12))
        return {keyword: [self._schema(depth - 1 - count // 4) for _ in range(count)]}

    def _anyOf(self, depth: int) -> dict[str, Any]:
        return self._several("anyOf", depth)

    def _oneOf(self, depth: int) -> dict[str, Any]:
        return self._several("oneOf", depth)

    def _allOf(self, depth: int) -> dict[str, Any]:
        return self._several("allOf", depth)

    def _types(self, depth: int) -> dict[str, Any]:
        return {
            **self._object(depth - 1),
            **self._string(0),
            "type": ["object", "string", "number"],
        }

    def _if(self, depth: int) -> dict[str, Any]:
        keyword = self._random.choice(("not", "if", "dependentSchemas", "unevaluatedProperties"))
        value = self._schema(depth - 2)
        return {"type": "object", keyword: {"a": value} if keyword == "dependentSchemas" else value}

    def _regex(self, depth: int) -> str:
        atoms = (
            "a",
            "b",
            ".",
            "[a-z]",
            r"\d",
            r"\w",
            r"\p{L}",
            "[^x]",
            "é",
            r"(.|\n)",
            "日本",
            "<",
        )
        if depth <= 0:
            return self._random.choice(atoms)
        match self._random.randrange(7):
            case 0 | 1:
                return self._regex(depth - 1) + self._regex(depth - 1)
            case 2:
                count = self._random.choice((2, 3, 20))
                return f"({'|'.join(self._regex(depth - 2) for _ in range(count))})"
            case 3:
                return f"({self._regex(depth - 1)}){self._random.choice('*+?')}"
            case _:
                low = self._number() % 10**7
                high = self._random.choice(("", f",{low + self._number() % 10**6}", ","))
                return f"({self._regex(depth - 1)}){{{low}{high}}}"

    def _lark(self) -> str:
        count = self._random.choice((1, 2, 5, 40))
        rules = [f"start: {self._rule(3, count)}"]
        rules += [f"r{number}: {self._rule(2, count)}" for number in range(count)]
        rules += [f"T{number}: {self._terminal(2, number)}" for number in range(3)]
        return "\n".join(rules)

    def _rule(self, depth: int, count: int) -> str:
        if depth <= 0:
            choices = (
                '"ab"',
                f"r{self._random.randrange(count)}",
                f"r{self._random.randrange(count)}",
                f"T{self._random.randrange(3)}",
                "%json " + json.dumps(self._schema(1)),
            )
            return self._random.choice(choices)
        return self._combined(lambda: self._rule(depth - 1, count))

    def _terminal(self, depth: int, number: int) -> str:
        if depth <= 0:
            earlier = [f"T{self._random.randrange(number)}"] if number else []
            return self._random.choice(['"x"', '"yz"i', f"/{self._regex(3)}/", *earlier])
        return self._combined(lambda: self._terminal(depth - 1, number))

    def _combined(self, part: Any) -> str:
        match self._random.randrange(5):
            case 0:
                return " ".join(part() for _ in range(self._random.choice((1, 2, 8))))
            case 1:
                return f"({' | '.join(part() for _ in range(self._random.choice((2, 4, 30))))})"
            case 2:
                return f"({part()}){self._random.choice('*+?')}"
            case _:
                low = self._number() % 10**6
                high = self._random.choice(("", f",{low + self._number() % 10**5}"))
                return f"({part()}){{{low}{high}}}"


@dataclass
class Report:
    """The results of a search."""

    outcomes: Counter[str] = field(default_factory=Counter)
    compile_seconds: list[float] = field(default_factory=list)
    step_milliseconds: list[float] = field(default_factory=list)
    """Per token: the longest answer of each constraint."""
    peak_mebibytes: list[float] = field(default_factory=list)
    own_growth_mebibytes: float = 0.0
    ended: list[str] = field(default_factory=list)
    """Some constraints that exceeded a limit."""

    def summary(self) -> dict[str, Any]:
        """Return the report as JSON."""
        found = {**vars(self), "outcomes": dict(self.outcomes)}
        for name in ("compile_seconds", "step_milliseconds", "peak_mebibytes"):
            values = found[name] or [0.0]
            found[name] = {
                f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 90, 99, 100)
            }
        found["ended"] = self.ended[:10]
        return found


class Search:
    """Tries constraints in processes of one template."""

    def __init__(self, spec: TokenizerSpec, vocab_size: int, seed: int) -> None:
        self.report = Report()
        self._spec = spec
        self._layout = MaskLayout(vocab_size, spec.n_vocab, spec.end_token)
        self._template = ProcessTemplate(ProcessLimits())
        self._random = np.random.default_rng(seed)
        self._template.start(spec)
        self._own_start_bytes = _own_bytes()

    def try_all(self, givens: Sequence[Given]) -> Report:
        """Try each constraint, and return the report."""
        for given in givens:
            self._try(given)
        self.report.own_growth_mebibytes = round((_own_bytes() - self._own_start_bytes) / 2**20, 1)
        self._template.close()
        return self.report

    def _try(self, given: Given) -> None:
        process = self._template.start(self._spec)
        report, began = self.report, time.perf_counter()
        try:
            answer, data = process.ask({"kind": given.kind, "text": given.text, "choices": []})
            report.compile_seconds.append(time.perf_counter() - began)
            if "error" in answer:
                report.outcomes["rejected"] += 1
                return
            report.outcomes[f"{given.kind}: {self._walk(process, data)}"] += 1
            report.peak_mebibytes.append(self._peak_bytes() / 2**20)
        except ProcessEndedError as error:
            reason = "memory" if "memory" in str(error) else "time"
            report.outcomes[f"{given.kind}: exceeded the limit of {reason}"] += 1
            report.ended.append(given.text[:200])
        finally:
            process.stop("tried")

    def _walk(self, process: Any, data: bytes) -> str:
        """Continue samples with random tokens. Return how they ended."""
        masks = dict.fromkeys(range(SAMPLES), self._layout.read_masks(data)[0])
        slowest = 0.0
        for _ in range(STEPS):
            tokens = []
            for number, mask in masks.items():
                bits = np.unpackbits(mask.bits.view(np.uint8), bitorder="little")
                tokens.append(
                    [number, int(self._random.choice(np.flatnonzero(bits)))] if bits.any() else None
                )
            tokens = [token for token in tokens if token is not None]
            if not tokens:
                break
            began = time.perf_counter()
            answer, data = process.ask({"tokens": tokens, "ended": []})
            slowest = max(slowest, (time.perf_counter() - began) / len(tokens))
            read = self._layout.read_masks(data)
            masks = {}
            for (number, _), step in zip(tokens, answer["steps"], strict=True):
                if "error" not in step:
                    masks[number] = read[step["mask"]]
                else:
                    self.report.step_milliseconds.append(slowest * 1000)
                    return "too complex after some tokens"
        self.report.step_milliseconds.append(slowest * 1000)
        return "used"

    def _peak_bytes(self) -> int:
        """Return the most memory of its own that the running constraint process has had."""
        template = self._template._process
        assert template is not None
        path = Path(f"/proc/{template.pid}/task/{template.pid}/children")
        peak = 0
        for pid in path.read_text().split():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if "VmHWM" in fields:
                peak = max(peak, int(fields["VmHWM"].split()[0]) * 1024)
        base = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{template.pid}/status").read_text().splitlines()
        )
        return max(0, peak - int(base["VmRSS"].split()[0]) * 1024)


def _own_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def search(count: int, seed: int = 0) -> tuple[Report, list[str]]:
    """Try `count` constraints with the embedded model's tokenizer. Return the report and what is
    wrong.
    """
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL))
    spec = GrammarCache(lambda: tokenizer, len(tokenizer))._tokenizer_spec
    writer = Writer(seed)
    found = Search(spec, len(tokenizer), seed)
    report = found.try_all([writer.constraint() for _ in range(count)])
    faults = []
    limits = ProcessLimits()
    allowed = limits.memory_bytes + limits.memory_bytes_per_token * STEPS * SAMPLES * 1024
    if max(report.peak_mebibytes, default=0) * 2**20 > allowed + _SLACK_BYTES:
        faults.append("a process had more memory than its limit")
    if report.own_growth_mebibytes * 2**20 > _SLACK_BYTES:
        faults.append("this process has grown")
    return report, faults


if __name__ == "__main__":
    result, problems = search(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
    print(json.dumps({**result.summary(), "faults": problems}, indent=1, ensure_ascii=False))
    sys.exit(bool(problems))
