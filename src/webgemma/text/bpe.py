"""Byte-pair encoding: splits text into words that merge independently, and words into pieces."""

import re
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Self

SPACE = "▁"  # U+2581, how the vocabulary writes U+0020
NEVER = -1  # the rank of a pair that no merge joins


class Merges:
    """The merges of a vocabulary: which pairs of pieces are joined, and which of them first.

    Gemma 4 lists them: the line "left right" at index r has rank r. Pieces never contain U+0020, so
    a line is the key of its pair without being split. Gemma 3 has scores instead, as SentencePiece
    does: two pieces are joined if together they are a piece, that of the highest score first."""

    def __init__(self, ranks: Mapping[str, int], between: str, word: re.Pattern[str]) -> None:
        self.ranks = ranks
        self._between = between  # what stands between two pieces in the key of their pair
        self._word = word

    @classmethod
    def from_lines(cls, lines: Sequence[str]) -> Self:
        """Return the merges of a list."""
        ranks = dict(zip(lines, range(len(lines)), strict=True))
        glue = [line[line.index(f" {SPACE}") - 1] for line in lines if f" {SPACE}" in line]
        newlines = [line for line in lines if "\n" in line]
        alone = all(("\n " in line) == (" \n" in line) for line in newlines)
        return cls(ranks, " ", _word_pattern(glue, newlines_alone=alone))

    @classmethod
    def from_scores(cls, scores: Mapping[str, float]) -> Self:
        """Return the merges that make these pieces."""
        order = sorted(set(scores.values()), reverse=True)
        rank_of = dict(zip(order, range(len(order)), strict=True))
        ranks = {piece: rank_of[score] for piece, score in scores.items() if len(piece) > 1}
        inside = [piece for piece in ranks if SPACE in piece[1:]]
        glue = [a for piece in inside for a, b in pairwise(piece) if b == SPACE]
        alone = not any(piece.strip("\n") for piece in ranks if "\n" in piece)
        return cls(ranks, "", _word_pattern(glue, newlines_alone=alone))

    @property
    def longest(self) -> int:
        """The most characters that a merge makes one piece of."""
        return max(map(len, self.ranks), default=2) - len(self._between)

    def words(self, text: str) -> list[str]:
        """Split text where no merge can join the two sides, so that each word merges on its own."""
        return self._word.findall(text)

    def pieces(self, word: str) -> list[str]:
        """Apply the merges to a word, lowest rank first, leftmost on ties; O(n log n)."""
        size = len(word)
        ranks, between = self.ranks, self._between
        pieces = list(word)  # each at the index of its first character; "" elsewhere
        before = list(range(-1, size - 1))
        after = list(range(1, size + 1))
        pairs = pairwise(pieces)
        pair_ranks = [ranks.get(f"{left}{between}{right}", NEVER) for left, right in pairs]
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
                pair_ranks[at] = rank = ranks.get(f"{pieces[at]}{between}{pieces[end]}", NEVER)
                if rank != NEVER:
                    heappush(heap, rank * size + at)
            start = before[at]
            if start >= 0:
                rank = ranks.get(f"{pieces[start]}{between}{pieces[at]}", NEVER)
                pair_ranks[start] = rank
                if rank != NEVER:
                    heappush(heap, rank * size + start)
        return [piece for piece in pieces if piece]


def _word_pattern(glue: Collection[str], *, newlines_alone: bool) -> re.Pattern[str]:
    """Return a pattern whose successive matches are words, for any merges.

    A split between characters a and b is exact if no merge joins "…a" to "b…". Text is split
    before a space, unless some merge joins the character before it, one of `glue`, to spaces, and
    around runs of newlines, if no merge joins a newline to anything else.
    """
    newline = "\n" if newlines_alone else ""
    run = "\n++|" if newlines_alone else ""
    rest = f"[^{SPACE}{newline}]*+"
    joined = f"(?<=[{''.join(map(re.escape, sorted({SPACE, *glue})))}]){SPACE}++"
    return re.compile(f"{run}.{rest}(?:{joined}{rest})*", re.DOTALL)
