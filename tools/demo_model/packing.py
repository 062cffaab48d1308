"""Whole documents into rows of one length: first fit, longest first, the rest padded."""

from collections.abc import Iterable

import numpy as np
from documents import Document

PADDING, OTHER, MODEL = 0, 1, 2  # what a token is: nothing, not the model's, the model's own


def pack(documents: Iterable[Document], row: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and kinds [rows, row]; a document longer than a row is cut into rows."""
    pieces = [
        (ids[at : at + row], speaks[at : at + row])
        for ids, speaks in documents
        for at in range(0, len(ids), row)
    ]
    pieces.sort(key=lambda piece: -len(piece[0]))
    bins: list[list[int]] = []
    room: dict[int, list[int]] = {}  # the rows that have so many places left
    for number, (ids, _) in enumerate(pieces):
        size = len(ids)
        best = next((left for left in range(size, row + 1) if room.get(left)), None)
        if best is None:
            at, left = len(bins), row
            bins.append([])
        else:
            at, left = room[best].pop(), best
        bins[at].append(number)
        room.setdefault(left - size, []).append(at)
    tokens = np.full((len(bins), row), pad, np.int16)
    kinds = np.full((len(bins), row), PADDING, np.uint8)
    for at, numbers in enumerate(bins):
        start = 0
        for number in numbers:
            ids, speaks = pieces[number]
            stop = start + len(ids)
            tokens[at, start:stop] = ids
            kinds[at, start:stop] = np.where(speaks, MODEL, OTHER)
            start = stop
    return tokens, kinds
