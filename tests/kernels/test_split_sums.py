"""What reads the sums of a product over parts of k: as if they were added up before, bit by bit."""

from collections.abc import Callable

import numpy as np
import pytest
from helpers.gpu import device, get, put
from helpers.integers import inputs_of, numbers
from helpers.matrices import load
from helpers.matrix_units import poisoned
from helpers.tiny import random_tensor
from tolerance import F16_ROUNDING

from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.operands import Branches
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gemma.record.split_sums import SplitSums, splits_of
from webgemma.gemma.text import TextRecorder
from webgemma.graph import Recorder, Tensor

ROWS, WIDTH = 3, 1056  # more than the threads of a workgroup hold at once
SPLITS = pytest.mark.parametrize("splits", [2, 5])


def parts_of(splits: int, width: int = WIDTH) -> np.ndarray:
    return numbers(splits * ROWS, width).reshape(splits, ROWS, width)


def added_up(parts: np.ndarray) -> np.ndarray:
    """Return the sum over the parts, one after the other, in float32."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def in_parts(parts: np.ndarray) -> SplitSums:
    splits, rows, width = parts.shape
    return SplitSums((rows, width), parts.nbytes, put(parts).buffer, splits=splits)


def recorder_of() -> TextRecorder:
    model = load(random_tensor(6, "w", (WIDTH, 8), "Q8_0"))
    model.allocate_vectors({"post": WIDTH, "next": WIDTH, "scale": 1})
    model.write_vector("post", numbers(1, WIDTH)[0].tolist())
    model.write_vector("next", numbers(2, WIDTH)[1].tolist())
    model.write_vector("scale", [0.7])
    return TextRecorder(model, Recorder(device()), inputs_of(ROWS), ROWS, "f32", "exact")


def both(parts: np.ndarray, run: Callable[[Tensor], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the results with the sums in parts and with their total."""
    return run(in_parts(parts)), run(put(added_up(parts)))


def test_what_is_added_up_has_one_part() -> None:
    assert splits_of(in_parts(parts_of(2))) == 2
    assert splits_of(put(added_up(parts_of(2)))) == 1


@SPLITS
def test_the_residual(splits: int) -> None:
    def run(added: Tensor) -> np.ndarray:
        text = recorder_of()
        x, out = put(numbers(ROWS, WIDTH)), put(np.zeros((ROWS, WIDTH), np.float32))
        text.residual(x, added, "post", "next", "scale", out)
        device().run(text.recorder.plan())
        return np.stack([get(x), get(out)])

    found, expected = both(parts_of(splits), run)
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found).all()
    assert len(np.unique(found)) > WIDTH


@SPLITS
def test_the_branches_of_a_layer_with_experts(splits: int) -> None:
    experts, norms = put(numbers(ROWS + 1, WIDTH)[1:]), put(numbers(2, WIDTH))

    def run(dense: Tensor) -> np.ndarray:
        text = recorder_of()
        x = put(numbers(ROWS, WIDTH))
        text.residual(x, Branches(dense, experts, norms), "post")
        device().run(text.recorder.plan())
        return get(x)

    found, expected = both(parts_of(splits), run)
    np.testing.assert_array_equal(found, expected)


@SPLITS
def test_a_gate_and_what_it_gates(splits: int) -> None:
    """Both are columns of one product; or the gate alone is one."""
    plain = put(numbers(ROWS, 512))

    def run(sums: Tensor, gate_alone: bool) -> np.ndarray:
        text, half = recorder_of(), poisoned(ROWS, 256)
        up = Columns(plain, 512, 128) if gate_alone else Columns(sums, 512, 256)
        text.geglu(Columns(sums, 512, 0), up, 256, half)
        device().run(text.recorder.plan())
        return get(Tensor((half.nbytes,), half.nbytes, half.buffer), np.uint8)

    for alone in (False, True):
        found, expected = both(parts_of(splits, 512), lambda sums, alone=alone: run(sums, alone))
        np.testing.assert_array_equal(found, expected)
        assert not (found == 0x77).all()


def test_a_row_is_stored_in_float16_as_it_is() -> None:
    text, half = recorder_of(), poisoned(ROWS, WIDTH)
    x, added = put(numbers(ROWS, WIDTH)), put(numbers(ROWS + 1, WIDTH)[1:])
    text.residual(x, added, "post", scale="scale", out=half)
    device().run(text.recorder.plan())
    values, scales = halves(half)
    found = values.astype(np.float32) * scales[:, None]
    np.testing.assert_allclose(found, get(x), rtol=F16_ROUNDING, atol=0)


def halves(tensor: HalfTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the float16 of a tensor, and the scales of its rows."""
    rows, width = tensor.shape
    data = get(Tensor((tensor.nbytes,), tensor.nbytes, tensor.buffer), np.uint8).tobytes()
    values = np.frombuffer(data[: 2 * rows * width], np.float16).reshape(rows, width)
    return values, np.frombuffer(data[2 * rows * width :], np.float32)
