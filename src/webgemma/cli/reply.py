"""A reply as it arrives: word-wrapped in a terminal, exactly as it is in a pipe, or as JSON."""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from webgemma.cli.reading import is_tty
from webgemma.cli.terminal import err, out, write_json
from webgemma.cli.wrap import WordWrap
from webgemma.replies import Piece, TopToken, Usage

THOUGHT = "dim italic"
# What a terminal would obey, spelled out: a model may write anything.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    0x0D: None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def note(text: str) -> None:
    """Print a quiet line to standard error; nothing in it is markup."""
    sys.stdout.flush()
    err.print(Text(text.translate(_CONTROLS), style="dim"), soft_wrap=not err.is_terminal)


class Received:
    """The pieces of a reply that have arrived, and when."""

    def __init__(self, by_canvas: bool = False) -> None:
        self.pieces: list[Piece] = []
        self.stopped = False  # by the user
        self._by_canvas = by_canvas  # whether tokens come many at a time
        self._start = self._first = self._last = time.perf_counter()

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self._last = time.perf_counter()
        if not self.pieces:
            self._first = self._last
        self.pieces.append(piece)

    @property
    def text(self) -> str:
        """What was replied."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def thinking(self) -> str:
        """What was thought before."""
        return "".join(piece.thinking for piece in self.pieces)

    @property
    def finish(self) -> str:
        """Why it ended: "stop", "length", or empty if it was stopped."""
        if self.stopped:
            return ""
        return self.pieces[-1].finish if self.pieces else "length"

    @property
    def usage(self) -> Usage | None:
        """The tokens that were read and written."""
        return self.pieces[-1].usage if self.pieces else None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self._last - self._start

    def statistics(self) -> str:
        """Return tokens, their rate, and the use of the context, in a line."""
        usage = self.usage
        if usage is None:
            return "no tokens"
        used = usage.prompt + usage.reply
        waited = self._first - self._start
        facts = [
            f"prompt {usage.prompt} tokens, first token of the reply after {waited:.2f} s",
            f"reply {usage.reply} tokens{self._rate()}",
            f"context {used} of {usage.context} used, {max(0, usage.context - used)} left",
        ]
        if usage.left_out:
            facts.append(f"{usage.left_out} messages left out")
        return " · ".join(facts)

    def _rate(self) -> str:
        count = len(self.pieces) if self._by_canvas else len(self.pieces) - 1
        seconds = self.seconds if self._by_canvas else self._last - self._first
        return f", {count / seconds:.1f} tokens/s" if count and seconds else ""

    def facts(self) -> dict[str, Any]:
        """Return all of it, for scripts."""
        pieces, usage = self.pieces, self.usage
        facts: dict[str, Any] = {
            "text": self.text,
            "thinking": self.thinking,
            "tool_calls": [
                {"name": call.name, "arguments": call.arguments}
                for piece in pieces
                for call in piece.tool_calls
            ],
            "finish": self.finish,
            "tokens": [piece.token for piece in pieces],
            "logprobs": [round(piece.logprob, 6) for piece in pieces],
            "seconds": round(time.perf_counter() - self._start, 3),
        }
        if usage is not None:
            facts["usage"] = {
                "prompt": usage.prompt,
                "reply": usage.reply,
                "context": usage.context,
                "left_out": usage.left_out,
            }
        if any(piece.top for piece in pieces):
            facts["top_logprobs"] = [[_top_facts(top) for top in piece.top] for piece in pieces]
        return facts


def _top_facts(top: TopToken) -> dict[str, Any]:
    return {"token": top.token, "text": top.text, "logprob": round(top.logprob, 6)}


def print_json(pieces: Iterator[Piece], received: Received) -> None:
    """Print a reply as JSON when it is complete."""
    for piece in pieces:
        received.add(piece)
    write_json(received.facts())


def print_reply(pieces: Iterator[Piece], received: Received, wrap: bool = True) -> None:
    """Print a reply as it is generated; also one that is stopped ends its line."""
    page = _TerminalPage(wrap and is_tty(sys.stdout)) if out.is_terminal else _PipePage()
    thinking = False
    try:
        for piece in pieces:
            received.add(piece)
            if piece.thinking:
                page.write(piece.thinking, THOUGHT)
                thinking = True
            if piece.text:
                page.write("\n\n" * thinking + piece.text)
                thinking = False
            for call in piece.tool_calls:
                page.write(f"[calls {call.name} {call.arguments}]\n", "cyan")
    except BaseException:
        if received.pieces:
            page.end()
        raise
    page.end()


class _PipePage:
    """Text for a file or another program: as it is."""

    def write(self, text: str, style: str = "") -> None:
        del style
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


class _TerminalPage:
    """Text for a person: word-wrapped, in styles, and without what a terminal would obey."""

    def __init__(self, wrap: bool) -> None:
        self._wrap = WordWrap(_width) if wrap else None
        self._style = ""

    def write(self, text: str, style: str = "") -> None:
        if style != self._style:
            self._print(self._wrap.flush() if self._wrap else "")
            self._style = style
        text = text.translate(_CONTROLS)
        self._print(self._wrap.feed(text) if self._wrap else text)

    def end(self) -> None:
        self._print((self._wrap.flush() if self._wrap else "") + "\n")

    def _print(self, text: str) -> None:
        out.print(Text(text, style=self._style), end="", soft_wrap=True)
        out.file.flush()


def _width() -> int:
    """Return the cells of a line as they are now: a window may be resized during a reply."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or out.width
    except (OSError, ValueError):
        return out.width
