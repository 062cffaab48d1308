"""What strangers ask for: nothing is fetched or opened, sizes are bounded, no text is logged."""

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.live_server import PATIENCE, Live, live_server, tiny_model, wait_until

from webgemma.server import http
from webgemma.server.engine import Engine

KEY = "0123456789abcdef"
SECRET = "xylophone"
MODEL = {"model": "small"}
APIS = {  # the routes that reply, each with a body for one message
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 3,
    },
    "/api/chat": lambda text: {"messages": [{"role": "user", "content": text}], "stream": False},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tiny_model(tmp_path_factory.mktemp("models")), keys=[KEY]) as server:
        server.http.headers["x-api-key"] = KEY
        yield server


def refused(live: Live, path: str, body: Any, status: int = 400) -> str:
    """Return why a request is refused: in the form of its API, with a sentence."""
    answer = live.post(path, MODEL | body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    sentence: str = error if path.startswith("/api") else error["message"]
    assert sentence.endswith("." if status != 404 else "not found")
    return sentence


# Addresses and paths


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that nobody may connect to."""
    with socket.create_server(("127.0.0.1", 0)) as waiting:
        yield waiting
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting.accept()


def media(kind: str, url: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


@pytest.mark.parametrize("address", ["http://{}/a.png", "HTTPS://{}/a", "//{}/a", "ftp://{}/a"])
def test_no_address_is_fetched(live: Live, listener: socket.socket, address: str) -> None:
    url = address.format(f"127.0.0.1:{listener.getsockname()[1]}")
    chats = [media(kind, url) for kind in ("image_url", "audio_url", "video_url")]
    chats += [
        {"type": "image_url", "image_url": url},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "file", "file": {"file_data": url}},
    ]
    for part in chats:
        refused(live, "/v1/chat/completions", APIS["/v1/chat/completions"]([part]))
    for part in (
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
    ):
        refused(live, "/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    for kind in ("image", "document"):
        part = {"type": kind, "source": {"type": "url", "url": url}}
        refused(live, "/v1/messages", APIS["/v1/messages"]([part]))
    messages = [{"role": "user", "content": "", "images": [url]}]
    refused(live, "/api/chat", {"messages": messages})
    refused(live, "/api/generate", {"prompt": "x", "images": [url]})


@pytest.mark.parametrize(
    "path", ["/etc/hostname", "file:///etc/hostname", "etc/hostname", "~/x.png", "C:\\x.png"]
)
def test_no_path_is_opened(live: Live, path: str) -> None:
    parts = [media("image_url", path), {"type": "image_url", "image_url": path}]
    parts += [{"type": "image", field: path} for field in ("image", "path", "url")]
    parts += [{"type": "audio", "audio": path}, {"type": "video", "video": path}]
    for part in parts:
        sentence = refused(live, "/v1/chat/completions", APIS["/v1/chat/completions"]([part]))
        assert socket.gethostname() not in sentence
    messages = [{"role": "user", "content": "", "images": [path]}]
    refused(live, "/api/chat", {"messages": messages})


# Sizes


@pytest.mark.parametrize("stops", [["x"] * 17, ["x" * 1001]])
def test_stop_texts_are_few_and_short(live: Live, stops: list[str]) -> None:
    fields = {"/v1/chat/completions": "stop", "/v1/messages": "stop_sequences"}
    for path, field in fields.items():
        assert "up to 16" in refused(live, path, APIS[path]("x") | {field: stops})
    assert "up to 16" in refused(live, "/v1/completions", {"prompt": "x", "stop": stops})
    for body in (APIS["/api/chat"]("x"), {"prompt": "x"}):
        path = "/api/chat" if "messages" in body else "/api/generate"
        assert "options.stop" in refused(live, path, body | {"options": {"stop": stops}})


def test_replies_are_few(live: Live) -> None:
    body = APIS["/v1/chat/completions"]("x")
    assert "between 1 and 16" in refused(live, "/v1/chat/completions", body | {"n": 17})
    many = {"prompt": ["x"] * 100, "n": 3}
    assert "up to 256" in refused(live, "/v1/completions", many)


def test_schemas_are_neither_deep_nor_large(live: Live) -> None:
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    large = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(100_000)}}
    for schema in (deep, large):
        function = {"name": "f", "description": "d", "parameters": schema}
        tool = {"type": "function", "function": function}
        flat = {"type": "function", **function}
        for path, given in {
            "/v1/chat/completions": tool,
            "/v1/responses": flat,
            "/v1/messages": {"name": "f", "input_schema": schema},
            "/api/chat": tool,
        }.items():
            refused(live, path, APIS[path]("x") | {"tools": [given]})


def test_json_of_many_values_is_refused_before_it_is_read(live: Live) -> None:
    for inner in (b"1," * 1_000_001 + b"1", b"[" + b"[]," * 600_000 + b"[]]"):
        body = b'{"model": "small", "prompt": [' + inner + b"]}"
        answer = live.http.post("/v1/completions", content=body)
        assert answer.status_code == 413
        assert "values" in answer.json()["error"]["message"]


def test_text_is_counted_up_to_a_length(live: Live) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 500_000}]}
    assert "characters" in refused(live, "/v1/messages/count_tokens", long, 413)
    answer = live.post("/tokenize", {"content": "x" * (5 << 20)})
    assert answer.status_code == 413


def held(live: Live) -> int:
    """The bytes of all bodies, by the middleware that counts them."""
    app: Any = live.server._server.config.app.middleware_stack  # type: ignore[union-attr]
    while not isinstance(app, http.HeldBodies):
        app = app.app
    return app.nbytes


def test_bodies_share_the_memory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_HELD_NBYTES", 1 << 20)
    with live_server(tiny_model(tmp_path_factory.mktemp("models"))) as live:
        body = json.dumps(MODEL | {"prompt": "x", "max_tokens": 1}).encode() + b" " * (900 << 10)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a.local\r\nContent-Length: {len(body)}\r\n"
        with live.connect() as slow:
            slow.sendall(head.encode() + b"Connection: close\r\n\r\n" + body[:-1])
            wait_until(lambda: held(live) == len(body) - 1)
            answer = live.http.post("/v1/completions", content=body[: 200 << 10])
            assert answer.status_code == 503
            assert "memory is full" in answer.json()["error"]["message"]
            slow.sendall(body[-1:])
            assert b" 200 " in slow.makefile("rb").readline()
        wait_until(lambda: held(live) == 0)
        assert live.http.post("/v1/completions", content=body).status_code == 200


# Logs


def test_neither_keys_nor_texts_are_logged(
    live: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = KEY.replace("0", "9")
    for path, body in APIS.items():
        assert live.post(path, MODEL | body(SECRET)).status_code == 200
        bearer = {"Authorization": f"Bearer {wrong}", "x-api-key": ""}
        assert (
            live.post(f"{path}?key={KEY}", MODEL | body(SECRET), headers=bearer).status_code == 401
        )
        refused(live, path, body(SECRET) | {"model": "other"}, 404)
    live.http.get("/status.json")
    with live.connect() as connection:  # no HTTP
        connection.settimeout(PATIENCE)
        connection.sendall(f"{KEY} {SECRET}\r\n\r\n".encode())
        connection.recv(1000)

    def fail(*_: Any) -> Any:
        raise ValueError("of the engine")

    monkeypatch.setattr(Engine, "replies", fail)
    sentence = refused(live, "/v1/chat/completions", APIS["/v1/chat/completions"](SECRET), 500)
    assert "of the engine" not in sentence
    own = [record for record in caplog.records if not record.name.startswith("http")]  # clients
    logged = "\n".join(map(logging.Formatter().format, own))
    assert "of the engine" in logged
    for text in (KEY, wrong, SECRET):
        assert text not in logged
