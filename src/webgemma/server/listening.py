"""The server on its port, until it is stopped."""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from webgemma.errors import InputError
from webgemma.server.access import check_keys, check_origin, is_loopback
from webgemma.server.ahead import Ahead
from webgemma.server.app import make_app

MakeApp = Callable[..., Any]

DEFAULT_HOST = "localhost"
DEFAULT_PORT = 11434  # Ollama's: its clients need no setting
NEXT_PORTS = range(DEFAULT_PORT + 1, DEFAULT_PORT + 20)
GRACE_SECONDS = 5.0  # that replies have to end by themselves when the server stops
LAST_SECONDS = 1.0  # after that, for what clients are sent about it
MAX_CONNECTIONS = 1024
BACKLOG = 128
HEAD_SECONDS = 15.0  # until a request's head must be complete
STALL_SECONDS = 30.0  # that a client may take nothing of what is written to it


class Server:
    """A server of models, listening."""

    def __init__(
        self,
        source: Any,
        host: str = DEFAULT_HOST,
        port: int | None = None,
        *,
        keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        page: bool = True,
        grace_seconds: float = GRACE_SECONDS,
        make: MakeApp = make_app,
    ) -> None:
        """Listen on `port` (0: any), by default on DEFAULT_PORT or the next free one.

        `page`: whether the chat page is served, too. `make` makes the application from the source
        of its answers, which is a registry of models.
        InputError if that is not possible, or would be open to other machines without a key."""
        check_keys(keys, host)
        allowed = [check_origin(origin) for origin in origins]
        self._sockets = _listen(host, port)
        self.port: int = self._sockets[0].getsockname()[1]
        shown = f"[{host.strip('[]')}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}"
        ahead = Ahead()
        guarded = {"loopback": is_loopback(host), "keys": keys, "origins": allowed}
        app = make(source, **guarded, ahead=ahead, page=page)
        config = uvicorn.Config(
            app,
            http=_Connection,
            access_log=False,
            log_config=None,
            log_level="warning",
            proxy_headers=False,  # nobody but the peer itself says who it is
            server_header=False,
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=round(grace_seconds) + 5,
        )
        self._server = _Uvicorn(config, ahead, grace_seconds)

    @property
    def is_started(self) -> bool:
        """Whether requests are answered by now."""
        return self._server.started

    def run(self) -> None:
        """Serve until `stop`, an interrupt or a SIGTERM, which is raised again at the end."""
        try:
            self._server.run(sockets=self._sockets)
        finally:
            self.close()

    def stop(self) -> None:
        """End `run`, which runs in another thread; replies have some seconds to end."""
        self._server.should_exit = True

    def close(self) -> None:
        """Close the port."""
        for listener in self._sockets:
            listener.close()


class _Connection(H11Protocol):
    """A connection that ends if a request's head does not come, or a client does not read."""

    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        if self._late:
            self._late.cancel()
        self._stop_checking()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._check_later()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._stop_checking()

    def cut(self) -> None:
        """End the connection if the client does not read."""
        if self.flow.write_paused:
            self.transport.abort()

    def _check_later(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stop_checking()
        self._stalled = self.loop.call_later(STALL_SECONDS, self._check, unread)

    def _check(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._check_later()
        else:
            self.transport.abort()  # to close it would wait for the client

    def _stop_checking(self) -> None:
        if self._stalled:
            self._stalled.cancel()
            self._stalled = None

    def _watch(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not is_waiting and self._late:
            self._late.cancel()
            self._late = None


class _Uvicorn(uvicorn.Server):
    """Ends replies that take too long when the server stops, so that their clients get an error."""

    def __init__(self, config: uvicorn.Config, ahead: Ahead, grace_seconds: float) -> None:
        super().__init__(config)
        self._ahead, self._grace_seconds = ahead, grace_seconds

    async def shutdown(self, sockets: Any = None) -> None:
        """Wait for replies, then end them; clients that do not read are not waited for."""
        loop, grace = asyncio.get_running_loop(), self._grace_seconds
        timers = [
            loop.call_later(grace, self._ahead.stop),
            loop.call_later(grace + LAST_SECONDS, self._cut),
        ]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, _Connection):
                connection.cut()


def _listen(host: str, port: int | None) -> list[socket.socket]:
    """Return sockets on the first candidate port that is free."""
    candidates = [DEFAULT_PORT, *NEXT_PORTS, 0] if port is None else [port]
    for candidate in candidates:
        try:
            return _bind(host, candidate)
        except (OSError, UnicodeError) as error:
            number = error.errno if isinstance(error, OSError) else None
            if number == errno.EADDRINUSE and candidate != candidates[-1]:
                continue
            reason = getattr(error, "strerror", None) or "that is no address"
            raise InputError(
                f"The server cannot listen on {host}, port {candidate}: {reason}."
            ) from None
    raise AssertionError("the last candidate is either used or refused")


def _bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets on one port of all addresses of a host."""
    if host.lower() == DEFAULT_HOST:  # some clients try only one of them
        first = _socket(socket.AF_INET, "127.0.0.1", port)
        with suppress(OSError):  # this machine has no IPv6
            return [first, _socket(socket.AF_INET6, "::1", first.getsockname()[1])]
        return [first]
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return [_socket(family, str(address[0]), port)]


def _socket(family: int, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows would share the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made
