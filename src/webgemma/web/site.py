"""The routes of the page's server, and the check of which requests it accepts."""

import hashlib
import json
import math
import os
from http import HTTPStatus
from pathlib import Path
from typing import Any

from webgemma import __version__
from webgemma.settings import SETTINGS
from webgemma.web import libraries, offline, wheel
from webgemma.web.access import Access
from webgemma.web.catalogue import Catalogue
from webgemma.web.http import Content, RefusalError, Request, Response

STATIC = Path(__file__).parent / "static"
CHECKOUT_PACKAGES = Path(__file__).parents[3] / "node_modules"
CHECKOUT_PYODIDE = CHECKOUT_PACKAGES / "pyodide"
CHECKOUT_XGRAMMAR = CHECKOUT_PACKAGES / "@mlc-ai" / "web-xgrammar" / "lib"

# A fixed table: the operating system's may be wrong, and browsers check the type of modules.
MIME = {
    ".css": "text/css; charset=utf-8",
    ".gguf": "application/octet-stream",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".md": "text/markdown; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".whl": "application/zip",
    ".woff2": "font/woff2",
    ".zip": "application/zip",
}


def default_pyodide() -> Path:
    """Return the folder of Pyodide's files: $WEBGEMMA_PYODIDE, else the checkout's."""
    return _configured("WEBGEMMA_PYODIDE") or CHECKOUT_PYODIDE


def default_xgrammar() -> Path:
    """Return the folder of web-xgrammar's index.js: $WEBGEMMA_XGRAMMAR, else the checkout's."""
    return _configured("WEBGEMMA_XGRAMMAR") or CHECKOUT_XGRAMMAR


def _configured(variable: str) -> Path | None:
    text = os.environ.get(variable, "").strip()
    return Path(text).expanduser() if text else None


class Site:
    """The page, the wheel, Pyodide, web-xgrammar, and the models of the local Ollama store."""

    def __init__(
        self,
        store: Path | None = None,
        pyodide: Path | None = None,
        static: Path = STATIC,
        token: str | None = None,
        xgrammar: Path | None = None,
    ) -> None:
        """Serve to those who have the token; by default it is a new one."""
        self.access = Access(token)
        self.catalogue = Catalogue(store)
        self.pyodide = default_pyodide() if pyodide is None else pyodide
        self.xgrammar = default_xgrammar() if xgrammar is None else xgrammar
        self._static = static
        self._wheel = wheel.Wheel()

    def respond(self, request: Request, port: int) -> Response:
        """Return the response to a request received on `port`; RefusalError or OSError if none."""
        guard(request, port)
        answer = self.access.answer(request, port)
        return answer or self._content(request.segments).respond(request)

    def has_pyodide(self) -> bool:
        """Return whether Pyodide is available to serve."""
        return (self.pyodide / "pyodide.mjs").is_file()

    def _has_xgrammar(self) -> bool:
        return (self.xgrammar / "index.js").is_file()

    def _about(self) -> dict[str, str | None]:
        return {
            "version": __version__,
            "wheel": f"/wheel/{wheel.NAME}",
            "pyodide": "/pyodide/" if self.has_pyodide() else None,
            "build": self._build() if self.has_pyodide() else None,
            "xgrammar": offline.XGRAMMAR_URL if self._has_xgrammar() else None,
        }

    def _build(self) -> str:
        """Return an id of the current wheel and Pyodide files."""
        paths = (self.pyodide / name for name in offline.PYODIDE_FILES)
        stats = [path.stat() for path in paths if path.is_file()]
        tags = " ".join(f"{stat.st_mtime_ns:x}-{stat.st_size:x}" for stat in stats).encode()
        return hashlib.sha256(self._wheel.data() + tags).hexdigest()[:16]

    def _content(self, segments: tuple[str, ...]) -> Content:
        """Return what is served at a path; RefusalError if nothing is."""
        match segments:
            case ():
                return _file(self._static, ("index.html",))
            case ("api", "about"):
                return json_content(self._about())
            case ("api", "offline"):
                urls = offline.page_urls(self._static, self.pyodide, self.xgrammar, wheel.NAME)
                return json_content(offline.listing(urls, self._content))
            case ("api", "settings"):
                return json_content({"settings": page_settings()})
            case ("api", "models"):
                return json_content(self.catalogue.models())
            case ("models", digest):
                return self.catalogue.blob(digest)
            case ("wheel", wheel.NAME):
                data = self._wheel.data()
                return Content(MIME[".whl"], data, len(data), hashlib.sha256(data).hexdigest())
            case ("wheel", _):
                raise RefusalError(
                    HTTPStatus.NOT_FOUND, f"The wheel of this server is {wheel.NAME}."
                )
            case ("pyodide", *rest):
                if not self.has_pyodide():
                    raise RefusalError(HTTPStatus.NOT_FOUND, no_pyodide(self.pyodide))
                return _file(self.pyodide, tuple(rest))
            case ("xgrammar", "index.js"):
                return _file(self.xgrammar, ("index.js",))
            case ("lib", *rest):
                return _library("/".join(rest))
            case ("package", *rest, name) if name.endswith((".js", ".gguf")):
                # The security policy forbids eval of scripts, and the wheel leaves out the model.
                return _file(wheel.PACKAGE, (*rest, name))
            case _:
                return _file(self._static, segments)


