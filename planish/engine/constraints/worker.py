"""The program of the processes that compile constraints and compute their masks.

The engine starts this file as the *template process*. It loads the tokenizer once, and forks a
*constraint process* for each constraint. So a constraint process starts in a few milliseconds and
shares the tokenizer's memory. It compiles one constraint, and then advances the samples of this
constraint. The kernel ends it when it exceeds one of its limits:

* Memory. `RLIMIT_DATA` allows `memory_bytes`, and `memory_bytes_per_token` for each token of its
  samples, in addition to what it had at its start.
* CPU time. A timer ends it when it has used up its seconds: `compile_seconds` for the compilation.
  After that it has `step_seconds`, and each token adds `seconds_per_token`, up to `step_seconds`.

A constraint process also ends when the engine closes its socket, and the template process ends when
the engine closes the template's socket. So neither outlives the engine.

A message is a header of two sizes, a JSON text, and bytes. The engine reads only JSON from these
processes, because a constraint that exploits an error of `llguidance` could send anything.

This file imports nothing of planish, which keeps the template process small and its start short.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_HEADER = struct.Struct("<II")
"""The sizes of a message's JSON text and of its bytes."""
MAX_FORCED_TOKENS = 1024
"""The maximum number of forced tokens in one answer. If more tokens are forced, the mask after them
allows one token, and the following answers have the others.
"""
_PARSER_LIMITS: dict[str, Any] = {
    # The first limit is a third of llguidance's default. At the default, one step of the regular
    # expression ((a{1000}){1000}){1000} takes 0.7 s and 190 MB; at this limit, 0.2 s.
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON is written in one line, with at most one space after each comma and colon. If any whitespace
were allowed, a model could write nothing else up to `max_tokens`.
"""


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of one constraint process."""

    memory_bytes: int = 96 << 20
    memory_bytes_per_token: int = 1 << 10
    compile_seconds: float = 5.0
    step_seconds: float = 2.0
    seconds_per_token: float = 0.02

    def as_dict(self) -> dict[str, Any]:
        """Return the limits as JSON."""
        return asdict(self)


def send_message(peer: socket.socket, message: dict[str, Any], data: bytes = b"") -> None:
    """Send a message. Raise OSError if the other process has ended."""
    text = json.dumps(message).encode()
    peer.sendall(_HEADER.pack(len(text), len(data)) + text + data)


def receive_message(peer: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Return the JSON object and the bytes of the next message. Raise EOFError if the other process
    has ended.
    """
    text_size, data_size = _HEADER.unpack(_receive(peer, _HEADER.size))
    content = _receive(peer, text_size + data_size)
    return json.loads(content[:text_size].tobytes()), content[text_size:].tobytes()


def _receive(peer: socket.socket, size: int) -> memoryview:
    content = memoryview(bytearray(size))
    received = 0
    while received < size:
        count = peer.recv_into(content[received:])
        if not count:
            raise EOFError
        received += count
    return content


class CpuBudget:
    """The CPU seconds that this process may still use. The kernel ends it when none are left."""

    def __init__(self, seconds: float) -> None:
        self.seconds_left = seconds

    @contextmanager
    def spending(self) -> Generator[None]:
        """Count the CPU time of the block, and end the process if the block takes too much."""
        start_seconds = time.thread_time()
        # The default action of SIGPROF ends the process, even during a call of llguidance.
        signal.setitimer(signal.ITIMER_PROF, max(self.seconds_left, 0.001))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.seconds_left -= time.thread_time() - start_seconds
            if self.seconds_left < 0:  # the timer counts whole ticks
                os.kill(os.getpid(), signal.SIGPROF)


class _MemoryLimit:
    """The memory that this process may have in addition to what it had at its start."""

    def __init__(self, limits: ProcessLimits) -> None:
        self._limits = limits
        self._start_bytes = _data_bytes()
        self._num_tokens = -1
        self.allow(0)

    def allow(self, num_tokens: int) -> None:
        """Set the limit for samples that have `num_tokens` tokens together."""
        if num_tokens == self._num_tokens:
            return
        self._num_tokens = num_tokens
        limits = self._limits
        allowed = limits.memory_bytes + limits.memory_bytes_per_token * num_tokens
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self._start_bytes + allowed
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        with suppress(ValueError):  # macOS does not accept every limit
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))

    def used_bytes(self) -> int:
        """Return the bytes that count against `ProcessLimits.memory_bytes`."""
        of_tokens = self._limits.memory_bytes_per_token * self._num_tokens
        return max(0, _data_bytes() - self._start_bytes - of_tokens)


def _data_bytes() -> int:
    """Return the size of this process's writable memory, which `RLIMIT_DATA` limits."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0


class ConstraintProcess:
    """Answers the requests of the engine for one constraint.

    `compile` has the constraint's `kind`, `text` and `choices`. Its answer has the `forced` tokens
    that every text begins with, and the mask after them.

    `advance` has the `tokens` that were sampled, as pairs of a sample's number and its token, and
    the `ended` samples. A number that is new begins a sample. The answer has for each token its
    `error`, or the `forced` tokens and the index of a mask in the answer's bytes.

    Each answer has the `memory` that the process uses, in bytes.
    """

    def __init__(self, peer: socket.socket, tokenizer: LLTokenizer, limits: ProcessLimits) -> None:
        self._peer = peer
        self._tokenizer = tokenizer
        self._limits = limits
        self._memory = _MemoryLimit(limits)
        self._budget = CpuBudget(limits.step_seconds)
        self._first: LLMatcher | None = None
        """The matcher after the first forced tokens. It is copied for each sample."""
        self._matchers: dict[int, LLMatcher] = {}
        self._lengths: dict[int, int] = {}
        """The number of tokens of each sample."""

    def serve(self) -> None:
        """Answer requests until the engine closes the socket."""
        while True:
            try:
                request, _ = receive_message(self._peer)
            except (EOFError, OSError):
                return
            if "tokens" in request:
                answer, data = self._advance(request["tokens"], request["ended"])
            else:
                with CpuBudget(self._limits.compile_seconds).spending():
                    answer, data = self._compile(request)
            answer["memory"] = self._memory.used_bytes()
            send_message(self._peer, answer, data)

    def _compile(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar_text(request["kind"], request["text"], request["choices"])
        except (ValueError, RecursionError) as error:
            return {"error": str(error)[:600]}, b""
        matcher = LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**_PARSER_LIMITS)
        )
        if matcher.is_error():
            return {"error": _error_message(matcher)}, b""
        forced_tokens = self._consume_forced_tokens(matcher)
        # The state of a matcher changes while it computes a mask.
        mask_matcher = matcher.deep_copy()
        mask = self._mask(mask_matcher)
        if mask_matcher.is_error():
            return {"error": _error_message(mask_matcher)}, b""
        self._first = matcher
        return {"forced": forced_tokens}, mask

    def _advance(
        self, tokens: Sequence[Sequence[int]], ended: Sequence[int]
    ) -> tuple[dict[str, Any], bytes]:
        for number in ended:
            self._matchers.pop(number, None)
            self._lengths.pop(number, None)
        for number, _ in tokens:
            self._lengths[number] = self._lengths.get(number, 0) + 1
        self._memory.allow(sum(self._lengths.values()))
        steps: list[dict[str, Any]] = []
        masks: dict[bytes, int] = {}
        added_seconds = len(tokens) * self._limits.seconds_per_token
        self._budget.seconds_left = added_seconds + min(
            self._budget.seconds_left, self._limits.step_seconds
        )
        with self._budget.spending():
            for number, token in tokens:
                steps.append(self._advance_sample(number, token, masks))
        return {"steps": steps}, b"".join(masks)

    def _advance_sample(self, number: int, token: int, masks: dict[bytes, int]) -> dict[str, Any]:
        matcher = self._matchers.get(number)
        if matcher is None:
            assert self._first is not None
            matcher = self._matchers[number] = self._first.deep_copy()
        step: dict[str, Any] = {}
        if matcher.consume_token(token):
            forced_tokens = self._consume_forced_tokens(matcher)
            mask = self._mask(matcher)
            self._lengths[number] += len(forced_tokens)
            step = {"forced": forced_tokens, "mask": masks.setdefault(mask, len(masks))}
        return {"error": _error_message(matcher)} if matcher.is_error() else step

    def _mask(self, matcher: LLMatcher) -> bytes:
        """Return the mask of the next token. llguidance's masks may have further, unused words."""
        num_words = -(-self._tokenizer.vocab_size // 32)
        return matcher.compute_bitmask()[: 4 * num_words]

    def _consume_forced_tokens(self, matcher: LLMatcher) -> list[int]:
        """Consume and return the tokens that must come next.

        llguidance tokenizes the forced text, and finds special tokens in it. A special token does
        not match the text of its name. So such a name is split into other tokens.
        """
        forced_tokens: list[int] = []
        while len(forced_tokens) < MAX_FORCED_TOKENS:
            tokens = matcher.compute_ff_tokens()[: MAX_FORCED_TOKENS - len(forced_tokens)]
            num_matching = matcher.validate_tokens(tokens) if tokens else 0
            matching = tokens[:num_matching]
            if num_matching < len(tokens):
                name = self._tokenizer.decode_str([tokens[num_matching]])
                matching += self._tokenizer.greedy_tokenize(name)
            if not matching or not matcher.consume_tokens(matching):
                break
            forced_tokens += matching
            if num_matching == len(tokens):
                break
        return forced_tokens


def _error_message(matcher: LLMatcher) -> str:
    """Return llguidance's error message without the dump of its state.

    The message may quote the whole grammar, so its middle is cut out beyond 600 characters.
    """
    message = matcher.get_error().partition("\n<")[0].strip()
    return message if len(message) <= 600 else f"{message[:300]} ... {message[-300:]}"


def _grammar_text(kind: str, text: str, choices: Sequence[str]) -> str:
    """Return the grammar of a constraint (see `planish.types.Constraint`). Raise ValueError if its
    text is invalid.
    """
    from llguidance import LLMatcher

    match kind:
        case "json_object":
            return _json_grammar('{"type": "object"}')
        case "json_schema":
            return _json_grammar(text)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}")
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case _:
            raise ValueError(f"unknown kind {kind!r}")


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    if schema.strip() in ("true", "false"):
        # grammar_from_json_schema accepts objects only.
        schema = "{}" if schema.strip() == "true" else '{"enum": []}'
    return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)


