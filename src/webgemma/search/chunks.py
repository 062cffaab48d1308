"""Chunks: a text as overlapping passages, cut where a paragraph, a sentence or a word ends."""

import re
from collections.abc import Iterator

SIZE = 1200  # characters of a chunk at most: some 300 tokens of English
MAX_NBYTES = 1900  # in UTF-8: never more tokens than that, and EmbeddingGemma reads 2048
OVERLAP = 200  # characters that a chunk may share with the one before

# Where to cut, the best place first: each pattern matches up to the cut.
_CUTS = (
    re.compile(r"\n[^\S\n]*\n"),
    re.compile(r"[.!?…][\"'”’»)\]]*\s|[。！？]"),
    re.compile(r"\n"),
    re.compile(r"\s"),
)
_VISIBLE = re.compile(r"\S")


def cut(text: str, size: int = SIZE, overlap: int = OVERLAP) -> Iterator[tuple[int, int]]:
    """Yield where each chunk begins and ends in a text; none begins or ends with white space.

    Together they hold everything that is not white space.

    `overlap` is less than half of `size`, and than an eighth of MAX_NBYTES."""
    begin = 0
    while found := _VISIBLE.search(text, begin):
        begin = found.start()
        length = len(text[begin : begin + size].encode()[:MAX_NBYTES].decode(errors="ignore"))
        limit = begin + length
        last = limit >= len(text)
        end = len(text) if last else _last_cut(text, begin + length // 2, limit)
        yield begin, begin + len(text[begin:end].rstrip())
        if last:
            return
        begin = _first_cut(text, end - overlap, end)


def _last_cut(text: str, low: int, high: int) -> int:
    """Return the last cut of the best kind between two offsets; the second, if there is none."""
    for pattern in _CUTS:
        ends = [found.end() for found in pattern.finditer(text, low, high)]
        if ends:
            return ends[-1]
    return high


def _first_cut(text: str, low: int, high: int) -> int:
    """Return the first beginning of a sentence, else of a word, before the second offset."""
    for pattern in (_CUTS[1], _CUTS[3]):
        for found in pattern.finditer(text, low, high):
            if found.end() < high:
                return found.end()
    return high
