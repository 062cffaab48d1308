"""What lies at which address of the page's server, and who may have it."""

import hashlib
import json
import os
from http import HTTPStatus
from pathlib import Path
from typing import Any

from webgemma import __version__
from webgemma.web import offline, wheel
from webgemma.web.catalogue import Catalogue
from webgemma.web.http import Answer, Content, RefusalError, Request

STATIC = Path(__file__).parent / "static"
CHECKOUT_PYODIDE = Path(__file__).parents[3] / "node_modules" / "pyodide"

# Fixed, because the table of the operating system is sometimes wrong, and a module needs its type.
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
    """Where Pyodide's files should be: $WEBGEMMA_PYODIDE, else in the checkout."""
    configured = os.environ.get("WEBGEMMA_PYODIDE", "").strip()
    return Path(configured).expanduser() if configured else CHECKOUT_PYODIDE


class Site:
    """The page, the wheel, Pyodide, and the models of Ollama's store."""

    def __init__(
        self, store: Path | None = None, pyodide: Path | None = None, static: Path = STATIC
    ) -> None:
        self.catalogue = Catalogue(store)
        self.pyodide = default_pyodide() if pyodide is None else pyodide
        self._static = static
        self._wheel = wheel.Wheel()

    def answer(self, request: Request, port: int) -> Answer:
        """The answer to a request that came to `port`; RefusalError and OSError say why not."""
        guard(request, port)
        return self._content(request.segments).answer(request)

    def has_pyodide(self) -> bool:
        """Whether there is a Pyodide to serve."""
        return (self.pyodide / "pyodide.mjs").is_file()

    def _about(self) -> dict[str, str | None]:
        return {
            "version": __version__,
            "wheel": f"/wheel/{wheel.NAME}",
            "pyodide": "/pyodide/" if self.has_pyodide() else None,
            "build": self._build() if self.has_pyodide() else None,
        }

    def _build(self) -> str:
        """Names the wheel and Pyodide as they are now."""
        found = (self.pyodide / name for name in offline.PYODIDE_FILES)
        stats = [path.stat() for path in found if path.is_file()]
        tags = " ".join(f"{stat.st_mtime_ns:x}-{stat.st_size:x}" for stat in stats).encode()
        return hashlib.sha256(self._wheel.data() + tags).hexdigest()[:16]

    def _content(self, segments: tuple[str, ...]) -> Content:
        match segments:
            case ():
                return _file(self._static, ("index.html",))
            case ("api", "about"):
                return _json(self._about())
            case ("api", "offline"):
                urls = offline.addresses(self._static, self.pyodide, wheel.NAME)
                return _json(offline.listing(urls, self._content))
            case ("api", "models"):
                return _json(self.catalogue.models())
            case ("models", digest):
                return self.catalogue.blob(digest)
            case ("wheel", wheel.NAME):
                data = self._wheel.data()
                return Content(MIME[".whl"], data, len(data), hashlib.sha256(data).hexdigest())
            case ("wheel", _):
                raise RefusalError(HTTPStatus.NOT_FOUND, f"The wheel here is {wheel.NAME}.")
            case ("pyodide", *rest):
                if not self.has_pyodide():
                    raise RefusalError(HTTPStatus.NOT_FOUND, no_pyodide(self.pyodide))
                return _file(self.pyodide, tuple(rest))
            case ("package", *rest, name) if name.endswith((".js", ".gguf")):
                # The policy forbids scripts to come as text; the wheel is without the model.
                return _file(wheel.PACKAGE, (*rest, name))
            case _:
                return _file(self._static, segments)


def no_pyodide(folder: Path) -> str:
    """What to do where there is no Pyodide."""
    return (
        f"Pyodide, the Python of the browser, is not in {folder}: run `npm ci` in the checkout, "
        "or set WEBGEMMA_PYODIDE to a folder with pyodide.mjs."
    )


def guard(request: Request, port: int) -> None:
    """Refuse all but our own page and a user's own programs.

    A page elsewhere can make its name point here (DNS rebinding), but then Host has that name."""
    if request.method not in ("GET", "HEAD"):
        raise RefusalError(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD are answered here.")
    names = ("localhost", "127.0.0.1", "[::1]")
    hosts = {f"{name}:{port}" for name in names} | (set(names) if port == 80 else set())
    host = request.headers.get("host", "").lower()
    if host not in hosts:
        raise RefusalError(
            HTTPStatus.MISDIRECTED_REQUEST,
            f"This server answers only as localhost:{port}, on this machine.",
        )
    if request.headers.get("origin", f"http://{host}").lower() != f"http://{host}":
        raise RefusalError(HTTPStatus.FORBIDDEN, "Other pages may not read from this server.")
    # Browsers say so when a foreign page wants a picture or script of ours; a link is all right.
    site = request.headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none") and request.headers.get("sec-fetch-mode") != "navigate":
        raise RefusalError(HTTPStatus.FORBIDDEN, "Other pages may not use this server.")


def _file(root: Path, segments: tuple[str, ...]) -> Content:
    """A plain file below `root`, also after all links are followed."""
    folder = root.resolve()
    try:
        path = folder.joinpath(*segments).resolve()
        hidden = any(not name or name.startswith(".") for name in segments)
        if hidden or not path.is_relative_to(folder) or not path.is_file():
            raise FileNotFoundError
        found = path.stat()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # also names that no file can have, links in circles
        raise RefusalError(HTTPStatus.NOT_FOUND, "There is nothing at this address.") from None
    mime = MIME.get(path.suffix.lower(), "application/octet-stream")
    return Content(mime, path, found.st_size, f"{found.st_mtime_ns:x}-{found.st_size:x}")


def _json(value: dict[str, Any]) -> Content:
    data = json.dumps(value, ensure_ascii=False).encode()
    return Content(MIME[".json"], data, len(data), cache="no-store")
