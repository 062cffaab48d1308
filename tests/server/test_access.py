"""Who may use the server, tried as an attacker would: names, origins, keys, bodies."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.live_server import Live, live_server, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from webgemma.errors import InputError
from webgemma.server import http, listening
from webgemma.server.access import (
    check_keys,
    check_origin,
    is_allowed_host,
    is_allowed_origin,
    is_loopback,
)

KEY = "0123456789abcdef"
HELLO: Any = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def open_to_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server as it starts by default: on loopback, without a key."""
    with live_server(tiny_model(tmp_path_factory.mktemp("models"))) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = tiny_model(tmp_path_factory.mktemp("models"))
    with live_server(
        model, keys=[KEY, KEY[::-1]], origins=["https://chat.example.com"], host="0.0.0.0"
    ) as server:
        yield server


# Names and origins


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:1", "127.0.0.1:11434", "[::1]:80", "[::1]", "a.localhost"),
        *("", "pc.local", "192.168.1.5:8080", "10.0.0.1", "localhost.", socket.gethostname()),
    ],
)
def test_names_of_this_machine(host: str) -> None:
    assert is_allowed_host(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:11434", "8.8.8.8"),
        *("evil.example:localhost", "localhost:80:evil", "[::1].evil.example", "[2606:4700::1]"),
        *("evillocalhost", "notlocal", "localhost@evil.example", "localhost/evil", "::1evil"),
    ],
)
def test_names_that_were_made_to_point_here(open_to_all: Live, host: str) -> None:
    assert not is_allowed_host(host)
    for path in ("/", "/api/tags", "/v1/models", "/health", "/nothing"):
        assert open_to_all.http.get(path, headers={"Host": host}).status_code in (400, 403)


def test_two_hosts_are_no_way_around(open_to_all: Live) -> None:
    with open_to_all.connect() as connection:
        connection.sendall(
            b"GET /api/tags HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"
            b"Connection: close\r\n\r\n"
        )
        status = connection.makefile("rb").readline()
    assert status.split()[1] in (b"400", b"403")


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:3000", "https://127.0.0.1", "http://[::1]:5", "app://obsidian.md"),
        *("tauri://localhost", "vscode-webview://abc", "file://"),
    ],
)
def test_origins_of_programs_here(open_to_all: Live, origin: str) -> None:
    assert is_allowed_origin(origin)
    answer = open_to_all.http.get("/api/tags", headers={"Origin": origin})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "null",
            "https://evil.example",
            "http://localhost.evil.example",
            "http://localhost:80@evil",
        ),
        *("", "localhost", "javascript://localhost", "http://evil.example:localhost", "http://"),
        *(
            "https://chat.example.com",
            "http://127.0.0.1.evil.example",
            "http://localhost:3000/path",
        ),
    ],
)
def test_origins_of_other_pages(open_to_all: Live, origin: str) -> None:
    assert not is_allowed_origin(origin)
    for path in ("/api/chat", "/v1/chat/completions", "/v1/messages"):
        answer = open_to_all.post(path, HELLO, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "origin" in answer.text
    # As a form does, without asking first:
    plain = {"Origin": origin, "Content-Type": "text/plain"}
    assert open_to_all.http.post("/api/chat", content="{}", headers=plain).status_code == 403


def test_a_named_origin_may_read_answers(locked: Live) -> None:
    page = {"Origin": "https://chat.example.com"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}
    preflight = locked.http.options("/v1/chat/completions", headers=page | asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == page["Origin"]
    assert "access-control-allow-credentials" not in preflight.headers
    answer = locked.http.get("/v1/models", headers=page | {"x-api-key": KEY})
    assert answer.headers["access-control-allow-origin"] == page["Origin"]
    other = locked.http.options("/v1/models", headers=asks | {"Origin": "https://evil.example"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


@given(st.text())
def test_any_header_is_read(text: str) -> None:
    assert is_allowed_host(text) in (True, False)
    assert is_allowed_origin(text) in (True, False)
    assert is_loopback(text) in (True, False)


def test_origins_are_checked_when_they_are_named() -> None:
    assert check_origin("https://Chat.example.com/") == "https://chat.example.com"
    for wrong in ("chat.example.com", "*", "https://", "https://a/b", "https://[x", "null", ""):
        with pytest.raises(InputError, match="is no origin"):
            check_origin(wrong)


# Keys


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
        {"x-api-key": ""},
        {"x-api-key": f"{KEY}, {KEY}"},
        {"x-api-key": "k\xe9y".encode("latin-1")},
        {"Cookie": f"x-api-key={KEY}"},
    ],
)
def test_without_a_key_nothing_is_said(locked: Live, headers: Any) -> None:
    for path in ("/v1/models", "/api/tags", "/api/ps", "/nothing", "/v1/models/small"):
        answer = locked.http.get(path, headers=headers)
        assert answer.status_code == 401
        assert "small" not in answer.text
        assert KEY not in answer.text
    error = locked.post("/v1/messages", HELLO, headers=headers).json()
    assert error["error"]["type"] == "authentication_error"
    assert "error" in locked.post("/api/chat", HELLO, headers=headers).json()
    assert locked.http.get(f"/v1/models?api_key={KEY}", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        *({"Authorization": f"bearer {KEY}"}, {"x-api-key": KEY}, {"X-API-KEY": KEY[::-1]}),
        {"Authorization": "Bearer none", "x-api-key": KEY},
    ],
)
def test_with_a_key_all_is_served(locked: Live, headers: Any) -> None:
    assert locked.http.get("/v1/models", headers=headers).status_code == 200


def test_whether_it_runs_is_no_secret(locked: Live) -> None:
    assert locked.http.get("/health").status_code == 200
    assert locked.http.head("/").status_code == 200
    assert locked.http.get("/health/").status_code == 401


def test_other_machines_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.com"):
        with pytest.raises(InputError, match="need an API key"):
            check_keys([], host)
        check_keys([KEY], host)
    for host in ("127.0.0.1", "::1", "[::1]", "localhost", "127.8.8.8"):
        check_keys([], host)
    for key in ("short", "with a space in the key", "\xe9" * 20, "", "tab\t" * 5):
        with pytest.raises(InputError, match="at least 16"):
            check_keys([key], "localhost")


# Bodies


def test_a_long_body_is_refused_before_it_is_sent(open_to_all: Live) -> None:
    for length in (http.MAX_BODY_NBYTES + 1, 10**30):
        with open_to_all.connect() as connection:
            head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
            connection.sendall(f"{head}\r\n".encode())
            status = connection.makefile("rb").readline()
        assert status.split()[1] in (b"413", b"400")


def test_a_long_body_without_a_length_is_refused(
    open_to_all: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def short(request: Any, parse: Any) -> Any:
        return await http.read(request, parse, 1 << 20)

    monkeypatch.setattr("webgemma.server.app.read", short)
    chunks = (b" " * (1 << 16) for _ in range(20))
    answer = open_to_all.http.post("/v1/messages", content=chunks)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large"
    assert open_to_all.post("/tokenize", {"content": "x"}).status_code == 200


def test_a_slow_body_is_refused(open_to_all: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.1)
    with open_to_all.connect() as connection:
        connection.sendall(
            b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        status = connection.makefile("rb").readline()
    assert status.split()[1] == b"408"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_slow_head_ends_the_connection(
    open_to_all: Live, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Also after a request that was complete."""
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.3)
    with open_to_all.connect() as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""
    with open_to_all.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while b'"ok"}' not in answer:
            answer += connection.recv(1000)
        connection.sendall(sent or b"G")
        assert connection.recv(1) == b""
