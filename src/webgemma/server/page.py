"""The chat page of `webgemma web` at `/chat/`, where this server writes the replies.

All of it is read when the server starts: nothing but what is listed then can be requested."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from webgemma import __version__
from webgemma.errors import InputError
from webgemma.models import BUNDLED_PATH
from webgemma.server.http import MAX_BODY_NBYTES, respond_bytes, respond_text
from webgemma.server.offered import DEMO
from webgemma.server.ollama_models import RUNNING
from webgemma.server.protocol import RequestError
from webgemma.web.http import Content, Request
from webgemma.web.libraries import library_files
from webgemma.web.offline import file_names
from webgemma.web.site import MIME, STATIC, json_content, page_settings
from webgemma.web.wheel import PACKAGE

# Of the page in a tab that computes itself: its worker, and what serves it without its server.
LEFT_OUT = (
    "locked.html",
    "python.js",
    "python_frame.js",
    "python_sandbox.js",
    "sw.js",
    "worker.js",
)
LEFT_OUT_LIBRARIES = ("pyodide/", "xgrammar/")
FROM_PACKAGE = ("media/browser.js",)
HOME, SERVER_HOME = 'data-home="tab"', 'data-home="server"'  # by which the page knows who replies

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' blob:; media-src blob:; font-src 'self'; manifest-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Page:
    """The routes of the page; they hold nothing secret, and need no key."""

    def __init__(self) -> None:
        names = [name for name in file_names(STATIC, "*") if name not in LEFT_OUT]
        paths = {name: STATIC / name for name in names}
        paths |= {
            f"lib/{name}": path
            for name, path in library_files().items()
            if not name.startswith(LEFT_OUT_LIBRARIES)
        }
        paths |= {f"package/{name}": PACKAGE / name for name in FROM_PACKAGE}
        self._contents = {name: _content(path) for name, path in paths.items()}
        self._contents[""] = self._contents.pop("index.html")
        bundled = {"name": DEMO, "nbytes": BUNDLED_PATH.stat().st_size}
        about = {"version": __version__, "max_body_nbytes": MAX_BODY_NBYTES, "bundled": bundled}
        self._contents["api/about"] = json_content(about)
        self._contents["api/settings"] = json_content({"settings": page_settings()})

    def routes(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """Return the endpoints by their paths."""
        return {"/": self.root, "/chat": self.redirect, "/chat/{name:path}": self.content}

    async def root(self, request: Any) -> Any:
        """Lead browsers to the page; answer programs as Ollama does."""
        if "text/html" in request.headers.get("accept", ""):
            return await self.redirect(request)
        return respond_text(RUNNING, headers={"Vary": "Accept"})

    async def redirect(self, _: Any) -> Any:
        """Lead to the page's folder, to which its own addresses are relative."""
        headers = {"Location": "chat/", "Cache-Control": "no-store", "Vary": "Accept"}
        return respond_bytes(b"", 303, headers)

    async def content(self, request: Any) -> Any:
        """Return a file of the page, or that the browser has this version."""
        content = self._contents.get(request.path_params["name"])
        if content is None:
            raise RequestError("Nothing of the page is at this address.", 404)
        answer = content.respond(Request(request.method, (), dict(request.headers), True))
        assert isinstance(answer.body, bytes)
        return respond_bytes(answer.body, answer.status, {**HEADERS, **answer.headers})


def _content(path: Path) -> Content:
    """Return a file, which browsers keep and ask about before each use."""
    data = path.read_bytes()
    if path.name == "index.html":
        text = data.decode()
        if text.count(HOME) != 1:
            raise InputError(f"{path} is not the page of this version: install webgemma again.")
        data = text.replace(HOME, SERVER_HOME).encode()
    tag = hashlib.sha256(data).hexdigest()[:32]
    return Content(MIME.get(path.suffix, "application/octet-stream"), data, len(data), tag)
