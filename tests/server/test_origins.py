"""Which hosts and web pages a server without keys rejects, and CORS for the pages that it allows."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from planish.errors import UserError
from planish.server.http.origins import check_is_not_web_page, check_origins
from planish.server.results import Unauthorized

PAGE = "http://localhost:3000"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "127.9.9.9:1", "localhost", "LocalHost:8000", "[::1]:8000"],
)
def test_loopback_names_are_accepted(host: str):
    check_is_not_web_page(Headers({"host": host}), False, ())


@pytest.mark.parametrize(
    "host",
    [
        "@",
        "",
        "example.com",
        "example.com:8000",
        "localhost.example.com",
        "127.0.0.1.example.com",
        "user@127.0.0.1",
        "127.0.0.1@example.com",
        "127.0.0.1:8000@example.com",
        "127.0.0.1/example.com",
        "127.0.0.1:x",
        "127.0.0.1 example.com",
        "[::1",
        "::1",
        "0.0.0.0",
        "localhost,example.com",
        "\u00e9",
    ],
)
@pytest.mark.parametrize("has_key", [False, True])
def test_other_hosts_are_rejected(host: str, has_key: bool):
    """`Host: @` passed, because Starlette replaced it by the server's own address."""
    headers = Headers(raw=[(b"host", host.encode("latin-1"))])
    with pytest.raises(Unauthorized, match="with the Host"):
        check_is_not_web_page(headers, has_key, (PAGE,))


def test_an_origin_needs_a_key_or_the_allow_list():
    headers = Headers({"host": "127.0.0.1", "origin": PAGE})
    with pytest.raises(Unauthorized, match=f"has the Origin '{PAGE}'.*--allow-origin {PAGE}"):
        check_is_not_web_page(headers, False, ("http://localhost:3001",))
    check_is_not_web_page(headers, True, ())
    check_is_not_web_page(headers, False, (PAGE,))


def test_origins_are_checked():
    check_origins([PAGE, "https://example.com", "http://[::1]:3000"], has_keys=False)
    check_origins(["*"], has_keys=True)
    with pytest.raises(UserError, match="every web page"):
        check_origins(["*"], has_keys=False)
    for origin in ("localhost:3000", "http://localhost:3000/", "http://a/b", "null", "", "http://"):
        with pytest.raises(UserError, match="--allow-origin"):
            check_origins([origin], has_keys=True)
