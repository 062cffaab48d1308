"""The server and its command: connections, ports, disconnects, large files, Ctrl-C."""

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from helpers.store import IMAGE, add_manifest
from web.client import serving

from webgemma.errors import InputError
from webgemma.web import server as server_module
from webgemma.web.http import FileRange, Response
from webgemma.web.server import DEFAULT_PORT, Server
from webgemma.web.site import Site

DIGEST = "sha256:" + "ab" * 32
BIG_NBYTES = (1 << 30) + 12345


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one model of 1 GiB in a sparse file."""
    blob = tmp_path / "blobs" / DIGEST.replace(":", "-")
    blob.parent.mkdir()
    with open(blob, "wb") as file:
        file.truncate(BIG_NBYTES)
        file.seek(BIG_NBYTES - 4)
        file.write(b"last")
    layer = {"mediaType": IMAGE + "model", "digest": DIGEST, "size": BIG_NBYTES}
    add_manifest(tmp_path, "gemma4:big", {"config": {}, "layers": [layer]})
    return tmp_path


def test_a_connection_serves_many_requests(store: Path) -> None:
    with serving(Site(store)) as client:
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)
        connection.connect()
        sock, cookie = connection.sock, {"Cookie": client.cookie}
        for path, status in (("/", 200), ("/nowhere", 404), ("/api/models", 200), ("/", 200)):
            connection.request("GET", path, headers=cookie)
            response = connection.getresponse()
            response.read()
            assert response.status == status
            assert connection.sock is sock
        connection.request("GET", "/", headers={**cookie, "Connection": "close"})
        response = connection.getresponse()
        response.read()
        assert connection.sock is None
        connection.close()


def test_pipelined_requests_are_answered_in_order(store: Path) -> None:
    with serving(Site(store)) as client:
        host = f"Host: localhost:{client.port}\r\nCookie: {client.cookie}\r\n"
        with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
            connection.sendall(
                f"HEAD / HTTP/1.1\r\n{host}\r\nHEAD /absent HTTP/1.0\r\n{host}\r\n".encode()
            )
            received = b""
            while data := connection.recv(65536):
                received += data
    assert received.index(b"HTTP/1.1 200 ") < received.index(b"HTTP/1.1 404 ")


def test_a_gigabyte_streams_without_filling_memory(store: Path) -> None:
    with serving(Site(store)) as client:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)
        connection.request("GET", f"/models/{DIGEST}", headers={"Cookie": client.cookie})
        response = connection.getresponse()
        buffer, received = bytearray(1 << 20), 0
        while count := response.readinto(buffer):
            received += count
            end = bytes(buffer[:count][-4:])
        connection.close()
        assert (received, end) == (BIG_NBYTES, b"last")
        assert client.get(f"/models/{DIGEST}", Range="bytes=-4").body == b"last"
        assert client.get(f"/models/{DIGEST}", Range=f"bytes={1 << 30}-").status == 206
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 << 10


def test_disconnected_clients_cause_no_output(
    store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(Site(store)) as client:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
                head = f"GET /models/{DIGEST} HTTP/1.1\r\nHost: localhost:{client.port}\r\n"
                connection.sendall(f"{head}Cookie: {client.cookie}\r\n\r\n".encode())
                connection.recv(1000)
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(b"GET / HT")
        assert client.get("/").status == 200
    assert capfd.readouterr().err == ""


class OneFile(Site):
    """A site that responds to every request with one range of a file."""

    def __init__(self, file_range: FileRange) -> None:
        self.file_range = file_range

    def respond(self, *_: object) -> Response:
        return Response(HTTPStatus.OK, {}, self.file_range)


def test_a_deleted_file_is_a_server_error(tmp_path: Path) -> None:
    with serving(OneFile(FileRange(tmp_path / "gone", 0, 5))) as client:
        reply = client.get("/")
    assert reply.status == 500
    assert reply.text == "The file at this address cannot be read: No such file or directory.\n"


def test_a_file_that_became_shorter_ends_the_connection(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    with (
        serving(OneFile(FileRange(tmp_path / "short", 1, 5))) as client,
        pytest.raises(http.client.IncompleteRead) as cut,
    ):
        client.get("/")
    assert cut.value.partial == b"bc"


def test_stopping_the_server_closes_its_connections(store: Path) -> None:
    with serving(Site(store)) as client:
        idle = http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)
        idle.request("GET", "/", headers={"Cookie": client.cookie})
        assert idle.getresponse().read()
    assert idle.sock.recv(1) == b""
    idle.close()


def test_it_listens_on_both_loopback_addresses_only(store: Path) -> None:
    with serving(Site(store)) as client:
        if has_ipv6():
            connection = http.client.HTTPConnection("::1", client.port, timeout=10)
            connection.request("GET", "/", headers={"Cookie": client.cookie})
            assert connection.getresponse().status == 200
            connection.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", client.port), timeout=10)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextmanager
def taken(host: str = "127.0.0.1") -> Iterator[int]:
    """A port on which another socket listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as other:
        other.bind((host, 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", *(["::1"] if has_ipv6() else [])])
def test_a_requested_port_that_is_taken_is_an_error(store: Path, host: str) -> None:
    with taken(host) as port, pytest.raises(InputError, match=f"Port {port} .* taken"):
        Server(Site(store), port)


def test_the_next_port_is_used_if_the_default_is_taken(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken() as first, taken() as second:
        monkeypatch.setattr(server_module, "DEFAULT_PORT", first)
        monkeypatch.setattr(server_module, "NEXT_PORTS", [second])
        server = Server(Site(store, token="secret"))
        assert server.port not in (0, first, second)
        assert server.url == f"http://localhost:{server.port}/?token=secret"
        server.close()


@contextmanager
def command(store: Path, *args: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "webgemma", "web", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OLLAMA_MODELS": str(store),
            "XDG_STATE_HOME": str(store / "state"),
            "NO_COLOR": "1",
            **env,
        },
        # Background jobs of a shell ignore interrupts, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_the_command_even_during_a_download(store: Path) -> None:
    with command(store, "--port", "0", "--no-open", "--json") as process:
        assert process.stdout
        url = urlsplit(json.loads(process.stdout.readline())["url"])
        port = url.port or 0
        idle = socket.create_connection(("127.0.0.1", port), timeout=10)
        download = http.client.HTTPConnection("localhost", port, timeout=10)
        download.request("GET", f"/models/{DIGEST}?{url.query}")
        assert download.getresponse().read(4) == bytes(4)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=5)
        idle.close()
        download.close()
    assert (process.returncode, out, err) == (0, "", "stopped\n")


def test_the_command_reports_a_taken_port(store: Path) -> None:
    with taken() as port, command(store, "--port", str(port), "--no-open") as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (1, "")
    assert err == (
        f"error: Port {port} cannot be used: it is taken. Leave out --port to get a free one.\n"
    )


def test_the_command_opens_the_browser_and_prints_the_address(store: Path, tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}.new\nmv {opened}.new {opened}\n')
    browser.chmod(0o755)
    with command(store, "--port", "0", BROWSER=f"{browser} %s") as process:
        assert process.stdout
        line = process.stdout.readline()
        deadline = time.monotonic() + 10
        while not opened.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=5)
    url = line.removeprefix("webgemma is at ").removesuffix(" · Ctrl-C stops it\n")
    assert urlsplit(url).query.startswith("token=")
    # All users see the arguments of a browser: they name a file that only this user can read.
    page = Path(unquote(urlsplit(opened.read_text()).path))
    assert url in page.read_text()
    assert (page.stat().st_mode & 0o777, page.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert process.returncode == 0
    assert err.splitlines()[-1] == "stopped"


def test_the_command_reports_another_port_than_the_default(store: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # another program has it already
            other.bind(("127.0.0.1", DEFAULT_PORT))
            other.listen()
        with command(store, "--no-open") as process:
            assert process.stdout
            line = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=5)
    port = line.removeprefix("webgemma is at http://localhost:").partition("/")[0]
    assert int(port) != DEFAULT_PORT
    assert err.startswith(f"note: Port {DEFAULT_PORT} is in use, so this is {port}. ")
    assert process.returncode == 0
