"""Packing of documents into rows of one length: best fit, longest first, the rest padded."""

from collections.abc import Iterable

import numpy as np
from documents import Document

PADDING, OTHER, MODEL = 0, 1, 2  # of a token: padding, another role's, the model's


def pack(documents: Iterable[Document], row: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and kinds [rows, row]; a document longer than a row is split."""
    chunks = [
        (ids[at : at + row], generated[at : at + row])
        for ids, generated in documents
        for at in range(0, len(ids), row)
    ]
    chunks.sort(key=lambda chunk: -len(chunk[0]))
    bins: list[list[int]] = []
    free: dict[int, list[int]] = {}  # rows by their number of free tokens
    for number, (ids, _) in enumerate(chunks):
        size = len(ids)
        best = next((left for left in range(size, row + 1) if free.get(left)), None)
        if best is None:
            at, left = len(bins), row
            bins.append([])
        else:
            at, left = free[best].pop(), best
        bins[at].append(number)
        free.setdefault(left - size, []).append(at)
    tokens = np.full((len(bins), row), pad, np.int16)
    kinds = np.full((len(bins), row), PADDING, np.uint8)
    for at, numbers in enumerate(bins):
        start = 0
        for number in numbers:
            ids, generated = chunks[number]
            stop = start + len(ids)
            tokens[at, start:stop] = ids
            kinds[at, start:stop] = np.where(generated, MODEL, OTHER)
            start = stop
    return tokens, kinds
