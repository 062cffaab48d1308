"""Rows that the workgroups of a product make for themselves: as good as those of dispatches."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.decoding import decoded, opened
from helpers.gpu import device, get, hardware, put
from helpers.integers import assert_close, inputs_of, numbers, quantised, truth
from helpers.matrices import load
from helpers.tiny import MOE, SMALL, Tiny, random_tensor
from tolerance import F32_KERNEL, GPU_LOGITS, RANDOM_LOGITS, ROUNDING

from webgemma.device.native import NativeDevice
from webgemma.device.null import DEFAULT_LIMITS, NullDevice
from webgemma.engine.session import Session
from webgemma.gemma.config import Config
from webgemma.gemma.record import operands
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.operands import NormedSum, can_make
from webgemma.gemma.record.quantised import QuantisedTensor
from webgemma.gemma.record.tiling import MatvecTiling
from webgemma.gemma.text import TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.graph import Recorder, Tensor
from webgemma.reference.text import TextModel, gelu, rms
from webgemma.reference.weights import Weights
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync

PLAIN = frozenset({"subgroups", "shader-f16"})
IDS = [2, *range(30, 36)]

WITH_PLE = replace(SMALL, ple=32, head_dims=(32, 64), formats=("Q8_0",))
EXPERTS = replace(MOE, head_dims=(32, 64), formats=("Q5_0",))
TINY: dict[str, tuple[Tiny, str, frozenset[str]]] = {
    "exact, plain": (WITH_PLE, "exact", PLAIN),
    "int16": (WITH_PLE, "int16", frozenset()),
    "int8": (WITH_PLE, "int8", frozenset()),
    "heads of half a group": (replace(WITH_PLE, head_dims=(16, 32)), "int16", frozenset()),
    "experts, exact": (EXPERTS, "exact", frozenset()),
    "experts, int16, plain": (EXPERTS, "int16", PLAIN),
    "experts, not alike": (replace(MOE, formats=("Q8_0", "F16")), "int16", frozenset()),
}


def divided_as_hardware(without: frozenset[str]) -> NativeDevice:
    """Return a device without some features, for which work is divided as for a hardware GPU."""
    same = copy.copy(device(without))
    same.software = False
    return same


@pytest.mark.parametrize("case", TINY)
def test_a_model_has_the_logits_of_the_reference(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, precision, without = TINY[case]
    gguf, on = opened(tiny), divided_as_hardware(without)
    found = decoded(gguf, IDS, precision, on)
    monkeypatch.setattr(operands, "REREAD_NBYTES", 0)
    apart = decoded(gguf, IDS, precision, on)
    # An input that is rounded to integers may be rounded the other way.
    assert_close(found, apart, RANDOM_LOGITS.get(precision, GPU_LOGITS))
    np.testing.assert_array_equal(found.argmax(1), apart.argmax(1))
    if precision != "int8":  # which is far from the reference either way
        expected = TextModel(Config.from_gguf(gguf), Weights(gguf)).forward(IDS)
        assert_close(found, expected, GPU_LOGITS)
        np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))


def saved_ids(name: str, folder: str) -> list[int]:
    text = (SHARED / folder / f"{name}.txt").read_text()
    return [int(token) for token in text.replace(",", " ").split()]


@needs_shared
@pytest.mark.parametrize("precision", ["exact", "int16"])
def test_e2b_writes_what_transformers_writes(precision: str) -> None:
    gguf = Gguf.open(SHARED / "e2b" / "e2b-Q4_K_M.gguf")
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), hardware()))
    session = Session(model, 256, kv="f32", precision=precision)
    ids = saved_ids("ids", "e2b")
    written = iterate_sync(session.generate(ids, resolve({"temperature": 0}), 0))
    expected = saved_ids("Q4_K_M.greedy", "e2b")[:16]
    assert [sampled.token for sampled, _ in zip(written, expected, strict=False)] == expected


@needs_shared
@pytest.mark.parametrize("name", ["e2b", "moe"])
def test_logits_are_those_of_transformers(name: str) -> None:
    gguf = Gguf.open(SHARED / name / f"{name}-Q4_K_M.gguf")
    ids = saved_ids("ids", name)[:12]
    expected = np.load(SHARED / name / "Q4_K_M.logits.npy")[:12]
    found = decoded(gguf, ids, "int16", hardware())
    assert_close(found, expected, GPU_LOGITS)
    np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))


WIDTH = 1056  # more than the threads of a workgroup hold at once, and not a multiple of that


def one_layer(rows: int, precision: str) -> TextRecorder:
    """Return a recorder of one row, with a matrix "w" and the vectors around a residual."""
    model = load(random_tensor(6, "w", (WIDTH, rows), "Q8_0"), hardware())
    model.allocate_vectors({"post": WIDTH, "next": WIDTH, "scale": 1})
    for name, vector in VECTORS.items():
        model.write_vector(name, vector.tolist())
    return TextRecorder(model, Recorder(hardware()), inputs_of(1), 1, "f32", precision)


VECTORS = {
    "post": numbers(1, WIDTH)[0],
    "next": numbers(2, WIDTH)[1],
    "scale": np.float32([0.7]),
}
X, Y = numbers(3, WIDTH)[2:] + 1, numbers(4, WIDTH)[3:]
SUM = (X + rms(Y, VECTORS["post"], 1e-6)) * VECTORS["scale"]
NORMED = rms(SUM, VECTORS["next"], 1e-6)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("precision", ["exact", "int16", "int8"])
def test_a_product_makes_the_normed_sum(
    precision: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in so few workgroups that each takes several rounds, and again for another product."""
    rows = 700
    monkeypatch.setattr(operands, "FEWEST_GROUPS", 1)
    reread = 4 * 4 * WIDTH
    text = one_layer(rows, precision)
    w = text.weights.matrices["w"]
    groups = -(
        -rows // MatvecTiling.for_made_row(w, text.device.features, text.device.limits, 1).rows
    )
    monkeypatch.setattr(operands, "REREAD_NBYTES", reread * -(-groups // rounds))
    old = put(X)
    summed, h = text.add_normed(old, put(Y), "post", "next", "scale", ["w"])
    assert isinstance(h, NormedSum)
    assert h.reread_nbytes == reread
    products = [text.linear(h, w) for _ in range(2)]
    device().run(text.recorder.plan())
    assert [call.grid[0] for call in text.recorder.calls] == [-(-groups // rounds)] * 2
    expected = NORMED @ truth(random_tensor(6, "w", (WIDTH, rows), "Q8_0")).T
    for y in products:
        assert_close(get(y), expected, ROUNDING.get(precision, F32_KERNEL))
    assert_close(get(summed), SUM, F32_KERNEL)
    np.testing.assert_array_equal(get(old), X)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("precision", ["exact", "int16"])
def test_gate_and_up_make_the_normed_sum(
    precision: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ffn = 96
    monkeypatch.setattr(operands, "FEWEST_GROUPS", 1)
    monkeypatch.setattr(operands, "REREAD_NBYTES", 16 * WIDTH * -(-3 // rounds))
    text = one_layer(2 * ffn, precision)
    _, h = text.add_normed(put(X), put(Y), "post", "next", "scale", ["w"])
    hidden = text.scratch(1, ffn)
    text.matmul.gate_up(h, text.weights.matrices["w"], hidden)
    device().run(text.recorder.plan())
    assert text.recorder.calls[0].grid[0] == -(-3 // rounds)
    gate, up = np.split(NORMED @ truth(random_tensor(6, "w", (WIDTH, 2 * ffn), "Q8_0")).T, 2, 1)
    assert_close(get(hidden), gelu(gate) * up, ROUNDING.get(precision, F32_KERNEL))


@pytest.mark.parametrize("made", [True, False], ids=["made", "buffer"])
@pytest.mark.parametrize("precision", ["exact", "int16"])
@pytest.mark.parametrize("second", ["Q6_K", "F16", "Q5_0"])
def test_matrices_of_two_formats(second: str, precision: str, made: bool) -> None:
    """The rows of the second come after those of the first."""
    if second == "F16":
        precision = "exact"  # what both read is float
    tensors = random_tensor(5, "a", (768, 100), "Q4_K"), random_tensor(5, "b", (768, 300), second)
    models = [load(tensor, hardware()) for tensor in tensors]
    models[0].allocate_vectors({"next": 768})
    models[0].write_vector("next", [1.0] * 768)
    x = numbers(1, 768)
    text = TextRecorder(models[0], Recorder(hardware()), inputs_of(1), 1, "f32", precision)
    readers = [model.matrices[name] for model, name in zip(models, "ab", strict=True)]
    h = text.norm_for(put(x), "next", ["a"]) if made else put(x)
    if precision == "int16" and not made:
        h = quantised(x, precision)[0]
    y = text.matmul.in_splits(h, *readers)
    device().run(text.recorder.plan())
    assert [call.kernel.name.split("/")[0] for call in text.recorder.calls] == ["matvec_two"]
    operand = rms(x, np.ones(768), 1e-6) if made else x
    expected = np.concatenate([operand @ truth(tensor).T for tensor in tensors], 1)
    assert_close(get(y), expected, ROUNDING.get(precision, F32_KERNEL))


def test_a_product_of_the_sum_itself_with_a_gate() -> None:
    text = one_layer(32, "int16")
    _, h = text.add_normed(put(X), put(Y), "post", scale="scale", readers=["w"])
    up = numbers(1, 64)
    gated = text.linear(h, text.weights.matrices["w"], up=Columns(put(up), 64, 32))
    device().run(text.recorder.plan())
    gate = SUM @ truth(random_tensor(6, "w", (WIDTH, 32), "Q8_0")).T
    assert_close(get(gated), gelu(gate) * up[:, 32:], F32_KERNEL)


def test_where_rows_are_made() -> None:
    """Not in software, not of several rows, and only where workgroups have the memory for it."""
    row = Tensor((1, 1536), 4 * 1536)
    on = NullDevice()
    assert can_make(on, row, 4 * row.nbytes)
    assert not can_make(on, Tensor((2, 1536), 2 * row.nbytes), 4 * row.nbytes)
    assert not can_make(on, row, operands.REREAD_NBYTES // operands.FEWEST_GROUPS + 1)
    wide = QuantisedTensor.scratch(1, 5376, "int16")
    assert not can_make(on, wide, 16 * 5376)
    shuffling = NullDevice(frozenset({"shuffle32"}))
    assert can_make(shuffling, wide, 16 * 5376)
    large = replace(DEFAULT_LIMITS, workgroup_nbytes=32 << 10)
    assert can_make(NullDevice(limits=large), wide, 16 * 5376)
    on.software = True
    assert not can_make(on, row, 4 * row.nbytes)
