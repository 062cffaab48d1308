"""A reply as it arrives: word-wrapped in a terminal, exactly as it is in a pipe, or as JSON."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from webgemma.cli.reading import is_tty
from webgemma.cli.terminal import CONTROLS, err, out, write_json
from webgemma.cli.wrap import WordWrap
from webgemma.replies import Piece, ToolResult, TopToken, Usage
from webgemma.text.calls import ToolCall

THOUGHT, CALL = "dim italic", "cyan"
SHOWN_RESULT = 400  # characters of what a function returned


def note(text: str, style: str = "dim") -> None:
    """Print a quiet line to standard error; nothing in it is markup."""
    sys.stdout.flush()
    err.print(Text(text.translate(CONTROLS), style=style), soft_wrap=not err.is_terminal)


def call_text(call: ToolCall) -> str:
    """Return a call in a line, whole: whoever agrees to it has seen all of it."""
    arguments = ", ".join(f"{name}={_json(value)}" for name, value in call.arguments.items())
    return _printable(f"{call.name}({arguments})")


def result_text(result: ToolResult) -> str:
    """Return what came of a call, in a line."""
    name = _printable(result.call.name)
    if result.failed:
        return f"{name}: {_printable(str(result.value['error']))}"
    text = _printable(_json(result.value))
    more = f"… ({len(text)} characters)" if len(text) > SHOWN_RESULT else ""
    return f"{name} → {text[:SHOWN_RESULT]}{more}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _printable(text: str) -> str:
    """Return a text with what nobody would see, or what would reorder it, spelled out."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


@dataclass(slots=True)
class Round:
    """A part of a reply: what was written up to a call of functions, and what they returned."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    results: Sequence[ToolResult] = ()
    usage: Usage | None = None
    tokens: int = 0

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self.text += piece.text
        self.thinking += piece.thinking
        self.calls += piece.tool_calls
        self.results = piece.tool_results
        self.usage = piece.usage or self.usage
        self.tokens += piece.token >= 0


class Received:
    """The pieces of a reply that have arrived, and when."""

    def __init__(self, by_canvas: bool = False, has_schema: bool = False) -> None:
        """`by_canvas`: tokens come many at a time; `has_schema`: the text stands for a value."""
        self.pieces: list[Piece] = []
        self.rounds = [Round()]  # several, if functions were called
        self.stopped = False  # by the user
        self._by_canvas, self._has_schema = by_canvas, has_schema
        self._start = self._first = self._last = time.perf_counter()
        self._writing_seconds = 0.0  # between the tokens of each round

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        now = time.perf_counter()
        if not self.pieces:
            self._first = now
        if self.rounds[-1].results:
            self.rounds.append(Round())
        elif self.rounds[-1].tokens and not piece.tool_results:
            self._writing_seconds += now - self._last
        self._last = now
        self.rounds[-1].add(piece)
        self.pieces.append(piece)

    @property
    def text(self) -> str:
        """What was replied: the text of each round on lines of its own."""
        return "\n".join(part.text for part in self.rounds if part.text)

    @property
    def thinking(self) -> str:
        """What was thought before."""
        return "\n".join(part.thinking for part in self.rounds if part.thinking)

    @property
    def results(self) -> list[ToolResult]:
        """What the functions returned that were called."""
        return [result for part in self.rounds for result in part.results]

    @property
    def finish(self) -> str:
        """Why it ended: "stop", "length", or empty if it was stopped."""
        if self.stopped:
            return ""
        return self.pieces[-1].finish if self.pieces else "length"

    @property
    def usage(self) -> Usage | None:
        """The tokens that were read and written, in the last round."""
        return self._usages[-1] if self._usages else None

    @property
    def _usages(self) -> list[Usage]:
        return [part.usage for part in self.rounds if part.usage]

    def statistics(self) -> str:
        """Return tokens, their rate, drafts, and the use of the context, in a line."""
        usage = self.usage
        if usage is None:
            return "no tokens"
        used = usage.prompt + usage.reply
        waited = self._first - self._start
        written = sum(each.reply for each in self._usages)
        drafted = sum(each.drafted for each in self._usages)
        facts = [
            f"prompt {usage.prompt} tokens ({usage.cached} cached), "
            f"first token of the reply after {waited:.2f} s",
            f"reply {written} tokens{self._rate()}",
            f"context {used} of {usage.context} used, {max(0, usage.context - used)} left",
        ]
        if drafted:
            accepted = sum(each.accepted for each in self._usages)
            share = f"{accepted / drafted:.0%}"
            facts.insert(2, f"drafts {drafted} checked, {accepted} accepted ({share})")
        if usage.left_out:
            facts.append(f"{usage.left_out} messages left out")
        return " · ".join(facts)

    def _rate(self) -> str:
        count = sum(part.tokens - (not self._by_canvas) for part in self.rounds if part.tokens)
        seconds = self._last - self._start if self._by_canvas else self._writing_seconds
        return f", {count / seconds:.1f} tokens/s" if count and seconds else ""

    def facts(self) -> dict[str, Any]:
        """Return all of it, for scripts."""
        usage = self.usage
        pieces = [piece for piece in self.pieces if piece.token >= 0]
        calls = [call for part in self.rounds for call in part.calls]
        facts: dict[str, Any] = {
            "text": self.text,
            "thinking": self.thinking,
            "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in calls],
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
                "cached": usage.cached,
                "drafted": usage.drafted,
                "accepted": usage.accepted,
            }
        if self._has_schema:
            facts["value"] = self.pieces[-1].value if self.pieces else None
        if self.results:
            facts["tool_results"] = [
                {"name": result.call.name, "value": result.value, "failed": result.failed}
                for result in self.results
            ]
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


def print_reply(
    pieces: Iterator[Piece], received: Received, wrap: bool = True, *, quiet: bool = False
) -> None:
    """Print a reply as it is generated; also one that is stopped ends its line.

    What functions returned is a line on standard error, unless it should be `quiet`."""
    page = _TerminalPage(wrap and is_tty(sys.stdout)) if out.is_terminal else _PipePage()
    thinking = in_line = False
    try:
        for piece in pieces:
            received.add(piece)
            if piece.thinking:
                page.write(piece.thinking, THOUGHT)
                thinking = in_line = True
            if piece.text:
                page.write("\n\n" * thinking + piece.text)
                thinking, in_line = False, not piece.text.endswith("\n")
            if piece.tool_calls and in_line:  # what is said of them stands on lines of its own
                page.write("\n")
                thinking = in_line = False
            for result in () if quiet else piece.tool_results:
                note(result_text(result))
    except BaseException:
        if in_line:
            page.end()
        raise
    last = received.rounds[-1]
    for call in () if last.results else last.calls:  # of functions that are not here
        page.write(f"[calls {call_text(call)}]\n", CALL)
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
        text = text.translate(CONTROLS)
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
