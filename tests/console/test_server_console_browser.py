"""The console of a server in a real browser."""

import re
from collections.abc import Iterator

import pytest
from server_consoles import KEYS, ServedConsole, serving_console, train
from watched_page import CHROMIUM, PACKAGES, Watched, panel, serious_faults

from planish.testing import tiny_model

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
]
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright_api.expect
expect.set_options(timeout=60_000)
# Answers of a random model are sampled without a seed, and may end before the limit.
ENDING = re.compile(r"[1-8] tokens, ended: (length|stop)")
NASTY = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
LOSS = "loss_per_token"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[ServedConsole]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with serving_console(model, tmp_path_factory.mktemp("data"), KEYS) as found:
        yield found


@pytest.fixture(scope="module")
def runs(served) -> dict[str, str]:
    return {
        "alice": train(served.url, "tml-alice-key", 6, recipe_name="math", note=NASTY),
        "bob": train(served.url, "tml-bob-key", 3),
    }


def log_in(found: Watched, url: str, key: str) -> None:
    found.page.goto(f"{url}/console/")
    found.page.get_by_label("API key").fill(key)
    found.page.get_by_role("button", name="Show my runs").click()
    expect(found.page.locator("h1")).to_have_text("Server")
    found.errors.clear()  # the browser logs the status 401 of the first request


def test_a_tenant_sees_its_own_sessions_runs_and_curves(watched, served, runs):
    page, run = watched.page, runs["alice"]
    session = run.split(":")[0]
    log_in(watched, served.url, "tml-alice-key")
    expect(page.locator("main")).to_contain_text("tenant alice")
    expect(page.locator("main")).to_contain_text("Base models: tiny")
    expect(page.locator("main")).not_to_contain_text("Machine")
    page.get_by_role("link", name="Sessions").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name=session).click()
    expect(page.locator("h1")).to_have_text(f"Session {session}")
    expect(page.locator(".timeline rect")).not_to_have_count(0)
    expect(page.locator(".timeline")).to_contain_text("optim_step")
    with page.expect_download() as download:
        page.get_by_role("link", name="Save for Perfetto").click()
    assert download.value.suggested_filename == f"{session}.pftrace"
    page.get_by_role("link", name=f"Curves of {run}").click()
    expect(panel(page, LOSS).locator(".readout")).to_contain_text("last, step 6")
    expect(panel(page, LOSS).locator("canvas")).to_be_visible()
    page.get_by_role("link", name="Options").click()
    expect(page.locator("main")).to_contain_text("<script>document.title")
    page.get_by_role("link", name="Checkpoints").click()
    expect(page.locator("tbody tr")).to_contain_text(f"tinker://{run}/weights/kept")
    page.get_by_role("link", name="What is wrong").click()
    expect(page.locator("h1")).to_have_text("What is wrong")
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(1)
    assert "owned" not in page.title()
    assert page.locator("main script, main img").count() == 0


def test_a_tenant_sees_nothing_of_another(watched, served, runs):
    page, run = watched.page, runs["alice"]
    log_in(watched, served.url, "tml-bob-key")
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text(runs["bob"])
    for address in (f"curves?run={run}", f"session?session={run.split(':')[0]}"):
        page.goto(f"{served.url}/console/{address}")
        expect(page.locator(".notice")).to_contain_text("there is no")
    watched.errors.clear()  # the browser logs the statuses 404
    page.goto(f"{served.url}/console/")
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    watched.errors.clear()


def test_a_tenant_chats_with_its_checkpoints(watched, served, runs):
    page = watched.page
    log_in(watched, served.url, "tml-alice-key")
    page.goto(f"{served.url}/console/chat?run={runs['alice']}")
    page.get_by_label("first model").select_option(label="weights/kept")
    page.get_by_label("second model").select_option(label="base model")
    page.get_by_label("Most tokens").fill("8")
    page.get_by_label("message").fill("hello")
    page.keyboard.press("Enter")
    answers = page.locator(".message.assistant")
    expect(answers).to_have_count(2)
    for answer in (answers.first, answers.last):
        expect(answer).to_contain_text(ENDING)
    page.get_by_label("Temperature").fill("-1")
    page.get_by_label("message").fill("hello")
    page.keyboard.press("Enter")
    expect(answers.nth(1)).to_contain_text("temperature")
    watched.errors.clear()  # the browser logs the status 400


def test_the_operator_sees_all_tenants_and_the_machine(watched, served, runs):
    page = watched.page
    log_in(watched, served.url, "tml-operator-key")
    expect(page.locator("main")).to_contain_text("all tenants")
    for text in ("alice", "bob", "Free disk", "Sequences that are sampled", "Tokens per second"):
        expect(page.locator("main")).to_contain_text(text)
    page.get_by_role("link", name="Sessions").click()
    expect(page.locator("tbody tr")).not_to_have_count(1)
    page.get_by_label("search sessions").fill("bob open")
    expect(page.locator(".notice, tbody tr").first).to_be_visible()


def test_a_wrong_key_has_a_message_in_place(watched, served):
    page = watched.page
    page.goto(f"{served.url}/console/")
    page.get_by_label("API key").fill("tml-nobody-knows")
    page.get_by_role("button", name="Show my runs").click()
    expect(page.locator(".login")).to_contain_text("this key is unknown")
    watched.errors.clear()


def test_the_pages_fit_a_phone_and_are_accessible(browser, served, runs):
    found = Watched(browser, viewport={"width": 390, "height": 844}, bypass_csp=True)
    log_in(found, served.url, "tml-alice-key")
    run = runs["alice"]
    session = run.split(":")[0]
    for address in (
        "",
        "sessions",
        f"session?session={session}",
        f"curves?run={run}",
        f"chat?run={run}",
    ):
        found.page.goto(f"{served.url}/console/{address}")
        expect(found.page.locator("main :is(h1, canvas)").first).to_be_visible()
        assert found.page.evaluate("document.documentElement.scrollWidth") <= 390, address
        if (PACKAGES / "axe-core/axe.min.js").is_file():
            assert serious_faults(found.page) == [], address
    found.close()
