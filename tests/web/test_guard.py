"""What the page's server refuses: other host names, other sites, path traversal, bad requests."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.store import add_blob, add_model
from web.client import Client, serving

from webgemma.web import server as server_module
from webgemma.web.http import RefusalError, Request
from webgemma.web.site import Site

GGUF = b"GGUF" + bytes(100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site in `site`, and files beside it that must not be served."""
    folder = tmp_path_factory.mktemp("guard")
    (folder / "secret.txt").write_text("secret")
    for name in ("static", "library"):
        root = folder / "site" / name
        root.mkdir(parents=True)
        (root / "index.html").write_text("page")
        (root / "pyodide.mjs").write_text("export {}")
        (root / ".hidden").write_text("secret")
        (root / "sub").mkdir()
        (root / "sub" / "a.txt").write_text("inside")
        (root / "link.txt").symlink_to(folder / "secret.txt")
        (root / "linked").symlink_to(folder)
        (root / "loop.txt").symlink_to(root / "loop.txt")
        (root / "near.txt").symlink_to(root / "sub" / "a.txt")
    (folder / "site" / "static-not").mkdir()
    (folder / "site" / "static-not" / "a.txt").write_text("secret")
    add_model(folder / "store", gguf=GGUF)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    site = folder / "site"
    libraries = {"pyodide/pyodide.mjs": site / "library" / "pyodide.mjs"}
    with serving(Site(folder / "store", site / "static", libraries=libraries)) as client:
        yield client


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("localhost:{port}", True),
        ("LocalHost:{port}", True),
        ("127.0.0.1:{port}", True),
        ("[::1]:{port}", True),
        ("localhost", False),
        ("localhost:1", False),
        ("localhost:{port}0", False),
        ("127.0.0.2:{port}", False),
        ("0.0.0.0:{port}", False),
        ("evil.example:{port}", False),
        ("localhost.evil.example:{port}", False),
        ("evil.localhost:{port}", False),
        ("localhost.:{port}", False),
        ("user@localhost:{port}", False),
        ("localhost:{port}, evil.example", False),
        ("", False),
    ],
)
def test_only_loopback_host_names_are_served(client: Client, host: str, served: bool) -> None:
    for path in ("/", "/api/models", "/lib/pyodide/pyodide.mjs"):
        reply = client.get(path, Host=host.format(port=client.port))
        assert reply.status == (200 if served else 421)
        assert served or reply.text == (
            f"This server is available only as localhost:{client.port}, on this machine.\n"
        )


@pytest.mark.parametrize(
    ("origin", "served"),
    [
        ("http://127.0.0.1:{port}", True),
        ("http://localhost:{port}", False),  # also loopback, but not the origin of this Host
        ("https://127.0.0.1:{port}", False),
        ("http://127.0.0.1", False),
        ("http://127.0.0.1:{port}.evil.example", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_only_the_origin_of_the_host_is_served(client: Client, origin: str, served: bool) -> None:
    reply = client.get("/api/models", Origin=origin.format(port=client.port))
    assert reply.status == (200 if served else 403)


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("same-origin", "cors", 200),
        ("none", "navigate", 200),
        ("cross-site", "navigate", 200),
        ("cross-site", "no-cors", 403),
        ("same-site", "no-cors", 403),
    ],
)
def test_other_sites_may_link_but_not_embed(
    client: Client, site: str, mode: str, status: int
) -> None:
    assert client.get("/", Sec_Fetch_Site=site, Sec_Fetch_Mode=mode).status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "QUERY"])
def test_only_get_and_head_are_accepted(client: Client, method: str) -> None:
    reply = client.get("/", method, Access_Control_Request_Private_Network="true")
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("root", ["", "lib/pyodide/"])
@pytest.mark.parametrize(
    "path",
    [
        *("../secret.txt", "../../secret.txt", "sub/../../../secret.txt", "sub/../index.html"),
        *("%2e%2e/%2e%2e/secret.txt", "%2E%2e/secret.txt", ".%2e/.%2e/secret.txt"),
        *("..%2f..%2fsecret.txt", "..%2F..%2Fsecret.txt", "sub%2fa.txt"),
        *("..\\..\\secret.txt", "..%5c..%5csecret.txt", "sub\\a.txt"),
        *("%252e%252e/%252e%252e/secret.txt", "%c0%ae%c0%ae/secret.txt", "%ff"),
        *("index.html%00", "index.html%00.js", "sub/%0d%0aX: y", "%7f", "%", "%zz", "index.html%2"),
        *("../static-not/a.txt", "%2e%2e/static-not/a.txt"),
        *("link.txt", "linked/secret.txt", "loop.txt"),
        *(".hidden", "./index.html", "sub/./a.txt", "sub//a.txt", "sub/a.txt/", "sub", "sub/"),
        *("//etc/passwd", "/etc/passwd", "C:/Windows/win.ini", "file:///etc/passwd", "~root"),
        *("index.html#x", "x" * 300, "x/" * 3000, "index.html::$DATA", "%EF%BC%8E%EF%BC%8E/x"),
    ],
)
def test_paths_cannot_leave_the_folders(client: Client, root: str, path: str) -> None:
    reply = client.get(f"/{root}{path.replace(' ', '%20')}")
    assert reply.status in (400, 404)
    assert b"secret" not in reply.body
    assert reply.text.endswith(".\n")


def test_links_within_a_folder_are_followed(client: Client) -> None:
    assert client.get("/near.txt").text == "inside"


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1/", "*", "index.html", "?/", "http://evil.example/index.html"]
)
def test_only_origin_form_targets_are_accepted(client: Client, target: str) -> None:
    assert client.get(target).status == 400


