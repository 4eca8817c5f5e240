"""huggingface_hub uploads an export unchanged, to a minimal hub defined here."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from planish.errors import UserError
from planish.export import weights


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Requests(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.answer({"id": "me/model", "siblings": [], "sha": "0" * 40})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/me/model", "id": "me/model"})
        elif "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular"}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": [{**file, "shouldIgnore": False} for file in files]})
        elif "/commit/" in path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(
                        entry["value"]["content"]
                    )
            self.answer(
                {
                    "commitUrl": f"{self.server.url}/me/model/commit/{'1' * 40}",
                    "commitOid": "1" * 40,
                }
            )
        else:
            self.answer({"errors": [], "warnings": []})

    def answer(self, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_an_export_is_published_as_it_is(hub, trained, tmp_path, monkeypatch):
    # `make test` is; this hub is here
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", hub.url, raising=False)
    out = weights.build_lora_adapter(
        adapter_path=trained("llama").files, output_path=tmp_path / "out"
    )
    url = weights.publish_to_hf_hub(model_path=out, repo_id="me/model", token="hf_secret")
    assert url == f"{hub.url}/me/model"
    [created] = hub.created
    assert created["name"] == "model"
    assert created.get("private", created.get("visibility")) in (True, "private")
    assert hub.files == {file.name: file.read_bytes() for file in Path(out).iterdir()}
    assert hub.tokens == {"Bearer hf_secret"}


def test_what_is_no_whole_export_is_not_published(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match="not a complete export"):
        weights.publish_to_hf_hub(model_path=tmp_path, repo_id="me/model")
