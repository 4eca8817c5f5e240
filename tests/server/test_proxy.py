"""A server behind nginx, with the configuration of docs/operators/server.md. The clients use the
proxy from this machine, and from another address in a network namespace of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from server_process import BASE_MODEL, ServerProcess, free_port, running_server

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)"),
]
DOCS = Path(__file__).parents[2] / "docs" / "operators" / "server.md"
KEY = "tml-proxy-test"
START_SECONDS = 60.0
NAMESPACE_ADDRESSES = ("10.213.77.1", "10.213.77.2")
"""The addresses of the proxy and of the client in its namespace."""


def documented_directives(port: int) -> str:
    """Return the lines of docs/operators/server.md for a server at `port`."""
    block = re.search(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    assert "127.0.0.1:8000" in block[1]
    return block[1].replace("127.0.0.1:8000", f"127.0.0.1:{port}")


@dataclass(frozen=True)
class Proxy:
    plain: int
    """The port for HTTP."""
    tls: int
    """The port for HTTPS."""


@contextmanager
def running_nginx(directory: Path, server: ServerProcess) -> Iterator[Proxy]:
    directory.mkdir()
    proxy = Proxy(free_port(), free_port())
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=planish.example "
        "-keyout key.pem -out certificate.pem"
    )
    subprocess.run(command.split(), cwd=directory, check=True, capture_output=True)
    paths = "".join(
        f"{kind}_temp_path {directory}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    directives = documented_directives(int(server.url.rpartition(":")[2]))
    (directory / "nginx.conf").write_text(
        f"daemon off; pid {directory}/pid; error_log stderr; worker_processes 1;\n"
        f"events {{ worker_connections 256; }}\nhttp {{\naccess_log off;\n{paths}"
        f"server {{\nlisten 0.0.0.0:{proxy.plain};\n{directives}}}\n"
        f"server {{\nlisten 0.0.0.0:{proxy.tls} ssl;\nssl_certificate {directory}/certificate.pem;\n"
        f"ssl_certificate_key {directory}/key.pem;\n{directives}}}\n}}\n"
    )
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-c", str(directory / "nginx.conf"), "-p", str(directory)])
    try:
        wait_for_port(proxy.plain, process)
        yield proxy
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, "nginx ended"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def start_options(directory: Path) -> list[str]:
    keys = directory / "keys"
    keys.write_text(f"alice {KEY}\n")
    return ["--api-key-file", str(keys)]


@pytest.fixture(scope="module")
def served(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("proxied")
    with running_server(directory / "data", model_dir, *start_options(directory)) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(served: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running_nginx(tmp_path_factory.mktemp("nginx") / "files", served) as proxy:
        yield proxy


SAVE = """
import json, sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
client = service.create_lora_training_client(base_model=sys.argv[3], rank=4)
path = client.save_weights_external("a").result().path
urls = service.create_rest_client().get_external_weights_urls(path).result().urls
print("RESULT", json.dumps([path, urls]))
"""
FETCH = """
import json, sys, httpx
with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
    sizes = {url: len(client.get(url).raise_for_status().content) for url in json.loads(sys.argv[1])}
