"""Byte-pair merging: cuts text into words that no merge can join, and words into pieces."""

import re
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

SPACE = "▁"  # U+2581, how the vocabulary writes U+0020
NEVER = -1  # the rank of a pair that no merge joins


class Merges:
    """The merge list of a vocabulary: the line "left right" at index r has rank r.

    Pieces never hold U+0020, so a whole line serves as the key of its pair and needs no splitting.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.ranks = dict(zip(lines, range(len(lines)), strict=True))
        self._word = _word_pattern(lines)

    def words(self, text: str) -> list[str]:
        """Cuts text where no merge can ever reach across, so that each part merges on its own."""
        return self._word.findall(text)

    def pieces(self, word: str) -> list[str]:
        """Applies the merges to a word: lowest rank first, leftmost on ties; O(n log n)."""
        size = len(word)
        ranks = self.ranks
        pieces = list(word)  # a piece stands where its first character stood; "" elsewhere
        before = list(range(-1, size - 1))
        after = list(range(1, size + 1))
        due = [ranks.get(f"{left} {right}", NEVER) for left, right in pairwise(pieces)]
        due.append(NEVER)  # due[i]: the rank of the pair that begins at i
        heap = [rank * size + at for at, rank in enumerate(due) if rank != NEVER]
        heapify(heap)
        while heap:
            rank, at = divmod(heappop(heap), size)
            if due[at] != rank:
                continue  # one of the two has since been merged with another neighbour
            gone = after[at]
            pieces[at] += pieces[gone]
            pieces[gone] = ""
            due[at] = due[gone] = NEVER
            after[at] = end = after[gone]
            if end < size:
                before[end] = at
                due[at] = rank = ranks.get(f"{pieces[at]} {pieces[end]}", NEVER)
                if rank != NEVER:
                    heappush(heap, rank * size + at)
            start = before[at]
            if start >= 0:
                due[start] = rank = ranks.get(f"{pieces[start]} {pieces[at]}", NEVER)
                if rank != NEVER:
                    heappush(heap, rank * size + start)
        return [piece for piece in pieces if piece]


def _word_pattern(lines: Collection[str]) -> re.Pattern[str]:
    """A pattern whose successive matches are words, whatever the merges are.

    A cut between characters a and b is exact if no merge joins "…a" to "b…". Text is cut before a
    space, unless the character ahead of it is joined to spaces by some merge, and around runs of
    newlines, unless some merge joins a newline to anything else.
    """
    glue = {SPACE} | {line[line.index(f" {SPACE}") - 1] for line in lines if f" {SPACE}" in line}
    newlines = [line for line in lines if "\n" in line]
    alone = all(("\n " in line) == (" \n" in line) for line in newlines)
    newline = "\n" if alone else ""
    run = "\n++|" if alone else ""
    rest = f"[^{SPACE}{newline}]*+"
    joined = f"(?<=[{''.join(map(re.escape, sorted(glue)))}]){SPACE}++"
    return re.compile(f"{run}.{rest}(?:{joined}{rest})*+", re.DOTALL)
