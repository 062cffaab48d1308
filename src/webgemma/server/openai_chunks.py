"""Streams of chunks, as Chat Completions and Completions have them: choices, then the usage."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from webgemma.server.openai_common import Event, error_body, usage
from webgemma.server.protocol import Reply, Request, RequestError


class ChunkStream(ABC):
    """The chunks of `count` replies, each with one that ends it; `DONE` follows the last."""

    def __init__(
        self, request: Request, kind: str, count: int, *, id: str, created: int, model: str
    ) -> None:
        self.request = request
        self.head = {"id": id, "object": kind, "created": created, "model": model or request.model}
        self.replies = [Reply() for _ in range(count)]
        self._ended = [False] * count

    def end(self) -> Iterator[Event]:
        """Yield the last chunks: of choices that had no tokens, and the usage if it is wanted."""
        for index, ended in enumerate(self._ended):
            if not ended:
                yield self._last(index)
        if self.request.own["include_usage"]:
            yield self.head | {"choices": [], "usage": usage(self.request, self.replies)}

    def error(self, error: RequestError) -> Iterator[Event]:
        """Yield what says that the answer cannot be continued."""
        yield error_body(error)

    def _last(self, index: int) -> Event:
        self._ended[index] = True
        return self._end_of(index)

    @abstractmethod
    def _end_of(self, index: int) -> Event:
        """Return the chunk that says why a choice ended."""

    def _with_head(self, choice: Event) -> Event:
        """Return the chunk of a choice; all chunks have a usage if the last one has."""
        has_usage = {"usage": None} if self.request.own["include_usage"] else {}
        return self.head | {"choices": [choice]} | has_usage
