"""The page's HTTP server: both loopback addresses of one port, a thread per connection."""

import base64
import errno
import hashlib
import os
import socket
import socketserver
import threading
import time
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from webgemma.errors import InputError
from webgemma.web.http import FileRange, RefusalError, Request, Response
from webgemma.web.site import STATIC, Site

# One that other programs do not use: whatever is served at an address later can read all that the
# browser has stored for it.
DEFAULT_PORT = 21434
NEXT_PORTS = range(DEFAULT_PORT + 1, DEFAULT_PORT + 20)
MAX_HEAD_NBYTES = 16 << 10
HEAD_SECONDS = 15.0  # until a request must be complete; how long a connection may stay idle
SEND_SECONDS = 120.0  # without progress: a client may pause, not stall
LINGER_SECONDS = 1.0  # reading on after a malformed request
MAX_CONNECTIONS = 64  # per address; a browser opens 6


def frame_hash() -> str:
    """Return the source that allows the one inline script, of the frame in which Python runs.

    That frame inherits the page's policy, and may load nothing from this server."""
    digest = hashlib.sha256((STATIC / "python_frame.js").read_bytes()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# Workers of data: addresses have an origin of their own, which is what the tool Python needs.
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'self'; script-src 'self' 'wasm-unsafe-eval' {frame_hash()}; "
        "worker-src 'self' data:; "
        "connect-src 'self'; img-src 'self' blob:; media-src blob:; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server:
    """A server of a site on 127.0.0.1 and, where IPv6 is available, on ::1."""

    def __init__(self, site: Site, port: int | None = None) -> None:
        """Listen on `port` (0: any), by default on DEFAULT_PORT or the next free one.

        InputError if the port cannot be used."""
        self._listeners = _listen(site, port)
        self.port = self._listeners[0].port
        self.url = f"http://localhost:{self.port}/?token={site.access.token}"

    def run(self, poll_seconds: float = 0.2) -> None:
        """Serve until an interrupt or `stop`, which is checked every `poll_seconds`."""
        first, *others = self._listeners
        for other in others:
            threading.Thread(target=other.serve_forever, args=(poll_seconds,), daemon=True).start()
        try:
            first.serve_forever(poll_seconds)
        finally:
            for other in others:
                other.shutdown()
            self.close()

    def stop(self) -> None:
        """End `run`, which runs in another thread."""
        self._listeners[0].shutdown()

    def close(self) -> None:
        """Close the port; `run` does so when it ends."""
        for listener in self._listeners:
            listener.server_close()


def _listen(site: Site, port: int | None) -> list["_Listener"]:
    """Return listeners on the first candidate port that is free; InputError if none is."""
    # Default ports before any free one: browsers store a page's data per address and port.
    candidates = [DEFAULT_PORT, *NEXT_PORTS, 0] if port is None else [0] * 5
    for candidate in [port] if port else candidates:
        try:
            return _listen_on(site, candidate)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not port:
                continue
            reason = "it is taken" if error.errno == errno.EADDRINUSE else error.strerror
            raise InputError(
                f"Port {candidate} cannot be used: {reason}. Leave out --port to get a free one."
            ) from None
    raise InputError("No port of this machine is free: end another server and try again.")


def _listen_on(site: Site, port: int) -> list["_Listener"]:
    """Return listeners on a port of both loopback addresses; OSError if either is taken."""
    first = _Listener(socket.AF_INET, "127.0.0.1", port, site)
    try:
        return [first, _Listener(socket.AF_INET6, "::1", first.port, site)]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # another program would receive half of the requests
            first.server_close()
            raise
        return [first]  # no IPv6


class _Listener(socketserver.ThreadingTCPServer):
    """The listening socket of one address, with a limited number of connections."""

    daemon_threads = True
    block_on_close = False  # closing does not wait for downloads
    allow_reuse_address = os.name == "posix"  # elsewhere other programs could share the port
    request_queue_size = 32

    def __init__(self, family: socket.AddressFamily, host: str, port: int, site: Site) -> None:
        self.address_family = family
        self.site = site
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        super().__init__((host, port), _Connection)
        self.port: int = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)
            self._slots.release()

    def server_close(self) -> None:
        super().server_close()
        for connection in tuple(self._open):  # a browser would keep using an idle connection
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    """A connection: requests and responses in turn, until one side closes it."""

    request: socket.socket
    server: _Listener

    def handle(self) -> None:
        self._received = bytearray()
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while self._exchange():
                pass
        except OSError:
            pass  # the client is gone or stalled; a partial response cannot be completed

    def _exchange(self) -> bool:
        """Serve one request; return whether another may follow."""
        try:
            head = self._receive_head()
            if head is None:
                return False
            request = Request.parse(head)
        except RefusalError as refusal:  # the start of the next request is unknown
            response = Response.plain_text(refusal.status, str(refusal))
            self._send("GET", response, keep_alive=False)
            self._linger()
            return False
        try:
            response = self.server.site.respond(request, self.server.port)
        except RefusalError as refusal:
            response = Response.plain_text(refusal.status, str(refusal))
        except OSError as error:
            response = _unreadable(error)
        return self._send(request.method, response, request.keep_alive)

    def _receive_head(self) -> bytes | None:
        """Return everything before the empty line, or None if no other request comes."""
        deadline = time.monotonic() + HEAD_SECONDS
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > MAX_HEAD_NBYTES:
                reason = f"A request may have at most {MAX_HEAD_NBYTES >> 10} KiB."
                raise RefusalError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason)
            try:
                self.request.settimeout(max(0.001, deadline - time.monotonic()))
                data = self.request.recv(MAX_HEAD_NBYTES)
            except TimeoutError:
                if not self._received:
                    return None
                reason = f"The request was not complete within {HEAD_SECONDS:.0f} seconds."
                raise RefusalError(HTTPStatus.REQUEST_TIMEOUT, reason) from None
            if not data:
                return None
            self._received += data
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        return head

    def _send(self, method: str, response: Response, keep_alive: bool) -> bool:
        """Send a response; return whether the connection stays open."""
        self.request.settimeout(SEND_SECONDS)
        body = response.body
        if not isinstance(body, FileRange):
            head = _head(response, len(body), keep_alive)
            self.request.sendall(head if method == "HEAD" else head + body)
            return keep_alive
        try:
            file = open(body.path, "rb")  # noqa: SIM115
        except OSError as error:
            return self._send(method, _unreadable(error), keep_alive)
        with file:
            self.request.sendall(_head(response, body.nbytes, keep_alive))
            if method == "HEAD" or not body.nbytes:
                return keep_alive
            sent = self.request.sendfile(file, body.first, body.nbytes)
        return keep_alive and sent == body.nbytes  # a file that became shorter ends the connection

    def _linger(self) -> None:
        """Read on for a moment: closing with unread bytes would discard the response."""
        self.request.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER_SECONDS
        while (seconds := deadline - time.monotonic()) > 0:
            self.request.settimeout(seconds)
            if not self.request.recv(MAX_HEAD_NBYTES):
                break


def _unreadable(error: OSError) -> Response:
    reason = f"The file at this address cannot be read: {error.strerror}."
    return Response.plain_text(HTTPStatus.INTERNAL_SERVER_ERROR, reason)


def _head(response: Response, nbytes: int, keep_alive: bool) -> bytes:
    """Return status line and headers of a response with a body of `nbytes` bytes."""
    headers = {"Date": formatdate(usegmt=True), **HEADERS, **response.headers}
    if response.status != HTTPStatus.NOT_MODIFIED:
        headers["Content-Length"] = str(nbytes)
    headers["Connection"] = "keep-alive" if keep_alive else "close"
    lines = [f"HTTP/1.1 {response.status.value} {response.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
