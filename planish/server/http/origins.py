"""Which hosts and web pages may send requests to a server.

A server without keys serves only programs on its own machine. A web page in a browser on this
machine could send requests too, so each request is checked (`check_is_not_web_page`):

    Host    must be a loopback name. The browser sends the name from the page's URL, so this check
            stops pages whose name resolves to 127.0.0.1 (DNS rebinding).
    Origin  must be absent or allowed, unless the request has a key. A page can send a key only
            after the server has agreed in a CORS preflight.

With `--allow-origin`, Starlette's CORSMiddleware with `cors_options` answers the preflights of the
named pages, and lets these pages read answers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from typing import Any

from starlette.datastructures import Headers

from planish.errors import UserError
from planish.server.results import Unauthorized

ANY_ORIGIN = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:\d{1,5})?")
_PREFLIGHT_SECONDS = 600
"""How long a browser may keep the answer to a preflight."""
_METHODS = ("GET", "POST", "PUT", "DELETE")
_EXPOSED_HEADERS = ("Retry-After", "ETag", "Accept-Ranges", "Content-Range", "Content-Length")


def check_is_not_web_page(
    headers: Headers, has_key: bool, allowed_origins: Collection[str]
) -> None:
    """Raise Unauthorized if a web page in a browser on this machine may have sent the request.
    `has_key`: the request has a key. Call this on a server without keys only.
    """
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not is_loopback(host_name(host)):
        raise Unauthorized(
            "this server has no keys, so it serves only programs on its own machine. It rejects "
            f"requests with the Host {host[:100]!r}, because a web page may have sent them; call "
            "127.0.0.1 or localhost, or start the server with --api-key-file"
        )
    if origin is not None and not has_key and origin not in allowed_origins:
        raise Unauthorized(
            "this server has no keys, so it rejects requests of web pages. This one has the Origin "
            f"{origin[:100]!r}. Start the server with --allow-origin {origin[:100]}, or send any "
            "key, for example `Authorization: Bearer any`"
        )


def host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets; "" for an invalid header."""
    match = _HOST.fullmatch(host)
    return "" if match is None else match[1].strip("[]").lower()


def is_loopback(host: str) -> bool:
    """Return whether an address, or a host name in a URL, is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_origins(origins: Sequence[str], has_keys: bool) -> None:
    """Raise UserError if the values of --allow-origin are invalid."""
    for origin in origins:
        if origin == ANY_ORIGIN and not has_keys:
            raise UserError(
                "--allow-origin '*': without keys, every web page could use this server; name the "
                "pages, or give --api-key-file"
            )
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise UserError(
                f"--allow-origin {origin}: give scheme, host and port as browsers send them, such "
                "as http://localhost:3000, or '*' for every web page"
            )


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Return the options of Starlette's CORSMiddleware for the values of --allow-origin."""
    return {
        "allow_origins": list(origins),
        "allow_methods": list(_METHODS),
        "allow_headers": ["*"],
        "expose_headers": list(_EXPOSED_HEADERS),
        "max_age": _PREFLIGHT_SECONDS,
    }
