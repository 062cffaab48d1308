"""Soft tokens: encoded images and audio, in place of the embeddings of some positions."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from webgemma.device import Device
from webgemma.errors import InputError
from webgemma.graph import Recorder, Tensor

FIRST_MARK = 1 << 32  # from here on, numbers stand for soft tokens among a conversation's tokens
THREADS = 64


@dataclass(frozen=True, slots=True)
class SoftTokens:
    """Rows on a device that some positions of a prompt read."""

    first: int  # position in the prompt
    rows: Tensor  # [n, width]
    digest: int  # identifies the rows
    bidirectional: bool = False  # whether each attends to all of them, on sliding layers

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.rows.shape[0]


def check_soft_tokens(
    soft: Sequence[SoftTokens], length: int, width: int, max_bidirectional: int
) -> None:
    """Raise InputError for rows that do not fit the model or the prompt."""
    before = 0
    for each in soft:
        count, columns = each.rows.shape
        if columns != width:
            raise InputError(f"Soft tokens of {columns} values do not fit a model of {width}.")
        if not before <= each.first < each.end <= length:
            raise InputError(f"Soft tokens {each.first} to {each.end} are not in their prompt.")
        if each.bidirectional and count > max_bidirectional:
            raise InputError(
                f"An image of {count} soft tokens is too large for this model, which reads at "
                f"most {max_bidirectional} of them at once: use a smaller budget."
            )
        before = each.end


def marked(ids: Sequence[int], soft: Sequence[SoftTokens]) -> list[int]:
    """Return the ids with marks for soft tokens: equal prefixes of marks are equal prompts."""
    marks = list(ids)
    for each in soft:
        base = FIRST_MARK + (each.digest % (1 << 48)) * (1 << 12)
        marks[each.first : each.end] = range(base, base + each.rows.shape[0])
    return marks


def unmarked(marks: Sequence[int]) -> list[int]:
    """Return ids for the device: 0 for soft tokens, whose per-layer embedding is theirs."""
    return [0 if mark >= FIRST_MARK else mark for mark in marks]


def chunk_end(at: int, end: int, soft: Sequence[SoftTokens]) -> int:
    """Return where a chunk from `at` ends, so that no bidirectional image is split."""
    for each in soft:
        if each.bidirectional and at < each.first < end < each.end:
            return each.first
    return end


def packed_ends(at: int, end: int, soft: Sequence[SoftTokens]) -> bytes:
    """Return `ends` of lib/batch/soft_tokens for a chunk; empty without soft tokens in it."""
    ends = [0] * (end - at)
    for each in soft:
        for position in range(max(at, each.first), min(end, each.end)):
            ends[position - at] = each.end if each.bidirectional else position + 1
    return struct.pack(f"<{len(ends)}I", *ends) if any(ends) else b""


def copy_soft_tokens(
    device: Device, to: Tensor, at: int, end: int, soft: Sequence[SoftTokens]
) -> None:
    """Copy the rows that a chunk reads to where its plan finds them."""
    recorder, width = Recorder(device), to.shape[1]
    for each in soft:
        low, high = max(at, each.first), min(end, each.end)
        if low < high:
            recorder.call(
                "copy_rows",
                (-(-width // (4 * THREADS)), high - low),
                rows=each.rows,
                to=to,
                width=width,
                THREADS=THREADS,
                first=low - each.first,
                first_to=low - at,
                count=high - low,
            )
    plan = recorder.plan()
    device.run(plan)
    plan.close(device)
