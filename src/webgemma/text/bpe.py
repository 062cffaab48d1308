"""Byte-pair encoding: splits text into words that merge independently, and words into pieces."""

import re
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

SPACE = "▁"  # U+2581, how the vocabulary writes U+0020
NEVER = -1  # the rank of a pair that no merge joins


class Merges:
    """The merge list of a vocabulary: the line "left right" at index r has rank r.

    Pieces never contain U+0020, so a line is the key of its pair without being split.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.ranks = dict(zip(lines, range(len(lines)), strict=True))
        self._word = _word_pattern(lines)

    def words(self, text: str) -> list[str]:
        """Split text where no merge can join the two sides, so that each word merges on its own."""
        return self._word.findall(text)

    def pieces(self, word: str) -> list[str]:
        """Apply the merges to a word, lowest rank first, leftmost on ties; O(n log n)."""
        size = len(word)
        ranks = self.ranks
        pieces = list(word)  # each at the index of its first character; "" elsewhere
        before = list(range(-1, size - 1))
        after = list(range(1, size + 1))
        pair_ranks = [ranks.get(f"{left} {right}", NEVER) for left, right in pairwise(pieces)]
        pair_ranks.append(NEVER)  # pair_ranks[i]: the rank of the pair that starts at i
        heap = [rank * size + at for at, rank in enumerate(pair_ranks) if rank != NEVER]
        heapify(heap)
        while heap:
            rank, at = divmod(heappop(heap), size)
            if pair_ranks[at] != rank:
                continue  # one of the two has been merged with its other neighbour
            right = after[at]
            pieces[at] += pieces[right]
            pieces[right] = ""
            pair_ranks[at] = pair_ranks[right] = NEVER
            after[at] = end = after[right]
            if end < size:
                before[end] = at
                pair_ranks[at] = rank = ranks.get(f"{pieces[at]} {pieces[end]}", NEVER)
                if rank != NEVER:
                    heappush(heap, rank * size + at)
            start = before[at]
            if start >= 0:
                pair_ranks[start] = rank = ranks.get(f"{pieces[start]} {pieces[at]}", NEVER)
                if rank != NEVER:
                    heappush(heap, rank * size + start)
        return [piece for piece in pieces if piece]


def _word_pattern(lines: Collection[str]) -> re.Pattern[str]:
    """Return a pattern whose successive matches are words, for any merges.

    A split between characters a and b is exact if no merge joins "…a" to "b…". Text is split
    before a space, unless some merge joins the character before it to spaces, and around runs of
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
