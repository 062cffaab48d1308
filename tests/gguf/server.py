"""A web server for tests whose answers can be made late, wrong or missing."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class Site:
    """The files of the server, its faults for the next requests, and a record of requests."""

    files: dict[str, bytes]
    faults: list[str] = field(default_factory=list)  # one per request; "" is a correct answer
    ranges: list[tuple[int, int]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    connections: int = 0
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    """Serves ranges over persistent connections, and faults by name."""

    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def setup(self) -> None:
        super().setup()
        self.site.connections += 1

    def do_GET(self) -> None:
        site = self.site
        site.paths.append(self.path)
        fault, _, argument = (site.faults.pop(0) if site.faults else "").partition(":")
        data = site.files.get(unquote(self.path.partition("?")[0]))
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        first, end = int(span[1]), int(span[2]) + 1
        site.ranges.append((first, end))
        if fault == "status":
            self.answer(int(argument), b"", {"Retry-After": "0"})
        elif fault == "redirect":
            self.answer(302, b"", {"Location": argument})
        elif data is None:
            self.answer(404, b"")
        elif fault == "whole":
            self.answer(200, data)
        elif fault == "whole-cut":
            self.answer(200, data[:1000], length=len(data))
            self.close_connection = True
        elif fault == "endless":
            self.answer(200, data, {"Transfer-Encoding": "chunked"})
        elif fault == "stall":
            self.part(data, first, end, sent=int(argument), then_seconds=0.5)
        elif fault == "hang-up":
            self.close_connection = True
        elif fault == "cut":
            self.part(data, first, end, sent=int(argument))
        else:
            self.part(data, first, end, fault=fault)

    def part(
        self,
        data: bytes,
        first: int,
        end: int,
        sent: int | None = None,
        then_seconds: float = 0.0,
        fault: str = "",
    ) -> None:
        end = min(end, len(data))
        if fault == "half":
            end = (first + end + 1) // 2
        total = len(data) + (fault == "grown")
        first += fault == "shifted"
        headers = {
            "Content-Range": f"bytes {first}-{end - 1}/{total}",
            "ETag": '"new"' if fault == "other-tag" else '"old"',
        }
        if fault == "no-content-range":
            del headers["Content-Range"]
        if fault == "compressed":
            headers["Content-Encoding"] = "gzip"
        body = data[first:end]
        self.answer(206, body[:sent], headers, length=len(body) + (fault == "long"))
        if sent is not None or fault == "long":
            self.wfile.flush()
            time.sleep(then_seconds)
            self.close_connection = True

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int = -1
    ) -> None:
        headers = headers or {}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Transfer-Encoding" in headers:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            self.send_header("Content-Length", str(len(body) if length < 0 else length))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """A server that ignores clients closing their connections."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Report nothing."""


@contextmanager
def serve(files: dict[str, bytes], *faults: str) -> Iterator[Site]:
    """Run a server on a free port of this machine."""
    site = Site(files, list(faults))
    handler = type("SiteHandler", (Handler,), {"site": site})
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
