"""Prompts with activations as integers: models against the reference, in chunks of any size."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.gpu import device
from helpers.tiny import MIXED, MOE, SMALL, tiny_gguf
from tolerance import GPU_LOGITS, INT8_LOGITS, RANDOM_LOGITS

from webgemma.engine.session import Session
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

TINY = {
    "wide": replace(MIXED, pattern="sf", formats=("Q4_K", "Q6_K", "F16")),
    "experts": replace(MOE, formats=("Q4_1", "Q5_0")),
    "narrow": replace(SMALL, ple=32, formats=("Q8_0", "Q4_0")),  # heads of half a group
}
IDS = [2, *(24 + i * 7 % 280 for i in range(1, 30))]
CHUNKINGS = {"in one batch": (1, 32), "in odd chunks": (1, 19), "token by token": (1,)}


@cache
def opened(name: str) -> tuple[Gguf, Config, np.ndarray]:
    """Return a model and the logits of its prompt, computed by the reference."""
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(TINY[name]))))
    config = Config.from_gguf(gguf)
    return gguf, config, TextModel(config, Weights(gguf)).forward(IDS)


def rounding(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the root mean square of the difference, in standard deviations of the logits."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


@pytest.mark.parametrize(
    ("name", "chunking", "precision"),
    [
        *product(["wide", "narrow"], CHUNKINGS, ["int16"]),
        *product(["wide", "narrow"], ["in one batch", "in odd chunks"], ["int8"]),
        ("experts", "in one batch", "int16"),
    ],
)
def test_prompts(name: str, chunking: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_rows = CHUNKINGS[chunking]
    monkeypatch.setattr("webgemma.engine.slots.CHUNK", max(plan_rows))
    monkeypatch.setattr("webgemma.engine.session.PLAN_ROWS", plan_rows)
    gguf, config, expected = opened(name)
    model = run_sync(Model.load(gguf, config, device()))
    session = Session(model, 128, kv="f32", precision=precision)
    found = np.frombuffer(run_sync(session.logits(IDS)), np.float32).reshape(expected.shape)
    session.close()
    model.close()
    assert np.isfinite(found).all()
    assert rounding(found, expected) <= RANDOM_LOGITS[precision]


@needs_shared
@pytest.mark.parametrize(
    ("name", "precision"), [("e2b", "int16"), ("e2b", "int8"), ("moe", "int16")]
)
def test_prompts_of_files(name: str, precision: str) -> None:
    """Leave out moe with int8: with random weights, its rounding routes tokens to other experts."""
    folder = SHARED / name
    gguf = Gguf.open(folder / f"{name}-Q4_K_M.gguf")
    ids = [int(id) for id in (folder / "ids.txt").read_text().replace(",", " ").split()]
    expected = np.load(folder / "Q4_K_M.logits.npy")
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    session = Session(model, 256, kv="f32", precision=precision)
    found = np.frombuffer(run_sync(session.logits(ids)), np.float32).reshape(expected.shape)
    session.close()
    model.close()
    if precision == "int8":
        assert rounding(found, expected) <= INT8_LOGITS
    else:
        assert np.abs(found - expected).max() <= GPU_LOGITS * np.abs(expected).max()
        np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))
