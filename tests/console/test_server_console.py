"""`planish serve --console` over HTTP: what each tenant sees, logins, and foreign pages."""

import json
import time
from collections.abc import Iterator

import httpx2
import pytest
from server_consoles import KEYS, ServedConsole, serving_console, train

from planish.console.server_app import Logins
from planish.console.web import CSP
from planish.testing import tiny_model

pytestmark = pytest.mark.slow
ACTION = {"X-Planish-Console": "1"}
NASTY = "<script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model, tmp_path_factory) -> Iterator[ServedConsole]:
    with serving_console(model, tmp_path_factory.mktemp("data"), KEYS) as found:
        yield found


@pytest.fixture(scope="module")
def runs(served) -> dict[str, str]:
    """The ids of a run of each tenant."""
    return {
        "alice": train(served.url, "tml-alice-key", 4, recipe_name="math", note=NASTY),
        "bob": train(served.url, "tml-bob-key", 2),
    }


def data(browser: httpx2.Client, path: str, **params) -> dict:
    answer = browser.get(f"/api/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_run_of_the_server_has_the_views_of_any_run(served, runs):
    browser, run = served.browser("tml-alice-key"), runs["alice"]
    [listed] = data(browser, "runs")["runs"]
    assert listed["id"] == run
    assert (listed["model"], listed["recipe"]) == ("tiny", "math")
    assert (listed["step"], listed["reward_name"]) == (4, "loss_per_token")
    detail = data(browser, "run", run=run)
    assert detail["main_metrics"][0]["name"] == "loss_per_token"
    assert detail["config"]["lora.rank"] == "4"
    assert detail["config"]["user_metadata.note"] == NASTY
    [series] = data(browser, "curves", run=run, metric="loss_per_token")["series"]
    assert series["steps"] == [1, 2, 3, 4]
    assert series["y"][-1] < series["y"][0]
    [checkpoint] = data(browser, "checkpoints", run=run)["checkpoints"]
    assert checkpoint["state_path"] == f"tinker://{run}/weights/kept"
    assert checkpoint["size_bytes"] > 0
    assert data(browser, "findings", run=run)["num_steps"] == 4
    assert "loss_per_token" in browser.get("/export", params={"run": run}).text


def test_a_session_has_its_requests(served, runs):
    browser = served.browser("tml-alice-key")
    session_id = runs["alice"].split(":")[0]
    [listed] = data(browser, "sessions")["sessions"]
    assert (listed["id"], listed["models"]) == (session_id, 1)
    assert data(browser, "sessions", text="nothing has this")["sessions"] == []
    session = data(browser, "session", session=session_id)
    kinds = [request["kind"] for request in session["requests"]]
    assert kinds == ["create_model", *["forward_backward", "optim_step"] * 4, "save_weights"]
    assert all(
        each["accepted"] <= each["begun"] <= each["finished"] for each in session["requests"]
    )
    trace = browser.get("/trace", params={"session": session_id})
    assert trace.status_code == 200
    assert f"session {session_id}".encode() in trace.content


def test_a_tenant_sees_nothing_of_another(served, runs):
    browser, other = served.browser("tml-bob-key"), runs["alice"]
    session_id = other.split(":")[0]
    data(browser, "server")
    for path, params in (
        ("run", {"run": other}),
        ("curves", {"run": other, "metric": "loss_per_token"}),
        ("checkpoints", {"run": other}),
        ("findings", {"run": other}),
        ("session", {"session": session_id}),
    ):
        answer = browser.get(f"/api/{path}", params=params)
        assert answer.status_code == 404, path
        assert NASTY not in answer.text
    assert browser.get("/trace", params={"session": session_id}).status_code == 404
    assert browser.get("/export", params={"run": other}).status_code == 404
    assert [run["id"] for run in data(browser, "runs")["runs"]] == [runs["bob"]]
    for path in ("server", "sessions", "runs"):
        text = browser.get(f"/api/{path}").text
        assert "alice" not in text, path
        assert session_id not in text, path
    assert "machine" not in data(browser, "server")


def chat(browser: httpx2.Client, model: str, headers=ACTION, **options) -> httpx2.Response:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "stream": True, **options}
    return browser.post("/api/chat", json=body, headers=headers)


def test_a_chat_streams_the_answer_of_a_checkpoint(served, runs):
    browser, checkpoint = served.browser("tml-alice-key"), f"tinker://{runs['alice']}/weights/kept"
    answer = chat(browser, checkpoint, stream_options={"include_usage": True})
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 8
    assert chat(browser, "tiny").status_code == 200
    wrong = chat(browser, "tiny", temperature=-1)
    assert wrong.status_code == 400
    assert "temperature" in wrong.json()["error"]


