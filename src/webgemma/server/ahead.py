"""Streams that run ahead of their readers: the model never waits for a slow client."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from webgemma.server.protocol import RequestError

MAX_AHEAD = 1 << 14  # items that a reader has not taken yet

T = TypeVar("T")


class Ahead:
    """Runs streams in tasks of their own."""

    def __init__(self, most: int = MAX_AHEAD) -> None:
        self._most = most
        self._writers: set[asyncio.Task[None]] = set()

    async def iterate(self, stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield the items of a stream, which is at most so many ahead: then it ends, and this with
        a RequestError. Closing this, or cancelling who awaits it, ends the stream."""
        queue = _Queue[T](self._most + 1)  # one more for how it ended
        writer = asyncio.create_task(queue.fill(stream))
        self._writers.add(writer)
        try:
            while (item := await queue.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
                await asyncio.sleep(0)  # a reader that catches up lets others run, and can be ended
        finally:
            writer.cancel()
            await asyncio.wait([writer])
            self._writers.discard(writer)

    def stop(self) -> None:
        """End all streams; their readers get a RequestError that says why."""
        for writer in self._writers:
            writer.cancel()


class _Queue(Generic[T]):
    """What a stream has written: its items, then None or an error."""

    def __init__(self, size: int) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue(size)

    async def fill(self, stream: AsyncGenerator[T, None]) -> None:
        """Take all items of a stream."""
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    if self.items.qsize() + 1 == self.items.maxsize:
                        raise RequestError("This client reads too slowly; the reply ends.", 408)
                    self.items.put_nowait(item)
        except asyncio.CancelledError:  # by `stop`, if anyone still reads
            end = RequestError("The server is stopping; send the request again later.", 503)
        except Exception as error:
            end = error
        self.items.put_nowait(end)
