"""Soft tokens: what a picture or a sound becomes, in place of the embeddings of some positions."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from webgemma.device import Device
from webgemma.errors import InputError
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link

MARKS = 1 << 32  # from here on, numbers stand for soft tokens among those of a conversation
THREADS = 64


@dataclass(frozen=True, slots=True)
class Soft:
    """Rows of a device that some positions of a prompt read."""

    first: int  # position in the prompt
    rows: Tensor  # [n, width]
    digest: int  # tells these rows from others
    both_ways: bool = False  # whether each sees all of them, on layers that slide

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.rows.shape[0]


def check_soft(soft: Sequence[Soft], length: int, width: int, most: int) -> None:
    """InputError for rows that cannot take the place of this prompt's."""
    before = 0
    for each in soft:
        count, columns = each.rows.shape
        if columns != width:
            raise InputError(f"Soft tokens of {columns} values do not fit a model of {width}.")
        if not before <= each.first < each.end <= length:
            raise InputError(f"Soft tokens {each.first} to {each.end} are not in their prompt.")
        if each.both_ways and count > most:
            raise InputError(
                f"A picture of {count} soft tokens is too large for this model, which reads at "
                f"most {most} of them at once: take a smaller budget."
            )
        before = each.end


def marked(ids: Sequence[int], soft: Sequence[Soft]) -> list[int]:
    """The ids, with marks for soft tokens: two conversations agree as far as these do."""
    marks = list(ids)
    for each in soft:
        base = MARKS + (each.digest % (1 << 48)) * (1 << 12)
        marks[each.first : each.end] = range(base, base + each.rows.shape[0])
    return marks


def plain(marks: Sequence[int]) -> list[int]:
    """What the device reads as ids: at soft tokens 0, whose per-layer embedding is theirs."""
    return [0 if mark >= MARKS else mark for mark in marks]


def end_of_chunk(at: int, end: int, soft: Sequence[Soft]) -> int:
    """Where a chunk that begins at `at` ends, so that no picture that sees itself is cut."""
    for each in soft:
        if each.both_ways and at < each.first < end < each.end:
            return each.first
    return end


def ends(at: int, end: int, soft: Sequence[Soft]) -> bytes:
    """For each token of a chunk what lib/state_soft.wgsl wants; nothing without soft tokens."""
    found = [0] * (end - at)
    for each in soft:
        for place in range(max(at, each.first), min(end, each.end)):
            found[place - at] = each.end if each.both_ways else place + 1
    return struct.pack(f"<{len(found)}I", *found) if any(found) else b""


def bring(device: Device, to: Tensor, at: int, end: int, soft: Sequence[Soft]) -> None:
    """Move the rows that a chunk reads to where its plan finds them."""
    recorder, width = Recorder(device), to.shape[1]
    kernel = link("move_rows", device.features, constants={"THREADS": THREADS})
    for each in soft:
        low, high = max(at, each.first), min(end, each.end)
        if low < high:
            grid = (-(-width // (4 * THREADS)), high - low)
            params = [width, low - each.first, low - at, high - low]
            recorder.call(kernel, grid, params, each.rows, to)
    plan = recorder.plan()
    device.run(plan)
    plan.close(device)
