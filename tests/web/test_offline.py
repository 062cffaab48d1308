"""The page without its server: what is cached, when it is refreshed, what is never cached."""

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf
from web.client import Client, serving
from web.page import Visitor, page_site

from webgemma.web.http import Request, Response
from webgemma.web.site import STATIC, Site
from webgemma.web.tab import BUNDLED_URL


def offline(client: Client) -> dict[str, Any]:
    reply = client.get("/api/offline")
    assert reply.headers["Cache-Control"] == "no-store"
    listing: dict[str, Any] = json.loads(reply.body)
    return listing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of a library, and no models."""
    (tmp_path / "library.mjs").write_text("export {}")
    return tmp_path


def test_all_files_of_the_page_are_listed_and_served(folder: Path) -> None:
    names = ["pyodide/pyodide.mjs", "pyodide/pyodide.asm.wasm", "xgrammar/index.js"]
    libraries = dict.fromkeys(names, folder / "library.mjs")
    with serving(Site(folder, libraries=libraries)) as client:
        files = offline(client)["files"]
        about = json.loads(client.get("/api/about").body)
        assert {client.get("/" + file.removeprefix("./")).status for file in files} == {200}
    assert {"./", "api/about", about["wheel"], "package/device/replay.js"} < set(files)
    assert BUNDLED_URL in files
    assert about["xgrammar"] in files
    assert [file for file in files if file.startswith("lib/")] == [f"lib/{n}" for n in names]
    scripts = {str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()}
    assert scripts - set(files) == {"index.html", "locked.html", "sw.js"}
    assert len(files) == len(set(files))
    linked = re.findall(r'(?:href|src)="([^"#.][^"]*)"', (STATIC / "index.html").read_text())
    assert set(linked) <= set(files)


def test_only_served_files_are_listed(folder: Path) -> None:
    static = folder / "static"
    (static / "ü b").mkdir(parents=True)
    (static / "index.html").write_text("page")
    (static / "ü b" / "c.js").write_text("deep")
    (static / ".hidden").write_text("secret")
    (static / "link.txt").symlink_to(folder / "library.mjs")
    libraries = {"gone/index.mjs": folder / "gone.mjs"}
    with serving(Site(folder, static, libraries=libraries)) as client:
        files = offline(client)["files"]
        assert client.get("/%C3%BC%20b/c.js").text == "deep"
    assert "%C3%BC%20b/c.js" in files
    assert not [file for file in files if "hidden" in file or "link" in file or "gone" in file]


@pytest.mark.parametrize("changed", ["static/page.js", "library.mjs", "static/new.js"])
def test_any_change_changes_the_version(folder: Path, changed: str) -> None:
    page_site(folder)
    libraries = {"pyodide/pyodide.mjs": folder / "library.mjs"}
    site = Site(folder, folder / "static", libraries=libraries)
    with serving(site) as client:
        before = offline(client)
        assert offline(client) == before
        (folder / changed).write_text("changed")
        after = offline(client)
    assert after["version"] != before["version"]


def test_the_manifest_makes_the_page_installable() -> None:
    manifest = json.loads((STATIC / "manifest.webmanifest").read_text())
    assert manifest["name"] == "webgemma"
    # Relative to where the page is: "/" of `webgemma web`, by which installed ones are known.
    assert "id" not in manifest
    assert (manifest["start_url"], manifest["scope"]) == ("./", "./")
    assert manifest["display"] == "standalone"
    sizes = set()
    for icon in manifest["icons"]:
        data = (STATIC / icon["src"]).read_bytes()
        if icon["type"] == "image/png":
            width, height = struct.unpack(">II", data[16:24])
            assert icon["sizes"] == f"{width}x{height}"
            sizes.add(width)
    assert sizes == {192, 512}


@dataclass
class CachedVisit:
    """A visitor whose browser has cached the page; the server at its address has ended."""

    visitor: Visitor
    site: Site
    static: Path
    port: int

    def caches(self) -> list[str]:
        names = self.visitor.page.evaluate("caches.keys()")
        return [name for name in names if name.startswith("webgemma-page-")]

    def wait_for_version(self, client: Client) -> None:
        """Wait until the server's version is the only cached one."""
        expected = [f"webgemma-page-{offline(client)['version']}"]
        deadline = time.monotonic() + 10
        while self.caches() != expected:
            assert time.monotonic() < deadline, (self.caches(), expected)
            self.visitor.page.wait_for_timeout(20)


class RecordingSite(Site):
    """A site that records the requested paths."""

    def respond(self, request: Request, port: int) -> Response:
        self.requested.append("/" + "/".join(request.segments))
        return super().respond(request, port)

    requested: list[str]


