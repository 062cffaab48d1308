"""Activations rounded to float16 for matrix units, by an op of its own or by what makes them."""

from collections.abc import Mapping

from webgemma.gemma.record.quantised import HalfTensor
from webgemma.graph import Argument, Recorder, Tensor, folded

# Threads of round_f16, which has a workgroup for each row: by the width that is too long for fewer.
ROUND_THREADS = {65536: 1024, 8192: 512, 2048: 256, 0: 128}
FEW_ROWS, FEW_ROWS_THREADS = 64, {4096: 1024, 2048: 512, 0: 128}  # that leave most of a GPU idle


def round_rows(
    recorder: Recorder,
    batch: Tensor,
    h: HalfTensor,
    source: Mapping[str, Argument],
    token_rows: int = 1,
) -> HalfTensor:
    """Record rows of float16, of which a token has so many; `source` says what they are made of.

    Those are the arguments of a provider of lib/row_source, and its name."""
    rows, width = h.shape
    device = recorder.device
    most = min(ROUND_THREADS.values()) if device.software else device.limits.workgroup_threads
    sizes = FEW_ROWS_THREADS if rows <= FEW_ROWS else ROUND_THREADS
    threads = next(n for least, n in sizes.items() if width >= least and n <= most)
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