def page_settings() -> list[dict[str, Any]]:
    """Return the settings that the page offers, with their ranges."""
    return [
        {
            "name": setting.name,
            "help": setting.help,
            "min": setting.low if math.isfinite(setting.low) else None,
            "max": setting.high if math.isfinite(setting.high) else None,
            "integer": setting.type is int,
            "random": setting.name == "seed",
        }
        for setting in SETTINGS.values()
        if setting.on_page
    ]


def no_pyodide(folder: Path) -> str:
    """Return the message for a folder without Pyodide."""
    return (
        f"Pyodide, which runs Python in the browser, is not in {folder}: run `npm ci` in the "
        "checkout, or set WEBGEMMA_PYODIDE to a folder with pyodide.mjs."
    )


def guard(request: Request, port: int) -> None:
    """Raise RefusalError unless the request comes from this page or from a local program.

    Another site can point its name at this machine (DNS rebinding), but Host then has that name."""
    if request.method not in ("GET", "HEAD"):
        raise RefusalError(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD are accepted.")
    names = ("localhost", "127.0.0.1", "[::1]")
    hosts = {f"{name}:{port}" for name in names} | (set(names) if port == 80 else set())
    host = request.headers.get("host", "").lower()
    if host not in hosts:
        raise RefusalError(
            HTTPStatus.MISDIRECTED_REQUEST,
            f"This server is available only as localhost:{port}, on this machine.",
        )
    if request.headers.get("origin", f"http://{host}").lower() != f"http://{host}":
        raise RefusalError(HTTPStatus.FORBIDDEN, "Other sites may not read from this server.")
    # Set by browsers when another site embeds an image or script of this one; links are allowed.
    site = request.headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none") and request.headers.get("sec-fetch-mode") != "navigate":
        raise RefusalError(HTTPStatus.FORBIDDEN, "Other sites may not use this server.")


def _library(name: str) -> Content:
    """Return a file of a library; RefusalError if it is none of those that the page uses."""
    path = libraries.library_files().get(name)
    if path is None:
        raise RefusalError(HTTPStatus.NOT_FOUND, "Nothing is at this address.")
    return _file(path.parent, (path.name,))


def _file(root: Path, segments: tuple[str, ...]) -> Content:
    """Return a regular file that is below `root` after links are resolved; RefusalError if none."""
    folder = root.resolve()
    try:
        path = folder.joinpath(*segments).resolve()
        hidden = any(not name or name.startswith(".") for name in segments)
        if hidden or not path.is_relative_to(folder) or not path.is_file():
            raise FileNotFoundError
        info = path.stat()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # also invalid file names and circular links
        raise RefusalError(HTTPStatus.NOT_FOUND, "Nothing is at this address.") from None
    mime = MIME.get(path.suffix.lower(), "application/octet-stream")
    return Content(mime, path, info.st_size, f"{info.st_mtime_ns:x}-{info.st_size:x}")


def json_content(value: dict[str, Any]) -> Content:
    """Return a value as JSON, which is not cached."""
    data = json.dumps(value, ensure_ascii=False).encode()
    return Content(MIME[".json"], data, len(data), cache="no-store")
