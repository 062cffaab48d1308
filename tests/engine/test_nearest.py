"""Search by vectors on the GPU: the same order as a plain loop."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device

from webgemma.engine.nearest import Vectors
from webgemma.errors import InputError
from webgemma.sync import run_sync


def vectors_of(count: int, size: int) -> np.ndarray:
    rows = np.random.default_rng(count).standard_normal((count, size)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize(("count", "size"), [(1, 4), (7, 64), (3000, 256), (40_000, 128)])
def test_scores_and_order_are_those_of_a_plain_loop(count: int, size: int) -> None:
    rows = vectors_of(count + 1, size)
    rows, question = rows[:-1], rows[-1]
    rows[count // 2 :: 5] = rows[0]  # equal ones are found in their order
    expected = rows.astype(np.float64) @ question
    with Vectors(device(), rows.tobytes(), size) as vectors:
        scores = np.array(run_sync(vectors.scores(list(question))))
        found = run_sync(vectors.nearest(list(question), 20))
    assert np.abs(scores - expected).max() < 1e-6
    assert found == sorted(range(count), key=lambda at: (-scores[at], at))[:20]
    assert np.abs(expected[found] - np.sort(expected)[::-1][:20]).max() < 1e-6


def test_vectors_beyond_one_binding_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = vectors_of(1001, 64)
    monkeypatch.setattr(device(), "limits", replace(device().limits, binding_nbytes=4 * 64 * 300))
    with Vectors(device(), rows[:-1].tobytes(), 64) as vectors:
        scores = np.array(run_sync(vectors.scores(list(rows[-1]))))
    assert np.abs(scores - rows[:-1] @ rows[-1]).max() < 1e-6


def test_what_are_no_vectors_is_refused() -> None:
    for data, size in ((b"", 4), (bytes(24), 4), (bytes(24), 6), (bytes(4), 0)):
        with pytest.raises(InputError, match="are not vectors"):
            Vectors(device(), data, size)
    with (
        Vectors(device(), bytes(32), 4) as vectors,
        pytest.raises(InputError, match="has 3 numbers, not 4"),
    ):
        run_sync(vectors.scores([1.0, 2.0, 3.0]))
