"""The server of the page: both loopback addresses of one port, a thread for each connection."""

import errno
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
from webgemma.web.http import Answer, FilePart, RefusalError, Request
from webgemma.web.site import Site

DEFAULT_PORT = 8080
NEXT_PORTS = range(DEFAULT_PORT + 1, DEFAULT_PORT + 20)
HEAD_LIMIT_NBYTES = 16 << 10
HEAD_SECONDS = 15.0  # for a whole request to arrive, and for a kept connection to stay idle
SEND_SECONDS = 120.0  # without a byte taken: a reader may pause, not sleep
LINGER_SECONDS = 1.0
CONNECTIONS_LIMIT = 64  # of each address; a browser has 6

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
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
    """A site on 127.0.0.1 and, where there is IPv6, on ::1."""

    def __init__(self, site: Site, port: int | None = None) -> None:
        """Takes `port` (0: any), or by default 8080 or the next free one; InputError if taken."""
        self._listeners = _listen(site, port)
        self.port = self._listeners[0].port
        self.url = f"http://localhost:{self.port}/"

    def run(self, poll_seconds: float = 0.2) -> None:
        """Serve until `stop`, which is noticed so soon, or an interrupt."""
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
        """End `run` in another thread."""
        self._listeners[0].shutdown()

    def close(self) -> None:
        """Give the port back; `run` does so when it ends."""
        for listener in self._listeners:
            listener.server_close()


def _listen(site: Site, port: int | None) -> list["_Listener"]:
    # Not just any free port: what a page has stored in the browser belongs to its address.
    usual = [DEFAULT_PORT, *NEXT_PORTS, 0] if port is None else [0] * 5
    for candidate in [port] if port else usual:
        try:
            return _listen_on(site, candidate)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not port:
                continue
            taken = "it is taken" if error.errno == errno.EADDRINUSE else error.strerror
            raise InputError(
                f"Port {candidate} cannot be used: {taken}. Leave out --port to get a free one."
            ) from None
    raise InputError("No port of this machine is free.")


def _listen_on(site: Site, port: int) -> list["_Listener"]:
    first = _Listener(socket.AF_INET, "127.0.0.1", port, site)
    try:
        return [first, _Listener(socket.AF_INET6, "::1", first.port, site)]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # another program would answer half the requests
            first.server_close()
            raise
        return [first]  # no IPv6 here


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False  # whoever ends the server does not wait for downloads
    allow_reuse_address = os.name == "posix"  # elsewhere it would share the port with anyone
    request_queue_size = 32

    def __init__(self, family: socket.AddressFamily, host: str, port: int, site: Site) -> None:
        self.address_family = family
        self.site = site
        self._places = threading.BoundedSemaphore(CONNECTIONS_LIMIT)
        self._open: set[socket.socket] = set()
        super().__init__((host, port), _Connection)
        self.port: int = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)
            self._places.release()

    def server_close(self) -> None:
        super().server_close()
        for connection in tuple(self._open):  # or a browser would go on asking over an idle one
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    """Requests and answers one after the other, until someone has had enough."""

    request: socket.socket
    server: _Listener

    def handle(self) -> None:
        self._received = bytearray()
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while self._exchange():
                pass
        except OSError:
            pass  # the other side has gone, or takes nothing; half an answer cannot be mended

    def _exchange(self) -> bool:
        """One request and its answer; whether another may follow."""
        try:
            head = self._receive_head()
            if head is None:
                return False
            request = Request.parse(head)
        except RefusalError as refusal:  # where the next request begins is not known
            self._send("GET", Answer.sentence(refusal.status, str(refusal)), keeps=False)
            self._linger()
            return False
        try:
            answer = self.server.site.answer(request, self.server.port)
        except RefusalError as refusal:
            answer = Answer.sentence(refusal.status, str(refusal))
        except OSError as error:
            answer = _unreadable(error)
        return self._send(request.method, answer, request.keeps_connection)

    def _receive_head(self) -> bytes | None:
        """All before the empty line; None if there is no other request."""
        deadline = time.monotonic() + HEAD_SECONDS
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > HEAD_LIMIT_NBYTES:
                sentence = f"A request of more than {HEAD_LIMIT_NBYTES >> 10} KiB is not read."
                raise RefusalError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, sentence)
            try:
                self.request.settimeout(max(0.001, deadline - time.monotonic()))
                data = self.request.recv(HEAD_LIMIT_NBYTES)
            except TimeoutError:
                if not self._received:
                    return None
                sentence = f"The request did not arrive within {HEAD_SECONDS:.0f} seconds."
                raise RefusalError(HTTPStatus.REQUEST_TIMEOUT, sentence) from None
            if not data:
                return None
            self._received += data
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        return head

    def _send(self, method: str, answer: Answer, keeps: bool) -> bool:
        """Send an answer; whether the connection may go on."""
        self.request.settimeout(SEND_SECONDS)
        body = answer.body
        if not isinstance(body, FilePart):
            head = _head(answer, len(body), keeps)
            self.request.sendall(head if method == "HEAD" else head + body)
            return keeps
        try:
            file = open(body.path, "rb")  # noqa: SIM115
        except OSError as error:
            return self._send(method, _unreadable(error), keeps)
        with file:
            self.request.sendall(_head(answer, body.nbytes, keeps))
            if method == "HEAD" or not body.nbytes:
                return keeps
            sent = self.request.sendfile(file, body.first, body.nbytes)
        return keeps and sent == body.nbytes  # a file that has shrunk ends the connection

    def _linger(self) -> None:
        """Read on for a moment: closing over unread bytes would take the answer back."""
        self.request.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER_SECONDS
        while (seconds := deadline - time.monotonic()) > 0:
            self.request.settimeout(seconds)
            if not self.request.recv(HEAD_LIMIT_NBYTES):
                break


def _unreadable(error: OSError) -> Answer:
    sentence = f"A file for this address cannot be read: {error.strerror}."
    return Answer.sentence(HTTPStatus.INTERNAL_SERVER_ERROR, sentence)


def _head(answer: Answer, nbytes: int, keeps: bool) -> bytes:
    headers = {"Date": formatdate(usegmt=True), **HEADERS, **answer.headers}
    if answer.status != HTTPStatus.NOT_MODIFIED:
        headers["Content-Length"] = str(nbytes)
    headers["Connection"] = "keep-alive" if keeps else "close"
    lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
