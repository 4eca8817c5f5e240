"""API keys and their tenants."""

from types import SimpleNamespace
from typing import cast

import pytest
from server_client import TENANT
from starlette.requests import Request

from planish.errors import UserError
from planish.server.http.context import HttpState, authenticate
from planish.server.http.keys import ApiKeys, read_keys
from planish.server.results import Unauthorized
from planish.server.server import Server
from planish.server.settings import HttpSettings


def test_a_file_of_keys_names_tenants(tmp_path):
    file = tmp_path / "keys"
    file.write_text(
        "# ours\nanna tml-key-of-anna\nanna tml-newer-key==  # the old one goes in "
        "May\n\ntml-without-a-name\n"
    )
    keys = read_keys(file)
    assert keys["tml-key-of-anna"] == keys["tml-newer-key=="] == "anna"
    unnamed = keys["tml-without-a-name"]
    assert unnamed.startswith("key-")
    assert "without" not in unnamed
    ring = ApiKeys(keys)
    assert ring.tenant("tml-newer-key==").name == "anna"
    assert ring.tenant("tml-without-a-name").name == unnamed


@pytest.mark.parametrize(
    "content",
    ["", "# nothing\n", "short", "a b tml-12345678", "b/c tml-12345678", "x tml-é-12345678"],
)
def test_an_invalid_key_file_is_rejected_with_its_line(tmp_path, content):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(UserError, match="keys"):
        read_keys(file)


def test_a_duplicate_key_and_a_missing_key_file_are_rejected(tmp_path):
    file = tmp_path / "keys"
    file.write_text("a tml-12345678\nb tml-12345678\n")
    with pytest.raises(UserError, match="line 2.*twice"):
        read_keys(file)
    with pytest.raises(UserError, match="one key per line"):
        read_keys(tmp_path / "none")


@pytest.mark.parametrize("key", [None, "", "tml-1234567", "tml-123456789", "\udc80", "x" * 10000])
def test_unknown_keys_are_rejected(key):
    with pytest.raises(Unauthorized):
        ApiKeys({"tml-12345678": "a"}).tenant(key)


def test_a_server_without_keys_accepts_every_caller():
    app = SimpleNamespace(state=SimpleNamespace(http=HttpState(cast(Server, None), HttpSettings())))
    request = Request({"type": "http", "headers": [], "app": app})
    assert [authenticate(request, key).tenant for key in (None, "tml-any")] == [TENANT, TENANT]


def test_a_key_is_not_cut_short_at_a_hash(tmp_path):
    file = tmp_path / "keys"
    file.write_text("## ours #\na tml-12345678#rest\n")
    with pytest.raises(UserError, match="line 2: a # within a key"):
        read_keys(file)


@pytest.mark.parametrize("line", ["anna=tml-12345678", "anna:tml-12345678", "a=12345678"])
def test_a_name_joined_to_its_key_is_rejected(tmp_path, line):
    file = tmp_path / "keys"
    file.write_text(f"bob tml-87654321\n{line}\n")
    with pytest.raises(UserError, match="line 2: .*NAME KEY"):
        read_keys(file)


def test_a_key_file_that_others_can_read_is_warned_about(tmp_path, caplog):
    file = tmp_path / "keys of all"
    file.write_text("tml-12345678\n")
    for mode, is_warned in ((0o600, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        caplog.clear()
        assert list(read_keys(file)) == ["tml-12345678"]
        messages = [record.getMessage() for record in caplog.records]
        assert messages == is_warned * [
            f"api_key_file={file} can be read by other users of this machine; run: chmod 600 '{file}'"
        ]
