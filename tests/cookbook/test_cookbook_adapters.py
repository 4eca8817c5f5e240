"""The cookbook adapters that contain logic."""

import asyncio
import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest
from PIL.Image import new as new_image

from planish.cookbook.adapters.images import resize_image
from planish.cookbook.adapters.names import RolloutSummaryExportConfig
from planish.cookbook.adapters.renderers import get_renderer
from planish.cookbook.adapters.sandbox_fusion import SandboxFusionClient
from planish.errors import UserError
from planish.renderers import ImagePart
from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer


class Fusion(BaseHTTPRequestHandler):
    """A sandbox server whose response is the status and body that the code of a request names."""

    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request)
        status, _, body = request["code"].partition(" ")
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fusion_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/run_code"
    server.shutdown()
    thread.join()
    server.server_close()


def run(client: SandboxFusionClient, *programs: str) -> list[tuple[bool, dict[str, Any]]]:
    async def all_of_them() -> list[tuple[bool, dict[str, Any]]]:
        try:
            return [await client.run(code, {"a.txt": "é"}, timeout=2.9) for code in programs]
        finally:
            await client.close()

    return asyncio.run(all_of_them())


def test_programs_run_at_a_sandboxfusion_server(fusion_url):
    ran, failed, broken, down, odd, listed = run(
        SandboxFusionClient(fusion_url),
        '200 {"status": "Success", "run_result": {"stdout": "5"}}',
        '200 {"status": "Failed"}',
        '200 {"status": "SandboxError", "message": "no container"}',
        "500 out of memory",
        "200 not json",
        "200 []",
    )
    assert ran == (True, {"status": "Success", "run_result": {"stdout": "5"}})
    assert failed == (False, {"status": "Failed"})
    assert broken[0] is False
    assert broken[1]["error"] == "no container"
    assert down == (False, {"error": "HTTP 500: out of memory"})
    assert odd[0] is False
    assert listed == (False, {"error": "the server answered []"})
    sent = Fusion.requests[0]
    assert (sent["language"], sent["run_timeout"]) == ("python", 2)
    assert base64.b64decode(sent["files"]["a.txt"]).decode() == "é"


def test_a_missing_server_is_a_finding(fusion_url, monkeypatch):
    monkeypatch.setenv("SANDBOX_URL", "http://127.0.0.1:9/run_code")
    ((ran, answer),) = run(SandboxFusionClient(), "200 {}")
    assert ran is False
    assert answer["error"]
    monkeypatch.setenv("SANDBOX_MAX_CONCURRENCY", "many")
    with pytest.raises(UserError, match="SANDBOX_MAX_CONCURRENCY=many"):
        SandboxFusionClient()


def test_images_are_resized_and_refused_by_renderers(tmp_path):
    assert resize_image(new_image("RGB", (300, 200)), 30).size == (30, 20)
    assert resize_image(new_image("RGB", (2, 900)), 30).size == (1, 30)
    small = new_image("RGB", (20, 10))
    assert resize_image(small, 20) is small
    renderer = get_renderer("chatml", load_tokenizer(save_byte_tokenizer(tmp_path)))
    part = ImagePart(type="image", image=small)
    with pytest.raises(ValueError, match="images need the renderer of a model with images"):
        renderer.build_generation_prompt([{"role": "user", "content": [part]}])


def test_the_description_of_a_file_of_rollouts_can_be_made():
    assert RolloutSummaryExportConfig("train", 3, "train").sampling_client_step is None
