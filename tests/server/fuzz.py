"""Fuzz a server in a process of its own: python tests/server/fuzz.py [--requests 100000] [--seed 1]
[--connections 24]

One tenant sends random requests; some of them use ids of another tenant. After each tenth of the
requests, the other tenant's weights, samples, results, checkpoint files and listings must be
unchanged, bit for bit. At the end no file may lie outside of the data directory, and the server
must still train, sample and shut down cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fuzz_requests import SECRET_FILE, KnownIds, RequestGenerator
from fuzzing import SECRET, Report, send_random_requests
from json_bodies import forward_backward_to_json
from server_process import BASE_MODEL, ServerProcess, running_server

from planish.service import ForwardBackward
from planish.testing import tiny_model
from planish.types import Datum, ModelInput

FUZZING, WITNESS = "tml-fuzzing-key", "tml-witness-key"
_SAVE_ENDPOINTS = ("save_weights", "save_weights_for_sampler", "save_weights_external")
_SEED_PARAMS = {"max_tokens": 4, "seed": 5}
_OPTIONS = ("--poll-seconds", "0.2", "--kv-cache-gib", "0.2", "--prefix-cache-gib", "0.1")


@dataclass
class Tenant:
    """A session with a trained model, a sampler, a checkpoint of each kind, and requests."""

    http: httpx.Client
    known: KnownIds
    seq_id: int = 0

    @property
    def model(self) -> str:
        return self.known.models[0]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(f"/api/v1{path}", json=body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def get(self, path: str) -> dict[str, Any]:
        answer = self.http.get(f"/api/v1{path}")
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def result(self, request: str) -> dict[str, Any]:
        while (
            answer := self.http.post("/api/v1/retrieve_future", json={"request_id": request})
        ).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.json(), answer.text
        return answer.json()

    def post_and_wait(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a request."""
        request = self.post(path, body)["request_id"]
        self.known.requests.append(request)
        return self.result(request)

    def next_request_fields(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of the model's next request."""
        self.seq_id += 1
        return {"model_id": self.model, "seq_id": self.seq_id, **fields}

    def logprobs(self, forward_only: bool = True) -> list[float]:
        """Return the model's logprobs on a fixed datum."""
        data = [Datum(ModelInput.from_ints([1, 2, 3, 4]), {"target_tokens": [2, 3, 4, 5]})]
        operation = ForwardBackward(self.model, data, "cross_entropy", {}, forward_only)
        path = "/forward" if forward_only else "/forward_backward"
        output = self.post_and_wait(
            path, forward_backward_to_json(operation, self.next_request_fields()["seq_id"])
        )
        return output["loss_fn_outputs"][0]["logprobs"]["data"]

    def sample(self) -> dict[str, Any]:
        """Return samples with a fixed seed."""
        number = len(self.known.requests)  # another one each time
        body = {"sampling_session_id": self.known.samplers[0], "seq_id": number, "num_samples": 2}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        return self.post_and_wait(
            "/asample", {**body, "prompt": prompt, "sampling_params": _SEED_PARAMS}
        )


@contextmanager
def tenant(server: ServerProcess, key: str) -> Iterator[Tenant]:
    with httpx.Client(base_url=server.url, headers={"x-api-key": key}, timeout=120) as http:
        new_tenant = Tenant(http, KnownIds(BASE_MODEL))
        known = new_tenant.known
        session = new_tenant.post("/create_session", {"tags": [], "sdk_version": "fuzz"})[
            "session_id"
        ]
        known.sessions.append(session)
        known.models.append(f"{session}:train:0")
        lora = {"rank": 4, "seed": 1}
        new_tenant.post_and_wait(
            "/create_model",
            {
                "session_id": session,
                "model_seq_id": 0,
                "base_model": BASE_MODEL,
                "lora_config": lora,
            },
        )
        new_tenant.logprobs(forward_only=False)
        new_tenant.post_and_wait(
            "/optim_step", new_tenant.next_request_fields(adam_params={"learning_rate": 1e-2})
        )
        known.paths += [
            new_tenant.post_and_wait(f"/{kind}", new_tenant.next_request_fields(path="a"))["path"]
            for kind in _SAVE_ENDPOINTS
        ]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": known.paths[1]}
        known.samplers.append(
            new_tenant.post("/create_sampling_session", body)["sampling_session_id"]
        )
        yield new_tenant


def tenant_state(witness: Tenant) -> dict[str, Any]:
    """Return everything of a tenant that another tenant could change: what it computes, and what
    the server stores for it.
    """
    run, files = witness.model, {}
    for path in witness.known.paths:
        checkpoint = path.removeprefix("tinker://").partition("/")[2]
        for name, url in witness.get(
            f"/training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls"
        )["urls"].items():
            files[f"{checkpoint}/{name}"] = hashlib.sha256(
                witness.http.get(url).content
            ).hexdigest()
    run_record = {
        k: v for k, v in witness.get(f"/training_runs/{run}").items() if k != "last_request_time"
    }
    return {
        "first results": [witness.result(request) for request in witness.known.requests[:3]],
        "logprobs": witness.logprobs(),
        "sample": witness.sample(),
        "files": files,
        "run": run_record,
        "checkpoints": witness.get("/checkpoints"),
        "sessions": [
            witness.get("/sessions"),
            witness.get(f"/sessions/{witness.known.sessions[0]}"),
        ],
        "sampler": witness.get(f"/samplers/{witness.known.samplers[0]}"),
    }


def fuzz(directory: Path, count: int, seed: int, connections: int = 24, rounds: int = 10) -> Report:
    """Send `count` random requests, and check what they must not change."""
    keys = directory / "keys"
    keys.write_text(f"fuzzing {FUZZING}\nwitness {WITNESS}\n")
    (directory / SECRET_FILE).write_text(SECRET)
    report = Report()
    options = ("--api-key-file", str(keys), *_OPTIONS)
    with running_server(directory / "data", tiny_model(directory / "model"), *options) as server:
        with tenant(server, WITNESS) as witness:
            before = tenant_state(witness)
            for round_index in range(rounds):
                _fuzz_round(
                    server,
                    witness.known,
                    random.Random(f"{seed} {round_index}"),
                    count // rounds,
                    connections,
                    report,
                )
                if server.process.poll() is not None:
                    output = "\n".join(server.output[-20:])
                    report.faults.insert(
                        0, f"the server ended with status {server.process.returncode}: {output}"
                    )
                    return report
                print(
                    f"{report.requests} requests, slowest {report.slowest:.1f} s, "
                    f"{report.faults[:3]}",
                    flush=True,
                )
                after = tenant_state(witness)
                changed = [
                    f"{name}: {before[name]} -> {after[name]}"
                    for name in before
                    if after[name] != before[name]
                ]
                report.faults += [
                    f"another tenant's state changed in round {round_index}: {change[:2000]}"
                    for change in changed
                ]
        status = server.stop()
        if status != 0:
            report.faults.append(f"exit status {status}: " + "\n".join(server.output[-20:]))
        report.faults += [line[-2000:] for line in server.output if _is_fault(line)]
    report.faults += _changes_outside(directory)
    return report


def _fuzz_round(
    server: ServerProcess,
    others: KnownIds,
    rng: random.Random,
    count: int,
    connections: int,
    report: Report,
) -> None:
    """Fuzz with new ids, because earlier sessions, checkpoints and models may be gone."""
    with tenant(server, FUZZING) as fuzzing:
        generator = RequestGenerator(rng, fuzzing.known, others)
        asyncio.run(
            send_random_requests(server.url, FUZZING, generator, count, report, connections)
        )


def _is_fault(line: str) -> bool:
    """Return whether a log line is a fault. If the HTTP parser has already answered a broken
    request, the late answer of the application is not one.
    """
    return (
        "Traceback" in line
        and "h11._util.LocalProtocolError: can't handle event type Response" not in line
    )


def _changes_outside(directory: Path) -> list[str]:
    """Return files that were created or changed outside of the data directory."""
    other_files = [
        path
        for path in directory.iterdir()
        if path.name not in ("data", "keys", "model", SECRET_FILE)
    ]
    links = [path for path in (directory / "data").rglob("*") if path.is_symlink()]
    faults = [
        f"a file outside of the data directory, or a link: {path}"
        for path in [*other_files, *links]
    ]
    if (directory / SECRET_FILE).read_text() != SECRET:
        faults.append("a file outside of the data directory was written to")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=24)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = fuzz(Path(directory), options.requests, options.seed, options.connections)
    seconds = time.monotonic() - began
    print(
        f"{report.requests} requests in {seconds:.0f} s on {os.cpu_count()} cores; slowest "
        f"{report.slowest:.1f} s"
    )
    print("statuses:", dict(sorted(report.statuses.items())))
    endpoint_lines = [
        f"{name} {report.accepted[name]}/{count}"
        for name, count in report.endpoints.most_common(60)
    ]
    print("answered, of all that were sent:", *endpoint_lines, sep="\n  ")
    print(f"{len(report.faults)} faults", *report.faults[:50], sep="\n")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
