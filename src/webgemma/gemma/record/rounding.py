"""Activations rounded to float16 for matrix units, by an op of its own or by what makes them."""

from collections.abc import Mapping

from webgemma.gemma.record.quantised import HalfTensor
from webgemma.graph import Argument, Recorder, Tensor, folded

ROUND_THREADS = 128  # of round_f16, which has a workgroup for each row


def round_rows(
    recorder: Recorder,
    batch: Tensor,
    h: HalfTensor,
    source: Mapping[str, Argument],
    token_rows: int = 1,
    threads: int = ROUND_THREADS,
) -> HalfTensor:
    """Record rows of float16, of which a token has so many; `source` says what they are made of.

    Those are the arguments of a provider of lib/row_source, and its name."""
    rows, width = h.shape
    recorder.call(
        "round_f16",
        folded(rows),
        **source,
        batch=batch,
        h=h,
        width=width,
        rows=rows,
        token_rows=token_rows,
        THREADS=threads,
        SPLIT=h.split,
    )
    return h


def whole_row(h: Tensor) -> dict[str, Argument]:
    """Return the arguments with which a kernel stores whole rows of h: see lib/store_whole."""
    if isinstance(h, HalfTensor):
        return {"store_whole": "half", "h": h, "h_rows": h.shape[0]}
    return {"store_whole": "float", "h": h}