print("RESULT", json.dumps(sizes))
"""


def run_script(script: str, *arguments: str, prefix: tuple[str, ...] = ()) -> object:
    finished = subprocess.run(
        [*prefix, sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "*"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.rpartition("RESULT ")[2])


@pytest.fixture(scope="module")
def checkpoint(proxy: Proxy) -> str:
    """A checkpoint that the official SDK saved through the proxy."""
    url = f"http://127.0.0.1:{proxy.plain}"
    path, urls = run_script(SAVE, url, KEY, BASE_MODEL)  # pyright: ignore[reportGeneralTypeIssues]
    assert {name: link.startswith(f"{url}/api/v1/downloads/") for name, link in urls.items()} == {
        "adapter_config.json": True,
        "adapter_model.safetensors": True,
        "planish.json": True,
    }
    assert all(run_script(FETCH, json.dumps(list(urls.values()))).values())  # type: ignore[attr-defined]
    return path


def links(url: str, checkpoint: str, **headers: str) -> list[str]:
    run, _, name = checkpoint.removeprefix("tinker://").partition("/")
    with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
        answer = client.get(
            f"{url}/api/v1/training_runs/{run}/checkpoints/{name}/external_weights_urls",
            headers={"x-api-key": KEY, **headers},
        )
    return list(answer.raise_for_status().json()["urls"].values())


def test_links_have_the_scheme_of_the_client(proxy: Proxy, checkpoint: str):
    url = f"https://127.0.0.1:{proxy.tls}"
    found = links(url, checkpoint)
    assert all(link.startswith(f"{url}/api/v1/downloads/") for link in found)
    assert all(run_script(FETCH, json.dumps(found)).values())  # type: ignore[attr-defined]


def test_links_have_the_host_of_the_client(proxy: Proxy, checkpoint: str):
    url = f"http://127.0.0.1:{proxy.plain}"
    found = links(url, checkpoint, Host="planish.example:4433")
    assert all(link.startswith("http://planish.example:4433/api/v1/downloads/") for link in found)


def has_namespaces() -> bool:
    """Whether this process may create network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"planish-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


@contextmanager
def namespace() -> Iterator[tuple[str, ...]]:
    """Yield the prefix of a command that runs at NAMESPACE_ADDRESSES[1]."""
    name, here, there = f"planish-{os.getpid()}", f"pl{os.getpid()}a", f"pl{os.getpid()}b"
    proxy_address, client_address = NAMESPACE_ADDRESSES
    commands = [
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there} netns {name}",
        f"ip address add {proxy_address}/30 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} address add {client_address}/30 dev {there}",
        f"ip -n {name} link set {there} up",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield ("ip", "netns", "exec", name)
    finally:
        subprocess.run(["ip", "link", "del", here], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.skipif("not has_namespaces()", reason="this process may not create network namespaces")
def test_a_client_at_another_address_can_download(
    served: ServerProcess, proxy: Proxy, checkpoint: str
):
    """Links named 127.0.0.1, which is another machine to this client."""
    with namespace() as prefix:
        url = f"http://{NAMESPACE_ADDRESSES[0]}:{proxy.plain}"
        path, urls = run_script(SAVE, url, KEY, BASE_MODEL, prefix=prefix)  # type: ignore[misc]
        assert all(link.startswith(url) for link in urls.values())
        sizes = run_script(FETCH, json.dumps(list(urls.values())), prefix=prefix)
        assert all(sizes.values())  # type: ignore[attr-defined]
    assert path != checkpoint
    served.wait_for_line(NAMESPACE_ADDRESSES[1])


def test_our_own_client_uses_its_own_url(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It followed links, which may name an address that only the server can reach."""
    options = [*start_options(tmp_path), "--public-url", "http://unreachable.invalid/prefix/"]
    with (
        running_server(tmp_path / "data", model_dir, *options) as server,
        running_nginx(tmp_path / "nginx", server) as proxy,
    ):
        url = f"http://127.0.0.1:{proxy.plain}"
        path, urls = run_script(SAVE, url, KEY, BASE_MODEL)  # type: ignore[misc]
        start = "http://unreachable.invalid/prefix/api/v1/downloads/"
        assert all(link.startswith(start) for link in urls.values())
        subprocess.run(
            [
                *(sys.executable, "-m", "planish", "checkpoints", "download", path),
                *("--base-url", url, "--api-key", KEY, "--out", str(tmp_path / "out")),
            ],
            check=True,
            timeout=300,
        )
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(urls)


def test_a_download_is_resumed_through_the_proxy(proxy: Proxy, checkpoint: str, tmp_path: Path):
    [link] = [
        link
        for link in links(f"http://127.0.0.1:{proxy.plain}", checkpoint)
        if link.endswith(".safetensors")
    ]
    with httpx.Client(trust_env=False, timeout=60) as client:
        whole = client.get(link)
    target = tmp_path / "part"
    target.write_bytes(whole.content[:1000])
    subprocess.run(
        ["curl", "--silent", "--fail", "--noproxy", "*", "-C", "-", "-o", str(target), link],
        check=True,
        timeout=60,
    )
    assert target.read_bytes() == whole.content
