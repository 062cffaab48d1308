"""Who may use the server: programs of this machine and, elsewhere, those that have a key.

Any page in a browser can send requests to this machine. It names itself in the Origin header, and
one whose name was made to point here (DNS rebinding) is found by the Host header."""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from webgemma.errors import InputError
from webgemma.server.protocol import RequestError

# As Ollama has them: pages on this machine, and programs that are made of pages.
LOCAL_NAMES = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
WEB_SCHEMES = ("http", "https")  # the latter behind a proxy
PROGRAM_SCHEMES = ("app", "file", "tauri", "vscode-webview", "vscode-file")
OPEN_PATHS = ("/", "/health", "/status", "/chat")  # whether it runs is no secret
OPEN_FOLDER = "/chat/"  # the files of the page, which asks for a key, as that of /status does
LEAST_KEY = 16  # characters

Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Any]
Refuse = Callable[[Scope, RequestError], App]  # how an API says no


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens on a host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_keys(keys: Sequence[str], host: str) -> None:
    """Raise InputError for keys that can be guessed, and where one is needed and there is none."""
    for key in keys:
        if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError(
                f"An API key must have at least {LEAST_KEY} letters, digits or signs, without "
                "spaces; python -c 'import secrets; print(secrets.token_urlsafe())' makes one."
            )
    if not keys and not is_loopback(host):
        raise InputError(
            f"{host} can be reached from other machines, so clients need an API key: put one into "
            "a file and name it with --api-key-file, or set WEBGEMMA_API_KEY."
        )


def check_origin(origin: str) -> str:
    """Return an origin that is to be allowed, as browsers send it; InputError if it is none."""
    with suppress(ValueError):  # of urlsplit: brackets without an IPv6 address
        parts = urlsplit(origin)
        if parts.scheme and parts.netloc and parts.path in ("", "/") and not parts.query:
            return f"{parts.scheme}://{parts.netloc}".lower()
    raise InputError(
        f"{origin!r} is no origin: write it as browsers do, such as https://chat.example.com."
    )


def is_allowed_host(header: str) -> bool:
    """Return whether a Host header names this machine: Ollama's rule."""
    host = _without_port(header).lower().rstrip(".")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host in ("", "localhost", socket.gethostname().lower()) or host.endswith(
            LOCAL_SUFFIXES
        )
    return address.is_loopback or address.is_private or address.is_unspecified


def is_allowed_origin(origin: str, named: Sequence[str] = ()) -> bool:
    """Return whether a page may send requests."""
    if origin.lower() in named:
        return True
    scheme, separator, rest = origin.lower().partition("://")
    if not separator:
        return False  # "null": a sandboxed page, a file, a redirect
    if scheme in PROGRAM_SCHEMES:
        return True
    return scheme in WEB_SCHEMES and _without_port(rest) in LOCAL_NAMES


def _without_port(host: str) -> str:
    if host.startswith("["):
        inside, bracket, port = host.partition("]")
        return f"{inside}]" if bracket and (not port or _is_port(port)) else host
    name, colon, port = host.rpartition(":")
    return name if colon and _is_port(f":{port}") and ":" not in name else host


def _is_port(text: str) -> bool:
    return text[:1] == ":" and (text[1:] == "" or (text[1:].isascii() and text[1:].isdecimal()))


def is_open(path: str) -> bool:
    """Return whether a path is served to those who have no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class Guard:
    """ASGI middleware that refuses requests by their Host, their Origin and their method."""

    def __init__(self, app: App, *, refuse: Refuse, loopback: bool, origins: Sequence[str]) -> None:
        self.app, self.refuse = app, refuse
        self.loopback, self.origins = loopback, origins

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] == "http" and (error := self._error(scope)):
            await self.refuse(scope, error)(scope, receive, send)
        elif scope["type"] in ("http", "lifespan"):
            await self.app(scope, receive, send)
        else:  # there are no web sockets
            await send({"type": "websocket.close", "code": 1000})

    def _error(self, scope: Scope) -> RequestError | None:
        hosts, origins = _headers(scope, b"host"), _headers(scope, b"origin")
        allowed = list(self.origins)
        if not self.loopback:
            # Any name may be this machine's, also in the origin of the page that is served here:
            # the key stops a page that has none.
            allowed += [f"{scheme}://{host.lower()}" for host in hosts for scheme in WEB_SCHEMES]
        elif not all(map(is_allowed_host, hosts)):
            return RequestError("This server is not known by that name (the Host header).", 403)
        if not all(is_allowed_origin(origin, allowed) for origin in origins):
            return RequestError(
                "Pages of this origin may not use this server; --origin allows one.", 403
            )
        return None


class Keys:
    """ASGI middleware that demands one of some keys, if there are any."""

    def __init__(self, app: App, *, refuse: Refuse, keys: Sequence[str]) -> None:
        self.app, self.refuse = app, refuse
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] != "http" or is_open(scope["path"]) or self._has_key(scope):
            await self.app(scope, receive, send)
        else:
            error = RequestError("A valid API key is missing: this server needs one.", 401)
            await self.refuse(scope, error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        if not self._keys:
            return True
        given = [key.encode("latin-1") for key in _headers(scope, b"x-api-key")]
        for header in _headers(scope, b"authorization"):
            scheme, _, key = header.partition(" ")
            if scheme.lower() == "bearer":
                given.append(key.strip().encode("latin-1"))
        # All pairs are compared, each in a time that depends neither on where they differ nor, by
        # their digests, on their lengths.
        equal = [hmac.compare_digest(_digest(one), key) for one in given for key in self._keys]
        return any(equal)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
