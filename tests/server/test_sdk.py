"""The official SDK, unmodified, in a process of its own, against a server process on a real socket.

Every probe of the conformance matrix is a test here, for the SDK that is installed. The other tests
are scripts as users write them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from conformance.bench import NOT_APPLICABLE, REFUSED, WORKS, Outcome
from conformance.probes import PROBES
from server_process import BASE_MODEL, free_port, running_server

from planish.testing import tiny_model

# All probes run within the first of their tests, on whatever else the machine does.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LLAMA = "meta-llama/Llama-3.2-1B"
"""The SDK does not ask for its tokenizer by the model's name."""

# Of older SDKs only; every other probe applies to the one of today.
ONLY_OLDER = {
    "RestClient.get_checkpoint_archive_url_from_tinker_path: and the archive",
    "RestClient.get_checkpoint_archive_url_from_tinker_path_async",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@dataclass
class Serving:
    """One server for all tests; it can be stopped and started again on its port and data."""

    data: Path
    model: Path
    hub: Path
    port: str
    stack: ExitStack

    def __post_init__(self) -> None:
        self.start()

    @property
    def url(self) -> str:
        return self.process.url

    def start(self) -> None:
        options = ("--port", self.port, "--hub-tokenizers", "--model", f"{LLAMA}={self.model}")
        running = running_server(
            self.data, self.model, *options, environment={"HF_HOME": str(self.hub)}
        )
        self.process = self.stack.enter_context(running)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path, hub: Path) -> Iterator[Serving]:
    data = tmp_path_factory.mktemp("data") / "not" / "there" / "yet"
    with ExitStack() as stack:
        serving = Serving(data, model, hub, str(free_port()), stack)
        yield serving
        assert serving.process.stop() == 0


def environment(url: str, hub: Path | None = None) -> dict[str, str]:
    """What a user sets, and no network."""
    found = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-anything",
        "HF_HUB_OFFLINE": "1",
    }
    return found if hub is None else {**found, "HF_HOME": str(hub)}


def run_script(
    script: str, server: Serving, hub: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command, variables = [sys.executable, "-c", script], environment(server.url, hub)
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def outcomes(server: Serving, hub: Path) -> dict[str, Outcome]:
    command = [sys.executable, "-m", "conformance.probes", "tinker", BASE_MODEL]
    done = subprocess.run(
        command,
        env=environment(server.url, hub),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        outcome.name: outcome
        for outcome in (Outcome(**json.loads(line)) for line in done.stdout.splitlines())
    }


@pytest.mark.parametrize("name", PROBES)
def test_each_sdk_method_behaves_as_documented(outcomes: dict[str, Outcome], name: str):
    expected = (
        NOT_APPLICABLE if name in ONLY_OLDER else REFUSED if PROBES[name].is_refused else WORKS
    )
    assert outcomes[name].status == expected, outcomes[name].note


def test_every_method_of_the_sdk_has_a_probe(outcomes: dict[str, Outcome]):
    assert [outcome.name for outcome in outcomes.values() if outcome.name not in PROBES] == []


SETUP = """
import tinker
from tinker import types
service = tinker.ServiceClient()
def datum(tokens=(1, 2, 3, 4), **inputs):
    targets = list(tokens[1:]) + [5]
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": targets, **inputs})
client = service.create_lora_training_client("planish/tiny-model", rank=4, seed=7).result()
"""
LEARN = """
losses = []
for step in range(2):
    output = client.forward_backward([datum(), datum((9, 8, 7))], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    losses.append(output.result().metrics["loss:sum"])
sampler = client.save_weights_and_get_sampling_client().result()
sample = sampler.sample(types.ModelInput.from_ints([1, 2]), 2, types.SamplingParams(max_tokens=6, seed=3)).result()
print([loss.hex() for loss in losses], [(s.tokens, s.logprobs) for s in sample.sequences])
"""


def test_results_are_bitwise_equal_over_the_wire_and_after_a_restart(server: Serving, model: Path):
    """A script of the SDK, with the server stopped and started again in its middle, and the same on
    an engine in its own process.
    """
    script = SETUP + LEARN + "print('half', flush=True); input()" + LEARN
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(server.url), **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        printed = []
        while not printed or printed[-1] != "half\n":
            printed.append(process.stdout.readline())
            assert printed[-1], "the script ended early"
        assert server.process.stop(signal.SIGTERM) == 0
        server.start()
        rest, _ = process.communicate("\n", timeout=300)
    assert process.returncode == 0
    assert "".join(printed) + rest == _in_this_process(script.replace("input()", ""), model)


def _in_this_process(script: str, model: Path) -> str:
    """What the script prints with planish's own client, whose names are the same."""
    script = script.replace(
        "import tinker\nfrom tinker import types",
        "import planish as tinker\nimport planish as types",
    )
    script = script.replace(
        "ServiceClient()", f"ServiceClient(models={{'planish/tiny-model': {str(model)!r}}})"
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script + "\nservice.close()\n", {})
    return printed.getvalue()


def test_the_llama_3_tokenizer_loads_without_a_network(server: Serving, hub: Path):
    script = f"""
import tinker
sampler = tinker.ServiceClient().create_sampling_client(base_model={LLAMA!r}).result()
print(sampler.get_tokenizer().encode("a"))
"""
    done = run_script(script, server, hub)
    assert (done.returncode, done.stdout) == (0, "[97]\n"), done.stderr[-3000:]


def test_external_weights_can_be_decrypted_with_one_key(server: Serving):
    """As `weights.download` of the tinker-cookbook fetches a training checkpoint."""
    pytest.importorskip("pyrage", reason="it is of an extra")
    script = (
        SETUP
        + """
import json, pyrage
from urllib.request import urlopen
key = pyrage.x25519.Identity.generate()
client = service.create_training_client_from_state(client.save_state("state").result().path).result()
saving = client.save_weights_external("sealed", ttl_seconds=3600, age_encryption_recipients=[str(key.to_public())])
path, rest = saving.result().path, tinker.RestClient()
urls = rest.get_external_weights_urls(path).result().urls
rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
assert all(name.endswith(".age") for name in urls), urls
print(json.loads(pyrage.decrypt(urlopen(urls["adapter_config.json.age"]).read(), [key]))["r"])
rest.delete_checkpoint_from_tinker_path(path).result()
"""
    )
    done = run_script(script, server)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr[-3000:]


@pytest.mark.slow
def test_two_thousand_concurrent_sdk_samples_are_answered(server: Serving):
    script = """
import time
import tinker
from tinker import types
client = tinker.ServiceClient().create_sampling_client(base_model="planish/tiny-model").result()
params = types.SamplingParams(max_tokens=2, seed=1)
began = time.monotonic()
pending = [client.sample(types.ModelInput.from_ints([1, 2, i % 200]), 1, params) for i in range(2000)]
assert all(len(future.result().sequences[0].tokens) in (1, 2) for future in pending)
print(f"2000 samples in {time.monotonic() - began:.1f} s")
"""
    done = run_script(script, server)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
