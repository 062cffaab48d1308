"""Replies that do not end by themselves, in place of a served model's."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from webgemma.replies import Piece, Usage
from webgemma.server.engine import Engine


class Endless:
    """The replies, and how many there were."""

    def __init__(self) -> None:
        self.written = 0  # pieces
        self.ended = 0  # replies
        self.seconds = 0.01  # a piece
        self.text = "word "

    async def reply(self, *_: Any) -> AsyncGenerator[Piece, None]:
        try:
            while True:
                await asyncio.sleep(self.seconds)
                self.written += 1
                yield Piece(5, self.text, -1.0, usage=Usage(3, self.written, 512))
        finally:
            self.ended += 1


def endless_replies(patch: pytest.MonkeyPatch) -> Endless:
    """Let every server of this process write such replies."""
    writer = Endless()
    patch.setattr(Engine, "_reply", writer.reply)
    return writer
