"""A small web server for the pages of the tests."""

import mimetypes
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "page"
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}
mimetypes.add_type("application/wasm", ".wasm")
mimetypes.add_type("text/javascript", ".mjs")


@contextmanager
def serving(
    files: Mapping[str, bytes | Path], headers: Mapping[str, str] = HEADERS
) -> Iterator[str]:
    """Serve these files and the page folder; the value is the origin.

    Files whose name starts with `whole-` are served without support for ranges."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.partition("?")[0].removeprefix("/")
            file = files.get(name, PAGE / name if name in PAGES else None)
            data = file.read_bytes() if isinstance(file, Path) else file
            byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if data is not None and byte_range and not name.startswith("whole-"):
                total, first = len(data), int(byte_range[1])
                data = data[first : int(byte_range[2]) + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{total}")
            else:
                self.send_response(404 if data is None else 200)
            self.send_header("Content-Type", mimetypes.guess_type(name)[0] or "text/plain")
            self.send_header("Content-Length", str(len(data or b"")))
            for header, value in headers.items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            pass

    with _running(Handler) as origin:
        yield origin


@contextmanager
def folder_server(folder: Path) -> Iterator[str]:
    """Serve a folder as `python -m http.server` does, without ranges; the value is the origin."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with _running(partial(Handler, directory=str(folder))) as origin:
        yield origin


@contextmanager
def _running(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


PAGES = {path.name for path in PAGE.iterdir()}
