"""What the console can do to runs, if it was started with --allow-actions: stop a run after its
step, resume it, replay its rollouts or continue them from another token, and chat with its
checkpoints.

An action is a POST request with the key of the console's address, which the browser keeps in a
cookie (app.py). Stopping writes a file into the run directory; the run saves a checkpoint and exits
with status 0. Resuming starts the command that the run has recorded.
"""

import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from queue import SimpleQueue
from typing import Any

from planish import ServiceClient
from planish.console.answers import BadRequest
from planish.console.catalog import Catalog
from planish.console.chat_sampler import Answer, ChatSampler, ShowFunction, create_chat_sampler
from planish.console.continuation import AnswerPlace, alternatives, continued
from planish.console.metric_table import is_number
from planish.console.recorded_command import recorded_command
from planish.console.replay import open_service, replay
from planish.console.row_tail import Row
from planish.console.run_reader import RunReader
from planish.console.run_state import FINISHED, RUNNING
from planish.runlog.run_directory import COMMAND, request_stop
from planish.service import Service

_MAX_CHAT_TOKENS = 4096
_MAX_CONTINUATION_TEXT = 10_000
OUTPUT = "resumed.log"
"""The file in the run directory that has the output of a resumed run."""


class Actions:
    """The actions of a console. Engines stay open until `close`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._engines: dict[str, Service] = {}
        self._samplers: dict[tuple[str, str], ChatSampler] = {}
        self._lock = threading.Lock()

    def by_name(self) -> Mapping[str, Callable[[Row], Row]]:
        """Return the actions by their names in addresses."""
        return {
            "stop": self.stop,
            "resume": self.resume,
            "replay": self.replay,
            "alternatives": self.alternatives,
            "continue": self.continue_answer,
        }

    def close(self) -> None:
        """Close the engines. Resumed runs keep running."""
        for service in self._engines.values():
            service.close(finish=False)

    def stop(self, request: Row) -> Row:
        """Ask a run to stop after its step."""
        reader = self._run(request)
        if _state(reader) != RUNNING:
            raise BadRequest("no process works on this run, so there is nothing to stop")
        request_stop(reader.path)
        return {"message": "The run stops after its present step, with a checkpoint."}

    def resume(self, request: Row) -> Row:
        """Start the recorded command of a run that no process works on."""
        reader = self._run(request)
        state = _state(reader)
        if state in (RUNNING, FINISHED):
            raise BadRequest(f"the run is {state}, so it cannot be resumed")
        recorded = recorded_command(reader.path)
        if recorded is None:
            raise BadRequest(f"the run has no {COMMAND}; start its command by hand")
        try:
            with open(reader.path / OUTPUT, "ab") as output:
                process = subprocess.Popen(
                    recorded["command"],
                    cwd=recorded["directory"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise BadRequest(f"the command cannot be started: {error}") from error
        threading.Thread(target=process.wait, daemon=True).start()  # else it becomes a zombie
        return {"message": f"Started as process {process.pid}; its output is in {OUTPUT}."}

    def replay(self, request: Row) -> Row:
        """Sample the rollouts of a group again, with their own weights or those of `checkpoint`."""
        reader = self._run(request)
        step, group = request.get("step"), request.get("group")
        if type(step) is not int or type(group) is not int:
            raise BadRequest("replay needs a step and a group, as whole numbers")
        checkpoint = request.get("checkpoint") or None
        with self._lock:  # one engine computes at a time
            turns = replay(
                reader.path,
                step,
                group,
                split=str(request.get("split", "train")),
                checkpoint=checkpoint,
                service_client=ServiceClient(service=self._service(reader)),
            )
        return {
            "turns": [
                {
                    **asdict(turn),
                    "is_equal": turn.is_equal,
                    "first_difference": turn.first_difference,
                    "text": str(turn),
                }
                for turn in turns
            ]
        }

    def alternatives(self, request: Row) -> Row:
        """Return the most likely tokens at a place of a recorded answer."""
        reader, place = self._run(request), _answer_place(request)
        with self._lock:
            found = alternatives(
                reader,
                place,
                ServiceClient(service=self._service(reader)),
                checkpoint=request.get("checkpoint") or None,
            )
        return {"alternatives": [asdict(each) for each in found]}

    def continue_answer(self, request: Row) -> Row:
        """Continue a recorded answer from a place on with other tokens, or with a text."""
        reader, place = self._run(request), _answer_place(request)
        given = request.get("tokens") or request.get("text")
        is_text = isinstance(given, str) and len(given) <= _MAX_CONTINUATION_TEXT
        is_tokens = isinstance(given, list) and all(type(token) is int for token in given)
        if not isinstance(given, str | list) or not (is_text or is_tokens):
            raise BadRequest("continue needs tokens, a list of ids, or a text")
        with self._lock:
            turn = continued(
                reader,
                place,
                given,
                ServiceClient(service=self._service(reader)),
                checkpoint=request.get("checkpoint") or None,
            )
        return {"turn": turn}

    def chat(self, request: Row) -> Iterator[Row]:
        """Check a request, and return the parts of the answer of a checkpoint, or of the run's base
        model if `model` is "". The last part says how the answer ended.
        """
        reader = self._run(request)
        model = str(request.get("model") or reader.config.get("model_name", ""))
        messages = request.get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)) or not messages:
            raise BadRequest('chat needs messages, each with a "role" and a "content"')
        temperature, max_tokens = request.get("temperature", 0.7), request.get("max_tokens", 256)
        if not is_number(temperature) or not 0 <= temperature <= 100:
            raise BadRequest(f"temperature={temperature!r}: give a number from 0 to 100")
        if type(max_tokens) is not int or not 1 <= max_tokens <= _MAX_CHAT_TOKENS:
            raise BadRequest(f"max_tokens={max_tokens!r}: give 1 to {_MAX_CHAT_TOKENS}")
        seed = request.get("seed")
        if seed is not None and type(seed) is not int:
            raise BadRequest(f"seed={seed!r}: give a whole number")
        with self._lock:
            sampler = self._sampler(reader, model)
        return _parts(partial(sampler.answer, messages, temperature, max_tokens, seed))

    def _sampler(self, reader: RunReader, model: str) -> ChatSampler:
        service = self._service(reader)
        key = (_service_key(reader), model)
        if key not in self._samplers:
            renderer = reader.config.get("renderer_name")
            streams = not reader.config.get("base_url")
            self._samplers[key] = create_chat_sampler(service, model, renderer, streams)
        return self._samplers[key]

    def _service(self, reader: RunReader) -> Service:
        key = _service_key(reader)
        if key not in self._engines:
            self._engines[key] = open_service(reader.config)
        return self._engines[key]

    def _run(self, request: Row) -> RunReader:
        reader = self._catalog.run(str(request.get("run", "")))
        reader.refresh_metrics()
        return reader


def _answer_place(request: Row) -> AnswerPlace:
    names = ("step", "group", "sample", "turn", "token")
    numbers = {name: request.get(name) for name in names}
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise BadRequest(f"{name}={value!r}: give a whole number")
    return AnswerPlace(**numbers, split=str(request.get("split", "train")))  # pyright: ignore[reportArgumentType]


def _service_key(reader: RunReader) -> str:
    return repr([reader.config.get(name) for name in ("base_url", "quantize", "deterministic")])


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("role", "content")
    )


def _parts(answer: Callable[[ShowFunction], Answer]) -> Iterator[Row]:
    """Run `answer` in a thread, and yield its parts as they are shown."""
    parts: SimpleQueue[Row | None] = SimpleQueue()

    def work() -> None:
        try:
            done = answer(lambda part: parts.put({"text": part.text, "reasoning": part.reasoning}))
            parts.put({"num_tokens": done.num_tokens, "stop_reason": done.stop_reason})
        except Exception as error:  # the page shows it
            parts.put({"error": str(error)})
        parts.put(None)

    threading.Thread(target=work, name="planish-chat", daemon=True).start()
    while (part := parts.get()) is not None:
        yield part


def _state(reader: RunReader) -> str:
    return reader.summary()["state"]