class _Template:
    """Forks constraint processes. Requests and their answers:

    {"start": number}, followed by a byte with the socket of the new process: {}
    {"stop": number}: {"status": status}. It ends the process, unless it has ended already. `status`
    is the exit code, or the negative number of the signal that ended the process.
    """

    def __init__(self, peer: socket.socket, tokenizer: LLTokenizer, limits: ProcessLimits) -> None:
        self._peer = peer
        self._tokenizer = tokenizer
        self._limits = limits
        self._pids: dict[int, int] = {}
        """The process ids of the constraint processes, by their numbers."""

    def serve(self) -> None:
        """Answer requests until the engine closes the socket. Then end all processes."""
        while True:
            try:
                request, _ = receive_message(self._peer)
                if "stop" in request:
                    answer = {"status": self._stop(request["stop"])}
                else:
                    self._start(request["start"])
                    answer = {}
                send_message(self._peer, answer)
            except (EOFError, OSError):
                break
        for number in [*self._pids]:
            self._stop(number)

    def _start(self, number: int) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._peer, 1, 1)
        peer = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid:
            peer.close()
            self._pids[number] = pid
            return
        status = 1
        try:
            self._peer.close()
            _prepare_process()
            ConstraintProcess(peer, self._tokenizer, self._limits).serve()
            status = 0
        finally:
            # Without _exit, the child would continue as a second template process.
            os._exit(status)

    def _stop(self, number: int) -> int:
        """End a process, and return how it ended. A process that ended by itself keeps its process
        id until now, so the id cannot belong to another process.
        """
        pid = self._pids.pop(number, None)
        if pid is None:
            return 0
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)


def _prepare_process() -> None:
    """Give up what the engine's process needs more than this one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If the machine has no memory left, the kernel ends this process and not the engine's.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # llguidance and Python report on standard error that no memory is left.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)


def main(descriptor: int) -> None:
    """Run the template process. `descriptor` is the number of the socket to the engine.

    The first message has the tokenizer (`tokenizer`, `n_vocab`, `eos_token`) and the `limits`.
    """
    # A signal for the process group or the control group must not end the masks of samples that the
    # engine still finishes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    peer = socket.socket(fileno=descriptor)
    request, spec = receive_message(peer)
    try:
        from llguidance import LLTokenizer

        tokenizer = LLTokenizer(
            spec.decode(), n_vocab=request["n_vocab"], eos_token=request["eos_token"]
        )
    except Exception as error:
        send_message(peer, {"error": str(error)[:600]})
        return
    del spec
    send_message(peer, {})
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, all of its memory
    _Template(peer, tokenizer, ProcessLimits(**request["limits"])).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
