"""The page's server in a thread, and a client whose requests are sent as written."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from webgemma.web.access import Access
from webgemma.web.server import Server
from webgemma.web.site import Site

ACCESS = Access()  # of all servers of the tests


@dataclass(frozen=True)
class Reply:
    """A complete response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Client:
    """A client of one server, which sends paths unchanged."""

    port: int

    @property
    def cookie(self) -> str:
        """The Cookie header of those who have opened the address with the token."""
        return "=".join(ACCESS.cookie(self.port))

    def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        """Send a request; headers are named like `If_Range`.

        Host and Cookie are the server's by default."""
        headers = {"Cookie": self.cookie, **headers}
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
    """Run a server of a site, on a free port by default; the value is a client of it."""
    site.access = ACCESS
    server = Server(site, port)
    thread = threading.Thread(target=server.run, args=(0.01,))
    thread.start()
    try:
        yield Client(server.port)
    finally:
        server.stop()
        thread.join()