def test_nobody_chats_with_a_checkpoint_of_another_tenant(served, runs):
    checkpoint = f"tinker://{runs['alice']}/weights/kept"
    for key in ("tml-bob-key", "tml-operator-key"):
        answer = chat(served.browser(key), checkpoint)
        assert answer.status_code == 404
        assert "belongs to another tenant" in answer.json()["error"]
    nobody = served.browser()
    assert chat(nobody, checkpoint).status_code == 401
    assert chat(nobody, "tiny", {**ACTION, "x-api-key": "tml-bob-key"}).status_code == 401
    browser = served.browser("tml-alice-key")
    assert chat(browser, checkpoint, {}).status_code == 403
    foreign = {**ACTION, "origin": "https://elsewhere.example"}
    assert chat(browser, checkpoint, foreign).status_code == 403


def test_the_operator_sees_all_tenants(served, runs):
    browser = served.browser("tml-operator-key")
    assert {run["id"] for run in data(browser, "runs")["runs"]} == set(runs.values())
    assert {row["tenant"] for row in data(browser, "sessions")["sessions"]} == {"alice", "bob"}
    found = data(browser, "server")
    assert found["tenant"] is None
    assert set(found["storage"]) == {"alice", "bob"}
    assert found["machine"]["free_disk_bytes"] > 0
    assert found["queue"] == []
    assert data(browser, "run", run=runs["bob"])["config"]["tenant"] == "bob"


def test_data_needs_a_login(served, runs):
    nobody = served.browser()
    page = nobody.get("/")
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == CSP
    assert 'data-base="/console"' in page.text
    assert nobody.get("/static/app.js").status_code == 200
    for path in (
        "server",
        "sessions",
        "session",
        "runs",
        "run",
        "curves",
        "checkpoints",
        "findings",
    ):
        assert nobody.get(f"/api/{path}").status_code == 401, path
    assert nobody.get("/trace", params={"session": "a"}).status_code == 401
    assert nobody.get("/export", params={"run": "a"}).status_code == 401
    # A key in a header is not a login: another page could not send it, but a link must not either.
    assert nobody.get("/api/runs", headers={"x-api-key": "tml-bob-key"}).status_code == 401
    for key, words in (
        ("tml-nobody-key", "unknown"),
        ("", "needs a key"),
        ("tml-metrics-key", "reads the page /metrics only"),
        (7, "needs a key"),
    ):
        answer = nobody.post("/api/login", json={"key": key}, headers=ACTION)
        assert answer.status_code == 401
        assert words in answer.json()["error"]
        assert "set-cookie" not in answer.headers
    too_large = nobody.post("/api/login", content=b"x" * 5000, headers=ACTION)
    assert too_large.status_code == 413


def test_the_cookie_is_no_key_and_ends_with_the_login(served, runs):
    browser = served.browser()
    answer = browser.post("/api/login", json={"key": "tml-bob-key"}, headers=ACTION)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/console" in cookie
    assert "tml-bob-key" not in cookie
    token = browser.cookies["planish-console"]
    assert data(browser, "runs")["runs"]
    assert browser.post("/api/logout", headers=ACTION).status_code == 200
    again = served.browser()
    again.cookies.set("planish-console", token)
    assert again.get("/api/runs").status_code == 401


def test_other_pages_cannot_use_the_console(served, runs):
    browser = served.browser("tml-bob-key")
    foreign = {"origin": "https://elsewhere.example"}
    assert browser.get("/api/runs", headers=foreign).status_code == 403
    assert browser.post("/api/logout", headers={**ACTION, **foreign}).status_code == 403
    assert browser.post("/api/logout").status_code == 403
    assert browser.get("/api/runs", headers={"host": "planish.example"}).status_code == 200


def test_a_server_without_keys_shows_all_on_its_own_machine_only(model, tmp_path):
    with serving_console(model, tmp_path) as served:
        run = train(served.url, None, 1)
        browser = served.browser()
        assert browser.get("", follow_redirects=True).url.path == "/console/"
        assert [each["id"] for each in data(browser, "runs")["runs"]] == [run]
        assert data(browser, "server")["machine"]["open_sessions"] >= 0
        rebound = browser.get("/api/runs", headers={"host": "rebound.example"})
        assert rebound.status_code == 403


def test_a_public_url_with_a_path_is_the_base_of_all_links(model, tmp_path):
    url = "https://planish.example/lab"
    with serving_console(model, tmp_path, KEYS, public_url=url) as served:
        browser = served.browser()
        assert 'data-base="/lab/console"' in browser.get("/").text
        answer = browser.post("/api/login", json={"key": "tml-bob-key"}, headers=ACTION)
        cookie = answer.headers["set-cookie"].lower()
        assert "secure" in cookie
        assert "path=/lab/console" in cookie


def test_logins_expire():
    now = time.monotonic()
    clock = iter([now, now, now + 12 * 3600 + 1]).__next__
    logins = Logins(clock)
    token = logins.open("key")
    assert logins.key(token) == "key"
    assert logins.key(token) is None
