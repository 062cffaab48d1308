"""Kernels of LoRA adapters against numpy: every row has the scales of its conversation's slot."""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.gpu import device, get, put
from tolerance import F32_KERNEL

from webgemma.gemma.gpu_sampler import Conversations, Row
from webgemma.gemma.lora_weights import RANKS_AT_ONCE, AppliedLora, LoraWeight
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.lora_matmul import LoraMatmul
from webgemma.graph import BufferPool, Recorder, Tensor

WIDTH, OUTPUTS, SLOTS, COLUMNS = 64, 72, 5, 3
SCALES = np.array([[0, 0, 0], [1, 0, 0], [0, -0.5, 0], [0.25, 2, 0], [0, 0, 0]], np.float32)
OF_RANKS = np.array([0, 0, 1, 2], np.uint32)  # the columns of four times RANKS_AT_ONCE ranks
RANKS = RANKS_AT_ONCE * len(OF_RANKS)
ROWS = [Row(3), Row(1), Row(0), Row(2), Row(2, 1), Row(2, 2), Row(4), Row(1), Row(0)]
EXPERTS, USED = 3, 2


@dataclass
class Case:
    """Rows of several conversations, or of one, and adapters of which nobody applies the last."""

    place: str
    x: np.ndarray  # [rows, width]
    slots: list[int]  # of the rows
    batch: Tensor

    @property
    def scales(self) -> np.ndarray:
        """The scale of every rank in every row: [rows, ranks]."""
        return SCALES[self.slots][:, np.repeat(OF_RANKS, RANKS_AT_ONCE)].astype(np.float64)


@pytest.fixture(params=["rows", "chunk", "single"])
def case(request: pytest.FixtureRequest) -> Case:
    rng = np.random.default_rng(1)
    if request.param == "rows":
        x = rng.standard_normal((len(ROWS), WIDTH), np.float32)
        table = Conversations(device(), BufferPool(device()))
        table.set_rows(ROWS)
        return Case("rows", x, [row.slot for row in ROWS], table.tensor)
    count = 11 if request.param == "chunk" else 1
    x = rng.standard_normal((count, WIDTH), np.float32)
    batch = put(np.array([7, count, 3, 0], np.uint32))
    return Case("chunk", x, [3] * count, batch)


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weight(a: np.ndarray, b: np.ndarray) -> LoraWeight:
    """Return A [… ranks, width] and B [… outputs, ranks] on the device."""
    flat = put(a.reshape(-1, a.shape[-1])), put(b.reshape(-1, RANKS))
    return LoraWeight(*flat, put(OF_RANKS), RANKS, (0,))


def products(recorder: Recorder, case: Case) -> LoraMatmul:
    applied = AppliedLora({}, None, put(SCALES))
    return LoraMatmul(recorder, case.batch, applied, case.place)


def unread(array: np.ndarray, axis: int) -> np.ndarray:
    """Return the array with NaN in the ranks of the adapter that nobody applies."""
    damaged = np.moveaxis(array.copy(), axis, 0)
    damaged[-RANKS_AT_ONCE:] = np.nan
    return np.moveaxis(damaged, 0, axis)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= F32_KERNEL * np.abs(expected).max()


def test_each_row_has_its_own_scales(case: Case) -> None:
    a, b = numbers(2, RANKS, WIDTH), numbers(3, OUTPUTS, RANKS)
    before = numbers(4, len(case.x), OUTPUTS + 8)
    recorder, y = Recorder(device()), put(before)
    adapters, lora = products(recorder, case), weight(unread(a, 0), unread(b, 1))
    adapters.up(y, 4, lora, adapters.down(put(case.x), lora))
    device().run(recorder.plan())
    low = case.x.astype(np.float64) @ a.T * case.scales
    expected = before.astype(np.float64)
    expected[:, 4 : 4 + OUTPUTS] += low @ b.T
    found = get(y)
    assert_close(found, expected)
    plain = ~case.scales.any(1)
    np.testing.assert_array_equal(found[plain], before[plain])


def test_each_row_has_its_own_scales_of_experts(case: Case) -> None:
    rows = len(case.x)
    ids = np.random.default_rng(5).integers(0, EXPERTS, (rows, USED)).astype(np.uint32)
    a, b = numbers(2, EXPERTS, RANKS, WIDTH), numbers(3, EXPERTS, OUTPUTS, RANKS)
    before = numbers(4, rows * USED, OUTPUTS)
    recorder, y = Recorder(device()), put(before)
    adapters, lora = products(recorder, case), weight(unread(a, 1), unread(b, 2))
    columns = Columns(y, OUTPUTS, 0)
    adapters.add_experts(lora, put(ids), put(case.x), USED, columns, OUTPUTS)
    device().run(recorder.plan())
    low = np.einsum("tk,turk->tur", case.x.astype(np.float64), a[ids]) * case.scales[:, None]
    added = np.einsum("tunr,tur->tun", b[ids], low).reshape(before.shape)
    found = get(y)
    assert_close(found, before + added)
    plain = np.repeat(~case.scales.any(1), USED)
    np.testing.assert_array_equal(found[plain], before[plain])


def test_each_row_has_its_own_scales_of_the_embedding(case: Case) -> None:
    tokens = 30
    a, b = numbers(2, tokens, RANKS), numbers(3, WIDTH, RANKS)
    recorder, x, rows = Recorder(device()), put(case.x), len(case.x)
    ids = np.random.default_rng(6).integers(0, tokens, rows).astype(np.uint32)
    by_ids = {"token_ids": "buffer", "ids": put(ids)}
    if case.place == "rows":  # whose tokens are in the table
        ids = np.array([9 if row.ahead else 3 + row.slot for row in ROWS], np.uint32)
        table = Conversations(device(), BufferPool(device()))
        table.set_rows(ROWS)
        for slot in range(SLOTS):
            table.set_next(slot, 0, 3 + slot)
            table.set_drafts(slot, [9, 9])
        case.batch, by_ids = table.tensor, {"token_ids": "rows"}
    lora = weight(unread(a, 1), unread(b, 1))
    recorder.call(
        "lora_embed",
        (1, rows),
        A=lora.a,
        B=lora.b,
        **products(recorder, case).scales_of(lora),
        x=x,
        batch=case.batch,
        **by_ids,
        width=WIDTH,
        rank_vec4s=RANKS // 4,
        factor=2.0,
    )
    device().run(recorder.plan())
    expected = case.x + 2.0 * (a[ids] * case.scales) @ b.T.astype(np.float64)
    assert_close(get(x), expected)
