"""The routes of the page's server, and the check of which requests it accepts."""

import hashlib
import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from webgemma import __version__
from webgemma.settings import SETTINGS, Setting
from webgemma.web import offline, wheel
from webgemma.web.access import Access
from webgemma.web.catalogue import Catalogue
from webgemma.web.http import Content, RefusalError, Request, Response
from webgemma.web.libraries import library_files, missing_message

STATIC = Path(__file__).parent / "static"
XGRAMMAR = "xgrammar/index.js"  # of the libraries

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


class Site:
    """The page, its libraries, the wheel, and the models of the local Ollama store."""

    def __init__(
        self,
        store: Path | None = None,
        static: Path = STATIC,
        token: str | None = None,
        libraries: Mapping[str, Path] | None = None,
    ) -> None:
        """Serve to those who have the token; by default it is a new one.

        `libraries` are files by their paths below /lib/, by default those that are installed."""
        self.access = Access(token)
        self.catalogue = Catalogue(store)
        self.libraries = library_files() if libraries is None else libraries
        self._static = static
        self._wheel = wheel.Wheel()

    def respond(self, request: Request, port: int) -> Response:
        """Return the response to a request received on `port`; RefusalError or OSError if none."""
        guard(request, port)
        answer = self.access.answer(request, port)
        return answer or self.content(request.segments).respond(request)

    def page_urls(self) -> list[str]:
        """Return the URLs of what the page needs without its server, relative to the page."""
        return offline.page_urls(self._static, self.libraries, wheel.NAME)

    def _about(self) -> dict[str, str | None]:
        has_pyodide = "pyodide/pyodide.mjs" in self.libraries
        return {
            "version": __version__,
            "wheel": f"wheel/{wheel.NAME}",
            "pyodide": "lib/pyodide/" if has_pyodide else None,
            "build": self._build() if has_pyodide else None,
            "xgrammar": f"lib/{XGRAMMAR}" if XGRAMMAR in self.libraries else None,
        }

    def _build(self) -> str:
        """Return an id of the current wheel and Pyodide files."""
        paths = [path for name, path in self.libraries.items() if name.startswith("pyodide/")]
        stats = [path.stat() for path in paths]
        tags = " ".join(f"{stat.st_mtime_ns:x}-{stat.st_size:x}" for stat in stats).encode()
        return hashlib.sha256(self._wheel.data() + tags).hexdigest()[:16]

    def content(self, segments: tuple[str, ...]) -> Content:
        """Return what is served at a path; RefusalError if nothing is."""
        match segments:
            case ():
                return _file(self._static, ("index.html",))
            case ("api", "about"):
                return json_content(self._about())
            case ("api", "offline"):
                return json_content(offline.listing(self.page_urls(), self.content))
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
            case ("lib", *rest):
                path = self.libraries.get("/".join(rest))
                if path is None:
                    reason = missing_message(self.libraries) or "Nothing is at this address."
                    raise RefusalError(HTTPStatus.NOT_FOUND, reason)
                return _file(path.parent, (path.name,))
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
            "label": setting_label(setting),
            "help": setting.help,
            "min": setting.low if math.isfinite(setting.low) else None,
            "max": setting.high if math.isfinite(setting.high) else None,
            "integer": setting.type is int,
            "random": setting.name == "seed",
        }
        for setting in SETTINGS.values()
        if setting.on_page
    ]


def setting_label(setting: Setting) -> str:
    """Return the name of a setting as the page shows it."""
    return setting.name.capitalize().replace("_", " ")


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
