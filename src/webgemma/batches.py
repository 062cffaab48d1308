"""Batches: many prompts, whose replies are written side by side and come as they finish.

One coroutine reads all of them in turn: whoever waits for a token takes a step for all, so that it
needs neither threads nor tasks, and is the same for both faces of a method."""

from collections import deque
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any

from webgemma.errors import WebgemmaError
from webgemma.replies import Piece, Usage
from webgemma.sync import Aside, Deferred, Detached, Worker, current_turn
from webgemma.text.parser import ToolCall
from webgemma.turns import Turn


@dataclass(frozen=True, slots=True)
class BatchReply:
    """A whole reply of a batch: its content, thinking and tool calls, and the pieces it came in."""

    content: str
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    finish: str  # "stop" or "length"; empty if there is not one token
    usage: Usage | None  # as of the last piece
    pieces: tuple[Piece, ...]  # one for each token

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "BatchReply":
        """Put a reply together."""
        tokens = tuple(piece for piece in pieces if piece.token >= 0)
        return cls(
            "".join(piece.text for piece in tokens),
            "".join(piece.thinking for piece in tokens),
            tuple(call for piece in tokens for call in piece.tool_calls),
            tokens[-1].finish if tokens else "",
            tokens[-1].usage if tokens else None,
            tokens,
        )


Outcome = tuple[int, BatchReply | WebgemmaError]  # the index of a prompt, and what became of it


@dataclass(eq=False, slots=True)
class _Reply:
    """A reply that is being written."""

    index: int
    stream: AsyncGenerator[Any, None]
    detached: bool = False
    pieces: list[Piece] = field(default_factory=list)

    async def advance(
        self, worker: Worker
    ) -> BatchReply | WebgemmaError | Aside[Any] | Deferred | None:
        """Take one item of the stream; return what it says, unless the reply goes on."""
        try:
            item = await worker.next_item(self.stream, detached=self.detached)
        except StopAsyncIteration:
            return BatchReply.of(self.pieces)
        except WebgemmaError as error:
            return error
        if isinstance(item, Aside | Deferred):
            return item
        if isinstance(item, Detached):
            self.detached = True
        elif isinstance(item, Piece):
            self.pieces.append(item)
        return None


async def replies_beside(
    worker: Worker, streams: Iterable[AsyncGenerator[Any, None]]
) -> AsyncGenerator[Any, None]:
    """Yield an `Outcome` for each stream of pieces as it ends, as many at once as have a turn.

    The worker drives this as one stream, for whose turn the first reply is written; the others need
    a turn each, which they get while nobody else waits."""
    waiting = deque(_Reply(index, stream) for index, stream in enumerate(streams))
    running: list[_Reply] = []
    turns: list[Turn] = []  # beside the first
    yield Detached()
    try:
        while waiting or running:
            while waiting and (not running or _took_turn(worker, turns)):
                running.append(waiting.popleft())
            for reply in list(running):
                outcome = await reply.advance(worker)
                worker.turns.check(current_turn())  # one that was ended ends its replies, too
                if outcome is None:
                    continue
                if isinstance(outcome, Aside):
                    yield outcome
                    continue
                running.remove(reply)
                if turns:
                    worker.turns.end(turns.pop())
                if not isinstance(outcome, Deferred):
                    yield reply.index, outcome
                    continue
                waiting.appendleft(reply)
                if not running:
                    yield outcome
            worker.breathe()
    finally:
        for reply in running:
            await worker.close_stream(reply.stream)
        for turn in turns:
            worker.turns.end(turn)


def _took_turn(worker: Worker, turns: list[Turn]) -> bool:
    turn = worker.turns.another(current_turn())
    if turn is not None:
        turns.append(turn)
    return turn is not None