def test_paths_are_decoded_once() -> None:
    head = "GET {} HTTP/1.1"
    assert Request.parse(head.format("/a%20b/%2541?x=/../y").encode()).segments == ("a b", "%41")
    for path in ("/..", "/a/%2e%2E", "/./a", "/a%2fb", "/a%5Cb", "/a\\b", "/a%00", "/%e4"):
        with pytest.raises(RefusalError):
            Request.parse(head.format(path).encode())


def test_only_blobs_of_a_manifest_are_served(client: Client, folder: Path) -> None:
    stray = add_blob(folder / "store", b"private")
    assert client.get(f"/models/{stray}").status == 404
    model = json.loads(client.get("/api/models").body)["models"][0]
    digest = model["digest"].removeprefix("sha256:")
    assert client.get(f"/models/sha256%3A{digest.upper()}").body == GGUF
    for name in (
        *(digest, f"md5:{digest}", f"sha256:{digest}0", f"sha256:{digest[:-1]}", "sha256:"),
        *(f"x/../sha256-{digest}", f"..%2fblobs%2fsha256-{digest}", f"sha256-{digest}/", ""),
        *("..%2fmanifests", "%2e%2e/manifests/registry.ollama.ai/library/gemma4/e2b"),
    ):
        assert client.get(f"/models/{name}").status in (400, 404), name


def test_every_response_has_the_security_headers(client: Client) -> None:
    model = json.loads(client.get("/api/models").body)["models"][0]
    replies = [
        *(client.get(path) for path in ("/", "/api/about", "/api/models", "/nowhere", "/%")),
        *(client.get(f"/{model['url']}", Range=header) for header in ("bytes=0-1", "bytes=999-")),
        *(client.get("/", "POST"), client.get("/", Host="evil.example"), client.get("/", "HEAD")),
        client.get("/", If_None_Match="*"),
        client.get("/", Origin="http://evil.example"),
    ]
    statuses = {200, 206, 304, 400, 403, 404, 405, 416, 421}
    assert {reply.status for reply in replies} == statuses
    for reply in replies:
        for name, value in server_module.HEADERS.items():
            assert reply.headers.get_all(name) == [value]
        assert not any(name.lower().startswith("access-control") for name in reply.headers)
        assert "Server" not in reply.headers


def test_the_security_policy_of_the_page() -> None:
    headers = server_module.HEADERS
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    policy = headers["Content-Security-Policy"].split("; ")
    assert f"script-src 'self' 'wasm-unsafe-eval' {server_module.frame_hash()}" in policy
    assert {"default-src 'self'", "worker-src 'self' data:", "connect-src 'self'"} < set(policy)
    assert {"object-src 'none'", "base-uri 'none'", "frame-ancestors 'none'"} < set(policy)
    assert {"img-src 'self' blob:", "media-src blob:"} < set(policy)
    assert "unsafe-inline" not in headers["Content-Security-Policy"]


def raw(client: Client, data: bytes) -> bytes:
    """Send bytes; return all that comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
        connection.sendall(data)
        received = b""
        while data := connection.recv(65536):
            received += data
        return received


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",  # the start of a TLS handshake
        b"GET /\xc3\xbc HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\nOrigin: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody",
        b"GET / HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 4\r\n\r\nbody",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_malformed_requests_end_the_connection(client: Client, request_bytes: bytes) -> None:
    reply = raw(client, request_bytes + b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert reply.count(b"HTTP/1.1 ") == 1
    assert b"Content-Security-Policy: default-src 'self'" in reply


def test_two_host_headers_are_refused(client: Client) -> None:
    host = f"Host: localhost:{client.port}\r\n".encode()
    reply = raw(client, b"GET / HTTP/1.1\r\n" + host + host + b"Connection: close\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 421 ")


def test_endless_headers_are_refused(client: Client) -> None:
    reply = raw(client, b"GET / HTTP/1.1\r\n" + b"X: yyyyyyyy\r\n" * 3000)
    assert reply.startswith(b"HTTP/1.1 431 ")


def test_slow_requests_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
        start = time.monotonic()
        received = b""
        connection.settimeout(0.05)
        for byte in (
            b"GET / HTTP/1.1\r\nX: " + b"y" * 1000
        ):  # each byte is in time, the whole request is not
            try:
                connection.sendall(bytes([byte]))
                received = connection.recv(65536)
                break
            except TimeoutError:
                continue
        assert 0.2 < time.monotonic() - start < 5
    assert received.startswith(b"HTTP/1.1 408 ")


def test_idle_connections_are_closed_without_a_response(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.1)
    assert raw(client, b"") == b""


def test_clients_that_stop_reading_are_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SEND_SECONDS", 0.2)
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(64 << 20)
    with (
        serving(Site(tmp_path, tmp_path)) as client,
        socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection,
    ):
        connection.sendall(
            f"GET /big.bin HTTP/1.1\r\nHost: localhost:{client.port}\r\n"
            f"Cookie: {client.cookie}\r\n\r\n".encode()
        )
        time.sleep(0.6)
        received = 0
        while data := connection.recv(1 << 20):
            received += len(data)
    assert received < 64 << 20


def test_connections_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
    with serving(Site(folder / "store")) as client:
        address = ("127.0.0.1", client.port)
        with socket.create_connection(address), socket.create_connection(address):
            time.sleep(0.2)
            assert raw(client, b"") == b""  # closed at once, not after the idle timeout
        time.sleep(0.2)
        assert client.get("/").status == 200
