"""Blocks to planes: the bytes on the device against the same bytes split by numpy."""

import numpy as np
import pytest
from helpers.gpu import device, get

from webgemma.gemma import matrices
from webgemma.gguf.formats import FORMATS, Format
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.sync import run_sync

PLANED = [fmt for fmt in FORMATS.values() if fmt.planes]
EVERY_PLANED = pytest.mark.parametrize("fmt", PLANED, ids=str)


def assert_planes(fmt: Format, blocks_in_row: int, rows: int) -> None:
    """Load a matrix of random bytes and check each of its planes."""
    blocks = np.random.default_rng(4).integers(
        0, 256, (rows * blocks_in_row, fmt.nbytes), dtype=np.uint8
    )
    tensor = NewTensor("w", (fmt.block * blocks_in_row, rows), fmt.name, blocks.tobytes())
    gguf = run_sync(Gguf.aopen(BytesSource(gguf_bytes({}, [tensor]))))
    model = matrices.Matrices(device())
    stack = [gguf.tensors["w"]]
    model.allocate("w", stack)
    run_sync(model.load_tensors(gguf, "w", stack))
    (part,) = model.matrices["w"].parts
    part.data.shape = (part.data.nbytes,)
    found = get(part.data, np.uint8)
    starts = (0, *(4 * word for word in part.planes))
    for (offset, nbytes), start in zip(fmt.planes, starts, strict=False):
        expected = blocks[:, offset : offset + nbytes].ravel()
        assert start % 16 == 0
        np.testing.assert_array_equal(found[start : start + len(expected)], expected)


@EVERY_PLANED
def test_planes_hold_every_byte_of_a_block_once(fmt: Format) -> None:
    stored = [byte for offset, nbytes in fmt.planes for byte in range(offset, offset + nbytes)]
    assert sorted(stored) == list(range(fmt.nbytes))
    assert len(fmt.planes) <= 3  # params.plane1 and params.plane2 are the starts of two


@EVERY_PLANED
@pytest.mark.parametrize("blocks", [1, 37])
def test_one_chunk(fmt: Format, blocks: int) -> None:
    assert_planes(fmt, 1, blocks)


@EVERY_PLANED
@pytest.mark.parametrize("in_chunk", [16, 32])
def test_several_chunks(fmt: Format, in_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks end within rows; the last one is shorter and ends within a word."""
    nbytes = in_chunk * fmt.nbytes + 5
    monkeypatch.setattr(matrices, "CHUNK_NBYTES", nbytes)
    assert_planes(fmt, 3, 23)


def test_more_workgroups_than_one_axis_has() -> None:
    assert_planes(FORMATS["Q8_0"], 512, 520)