@pytest.fixture
def cached(context: Any, tmp_path: Path) -> Iterator[CachedVisit]:
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    add_model(tmp_path / "store", "gemma4:e2b", gguf=tiny_gguf(KINDS["small"]))
    plain = page_site(tmp_path)
    site = RecordingSite(tmp_path / "store", tmp_path / "static", libraries=plain.libraries)
    site.requested = []
    with serving(site) as client:
        visitor = Visitor(context, f"http://localhost:{client.port}/")
        visitor.open()
        visitor.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
    yield CachedVisit(visitor, site, tmp_path / "static", client.port)
    unexpected = [e for e in visitor.errors if "Failed to load resource" not in e]
    assert unexpected == []


needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


@needs_chromium
def test_a_visit_without_the_server(cached: CachedVisit) -> None:
    visitor = cached.visitor
    visitor.open()
    assert visitor.ask("hello") == "You said hello."
    assert visitor.page.evaluate("crossOriginIsolated")
    visitor.open()
    assert visitor.texts(".user .body") == ["hello"]
    visitor.page.goto(f"{visitor.url}?from=home")
    visitor.page.locator("#model-name", has_text="Bundled model").wait_for()
    assert visitor.page.locator("#version").inner_text().startswith("webgemma ")
    visitor.button("Model: Bundled model").click()
    state = visitor.page.locator("#ollama-state", has_text="not available")
    state.wait_for()
    assert "work without it" in state.inner_text()
    assert visitor.texts(".model .name") == ["Bundled model"]


@needs_chromium
def test_chromium_finds_it_installable(cached: CachedVisit) -> None:
    session = cached.visitor.page.context.new_cdp_session(cached.visitor.page)
    with serving(cached.site, cached.port):
        cached.visitor.open()
        errors = session.send("Page.getInstallabilityErrors")["installabilityErrors"]
    # The profile of a test counts as incognito, in which nothing can be installed.
    assert [error["errorId"] for error in errors] in ([], ["in-incognito"])


@needs_chromium
def test_the_page_is_cached_only_after_the_model_is_loaded(cached: CachedVisit) -> None:
    requested = cached.site.requested  # type: ignore[attr-defined]
    assert requested.count("/page.js") == 2
    first = requested.index("/api/offline")
    assert {"/", "/page.js", "/worker.js"} <= set(requested[:first])
    assert "/wheel/" not in " ".join(requested[:first])


@needs_chromium
def test_a_newer_page_is_shown_at_once_and_then_cached(cached: CachedVisit) -> None:
    visitor = cached.visitor
    before = cached.caches()
    index = cached.static / "index.html"
    index.write_text(index.read_text().replace("Gemma 4, in this tab", "A newer page"))
    with serving(cached.site, cached.port) as client:
        visitor.open()
        assert visitor.texts("#welcome h2.tab-only") == ["A newer page"]
        cached.wait_for_version(client)
        assert cached.caches() != before
    visitor.open()
    assert visitor.texts("#welcome h2.tab-only") == ["A newer page"]


@needs_chromium
def test_unchanged_files_are_not_requested_again(cached: CachedVisit) -> None:
    with serving(cached.site, cached.port):
        requested = cached.site.requested  # type: ignore[attr-defined]
        requested.clear()
        cached.visitor.open()
        assert cached.visitor.ask("hi") == "You said hi."
    assert set(requested) <= {"/api/offline", "/sw.js"}


@needs_chromium
def test_models_and_ranges_bypass_the_cache(cached: CachedVisit) -> None:
    visitor = cached.visitor
    with serving(cached.site, cached.port):
        visitor.open()
        assert visitor.page.evaluate("navigator.serviceWorker.controller !== null")
        statuses = visitor.page.evaluate(
            """async () => {
              const [{ url }] = (await (await fetch("/api/models")).json()).models;
              const range = { headers: { Range: "bytes=0-3" } };
              const model = await fetch(url, range);
              const page = await fetch("/", range);
              return [model.status, await model.text(), page.status];
            }"""
        )
        assert statuses == [206, "GGUF", 206]
    paths = visitor.page.evaluate(
        """async () => {
          const opened = await Promise.all((await caches.keys()).map((name) => caches.open(name)));
          const requests = await Promise.all(opened.map((cache) => cache.keys()));
          return requests.flat().map(({ url }) => new URL(url).pathname);
        }"""
    )
    assert "/page.js" in paths
    assert not [path for path in paths if path.startswith(("/models/", "/api/models"))]


@contextmanager
def another_program(port: int) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<title>another program</title>" if self.path == "/" else b"not here"
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("localhost", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@needs_chromium
def test_another_program_at_the_address_shows_its_own_page(cached: CachedVisit) -> None:
    with another_program(cached.port):
        cached.visitor.page.goto(cached.visitor.url)
        assert cached.visitor.page.title() == "another program"


@needs_chromium
def test_an_unresponsive_server_is_not_waited_for(cached: CachedVisit) -> None:
    with socket.socket() as unresponsive:
        unresponsive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unresponsive.bind(("127.0.0.1", cached.port))
        unresponsive.listen()
        cached.visitor.open()
        assert cached.visitor.ask("hello") == "You said hello."
