"""What a person types: messages, also of several lines, and a reader of plain lines."""

import sys
from dataclasses import dataclass
from typing import Protocol, TextIO

from webgemma.cli.terminal import err

QUOTES = '"""'
PROMPT, CONTINUED = ">>> ", "... "


@dataclass(frozen=True, slots=True)
class Typed:
    """What was typed; between triple quotes it is a message, whatever it begins with."""

    text: str
    quoted: bool = False


class Reader(Protocol):
    """Reads one message or command after another."""

    def read(self) -> Typed | None:
        """Return what was typed; None at the end of input. KeyboardInterrupt for Ctrl-C."""


def is_tty(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; a program without a console has None for it."""
    return stream is not None and stream.isatty()


def is_open(text: str) -> bool:
    """Return whether triple quotes were opened and not yet closed."""
    text = text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 6 and text.endswith(QUOTES))


def unquoted(text: str) -> Typed:
    """Return what was typed, without its triple quotes."""
    text = text.strip()
    if not text.startswith(QUOTES):
        return Typed(text)
    return Typed(text.removeprefix(QUOTES).removesuffix(QUOTES).strip(), quoted=True)


class LineReader:
    """Reads plain lines; the prompt goes to standard error, replies alone to standard output."""

    def read(self) -> Typed | None:
        """Return a line, or several between triple quotes; None at the end of input."""
        text = self._line(PROMPT)
        while text is not None and is_open(text):
            more = self._line(CONTINUED)
            text = None if more is None else f"{text}\n{more}"
        return None if text is None else unquoted(text)

    def _line(self, prompt: str) -> str | None:
        err.print(prompt, end="", markup=False)
        err.file.flush()
        line = sys.stdin.readline() if sys.stdin else ""
        if not line:
            err.print()
            return None
        return line.rstrip("\n")
