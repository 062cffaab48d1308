"""The page's server in a thread, and requests exactly as they are written."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from webgemma.web.server import Server
from webgemma.web.site import Site


@dataclass(frozen=True)
class Reply:
    """An answer, read to its end."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Client:
    """Asks one server; `path` goes out as it is."""

    port: int

    def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        """Ask with headers of names such as `If_Range`; Host is ours unless it is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.putrequest(
                method, path, skip_host="Host" in headers, skip_accept_encoding=True
            )
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()


@contextmanager
def serving(site: Site, port: int = 0) -> Iterator[Client]:
    """Run a server, on a free port unless one is given."""
    server = Server(site, port)
    thread = threading.Thread(target=server.run, args=(0.01,))
    thread.start()
    try:
        yield Client(server.port)
    finally:
        server.stop()
        thread.join()
