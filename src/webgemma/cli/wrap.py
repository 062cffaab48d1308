"""Word wrap of text that arrives in pieces: a word is shown once it is complete.

Code is never wrapped: fenced blocks, indented lines and tables stay as they are, and `a b` in
backticks counts as one word. A word that is longer than a line is left to the terminal, which
breaks it without adding anything."""

import re
from collections.abc import Callable

from rich.cells import cell_len

TAB = 8
HEAD = 200  # characters of a line that tell what it is
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_VERBATIM = re.compile(r"\t| {4}| {0,3}\|")  # indented code, a table
_IDEOGRAPHS = ((0x2E80, 0xA4CF), (0xF900, 0xFAFF), (0xFF01, 0xFF60), (0x20000, 0x3FFFF))
_NEVER_FIRST = frozenset(
    "、。，．：；！？）］｝」』】》〉〕・ーぁぃぅぇぉっゃゅょァィゥェォッャュョ々…"
)


class WordWrap:
    """Breaks lines between words; `width` returns the cells of a line, which may change."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._line = ""  # the beginning of this line
        self._column = 0  # cells that are shown of it
        self._space = ""  # held until a word follows
        self._word = ""  # held until it ends
        self._fence = ""  # what opened the code block that this line is in

    def feed(self, text: str) -> str:
        """Return what can be shown now."""
        return "".join([self._next(char) for char in text])

    def flush(self) -> str:
        """Return what is held: the text ends, or pauses, here."""
        return self._place() + self._take_space()

    def _next(self, char: str) -> str:
        if char == "\n":
            shown = self._place() + self._take_space()
            self._end_line()
            return shown + "\n"
        before = self._line
        if len(before) < HEAD:
            self._line += char
        if self._is_verbatim():
            return self._place() + self._take_space() + self._show(char)
        if char not in " \t":
            shown = self._place() if _breaks_between(self._word[-1:], char) else ""
            self._word += char
            return shown
        if not before.strip() or self._in_code_span():  # indentation, and `a b`, stay whole
            self._word += char
            return ""
        shown = self._place()
        self._space += char
        return shown

    def _is_verbatim(self) -> bool:
        return bool(self._fence or _VERBATIM.match(self._line) or _FENCE.match(self._line))

    def _in_code_span(self) -> bool:
        return self._word.count("`") % 2 == 1 and cell_len(self._word) < self._width()

    def _end_line(self) -> None:
        found = _FENCE.match(self._line)
        if found and not self._fence:
            self._fence = found[1]
        elif found and found[1].startswith(self._fence) and not self._line[found.end() :].strip():
            self._fence = ""
        self._line, self._column = "", 0

    def _place(self) -> str:
        """Return the held word; one with spaces that is too long for a line as several words."""
        held, self._word = self._word, ""
        if cell_len(held) <= self._width():
            return self._put(held)
        shown = ""
        for at, word in enumerate(held.split(" ")):
            self._space += " " * (at > 0)
            shown += self._put(word)
        return shown

    def _put(self, word: str) -> str:
        """Return a word, on a new line if this one has no room for it."""
        if not word:
            return ""
        if self._column and self._column + cell_len(self._space + word) > self._width():
            self._space, self._column = "", 0
            return "\n" + self._show(word)
        return self._take_space() + self._show(word)

    def _take_space(self) -> str:
        space, self._space = self._space, ""
        return self._show(space)

    def _show(self, text: str) -> str:
        """Return text with its tabs as spaces, and move the column."""
        shown = ""
        for run in re.split("(\t)", text):
            cells = cell_len(run)
            if run == "\t":
                cells = TAB - self._column % TAB
                run = " " * cells
            shown += run
            self._column += cells
        width = self._width()
        if self._column > width:  # the terminal has begun other lines
            self._column = (self._column - 1) % width + 1
        return shown


def _breaks_between(before: str, after: str) -> bool:
    """Return whether a line may end between two characters: Chinese and Japanese have no spaces."""
    ideographs = _is_ideograph(before) or _is_ideograph(after)
    return bool(before) and ideographs and after not in _NEVER_FIRST


def _is_ideograph(char: str) -> bool:
    return bool(char) and any(first <= ord(char) <= last for first, last in _IDEOGRAPHS)
