"""Replies without a model: `reply("Hi", ToolCall("f", {}))` gives the pieces of one."""

from dataclasses import dataclass, replace
from typing import Any

from webgemma.replies import Piece, TopToken, Usage
from webgemma.server.protocol import Reply
from webgemma.text.parser import ToolCall

PROMPT, CONTEXT = 7, 64
END = 1  # the token that ends a reply


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of a thought."""

    text: str


def reply(*parts: str | Thought | ToolCall, finish: Any = "stop", tops: int = 0) -> list[Piece]:
    """Return one token for each part, and for "stop" one more that ends the reply."""
    pieces = []
    for at, part in enumerate(parts):
        top = tuple(TopToken(10 + at + n, -0.5 - n, f"t{n}") for n in range(tops))
        piece = Piece(10 + at, "", -0.5, top=top, usage=Usage(PROMPT, at + 1, CONTEXT))
        if isinstance(part, Thought):
            piece = replace(piece, thinking=part.text)
        elif isinstance(part, ToolCall):
            piece = replace(piece, tool_calls=(part,))
        else:
            piece = replace(piece, text=part)
        pieces.append(piece)
    if finish == "stop":
        usage = Usage(PROMPT, len(parts) + 1, CONTEXT)
        pieces.append(Piece(END, "", -0.1, finish="stop", usage=usage))
    elif pieces:
        pieces[-1] = replace(pieces[-1], finish=finish)
    return pieces


def cached_prompt(pieces: list[Piece], tokens: int) -> list[Piece]:
    """Return the same pieces, so many tokens of whose prompt were read before."""
    return [
        replace(piece, usage=replace(piece.usage, cached=tokens) if piece.usage else None)
        for piece in pieces
    ]


def whole(pieces: list[Piece]) -> Reply:
    """Return a reply put together."""
    put_together = Reply()
    for piece in pieces:
        put_together.add(piece, keep_tokens=True)
    return put_together
