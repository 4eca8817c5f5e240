"""What the console can do to runs, if it was started with --allow-actions: stop a run after its
step, resume it, and replay its rollouts.

An action is a POST request with the key of the console's address, which the browser keeps in a
cookie (app.py). Stopping writes a file into the run directory; the run saves a checkpoint and exits
with status 0. Resuming starts the command that the run has recorded.
"""

import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict

from planish import ServiceClient
from planish.console.answers import BadRequest
from planish.console.catalog import Catalog
from planish.console.recorded_command import recorded_command
from planish.console.replay import client_for, replay
from planish.console.row_tail import Row
from planish.console.run_reader import RunReader
from planish.console.run_state import FINISHED, RUNNING
from planish.runlog.run_directory import COMMAND, request_stop

OUTPUT = "resumed.log"
"""The file in the run directory that has the output of a resumed run."""


class Actions:
    """The actions of a console. Engines for replays stay open until `close`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._clients: dict[str, ServiceClient] = {}
        self._lock = threading.Lock()

    def by_name(self) -> Mapping[str, Callable[[Row], Row]]:
        """Return the actions by their names in addresses."""
        return {"stop": self.stop, "resume": self.resume, "replay": self.replay}

    def close(self) -> None:
        """Close the engines. Resumed runs keep running."""
        for client in self._clients.values():
            client.close()

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
        numbers = [request.get(name) for name in ("step", "group")]
        if not all(type(number) is int for number in numbers):
            raise BadRequest("replay needs a step and a group, as whole numbers")
        checkpoint = request.get("checkpoint") or None
        with self._lock:  # one engine computes at a time
            turns = replay(
                reader.path,
                *numbers,
                split=str(request.get("split", "train")),
                checkpoint=checkpoint,
                service_client=self._client(reader),
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

    def _client(self, reader: RunReader) -> ServiceClient:
        names = ("base_url", "quantize", "deterministic")
        key = repr([reader.config.get(name) for name in names])
        if key not in self._clients:
            self._clients[key] = client_for(reader.config)
        return self._clients[key]

    def _run(self, request: Row) -> RunReader:
        reader = self._catalog.run(str(request.get("run", "")))
        reader.refresh_metrics()
        return reader


def _state(reader: RunReader) -> str:
    return reader.summary()["state"]
