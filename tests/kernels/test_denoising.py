"""The kernels of a denoising step against the reference: findings, draws, acceptance."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from helpers.blank import e2b
from helpers.gpu import device, get, put
from helpers.matrices import load, matrix, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tolerance import F32_KERNEL, LOGPROB

from webgemma.denoising import Canvas, Denoising, position_bits
from webgemma.gemma.config import Diffusion
from webgemma.gemma.diffusion import (
    FINDING,
    LEFT,
    POSITION,
    CanvasRecorder,
    Easel,
    blank_left,
    canvas_from,
    packed_denoising,
)
from webgemma.gemma.text import Inputs
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder
from webgemma.reference.diffusion import SeededDraws, accept, entropy
from webgemma.reference.text import softmax

SCHEDULE = Denoising(steps=5, entropy_bound=1.5)
SEED = (7 << 32) + 5
BLOCK, STEP = 2, 3
FINDING_TYPE = np.dtype("u4,u4,f4,f4,f4,f4")  # best, sampled, top, total, entropy, logprob


class Bench:
    """A canvas with nothing but what one step's kernels read and write."""

    def __init__(self, canvas: int, vocab: int, model: Model | None = None, width: int = 64):
        model = model or Model(e2b(), device())
        diffusion = Diffusion(canvas, 4, 0.4, 0.8, 0.1, 1, 0.005, 4)
        model.config = replace(
            e2b(), vocab=vocab, width=width, diffusion=diffusion, suppressed=(3,)
        )
        self.easel = Easel(
            denoising=put(np.frombuffer(packed_denoising(SCHEDULE, SEED, BLOCK, STEP), np.uint8)),
            expected=put(np.zeros((canvas, width), np.float32)),
            findings=put(np.zeros((canvas, FINDING), np.float32)),
            left=put(np.frombuffer(blank_left(canvas), np.uint8)),
            silent=put(np.array([3], np.uint32)),
        )
        self.ids = put(np.zeros(canvas, np.uint32))
        inputs = Inputs(put(np.array([0, canvas], np.uint32)), self.ids, {}, {})
        self.canvas = CanvasRecorder(model, Recorder(device()), inputs, self.easel, "kv_f32")

    def run(self) -> None:
        device().run(self.canvas.recorder.plan())
        self.canvas.recorder = Recorder(device())

    def findings(self) -> np.ndarray:
        return get(self.easel.findings).reshape(-1).view(FINDING_TYPE)

    def write_findings(self, entropies: np.ndarray, best: np.ndarray) -> None:
        found = np.zeros(len(entropies), FINDING_TYPE)
        found["f0"], found["f1"], found["f4"] = best, best + 1, entropies
        device().write(self.easel.findings.buffer, found.tobytes())

    def left(self) -> Canvas | None:
        return canvas_from(get(self.easel.left, np.uint8).tobytes(), BLOCK, STEP)


def random_logits(rows: int, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 3
    logits[0, 5] = 29  # one that is almost certain
    return logits


@pytest.mark.parametrize("vocab", [2, 257, 5000])
def test_findings_are_the_references(vocab: int) -> None:
    canvas, first, rows = 9, 2, 6
    logits = random_logits(rows, max(vocab, 6))[:, :vocab]
    bench = Bench(canvas, vocab)
    bench.canvas.survey(put(logits), first)
    bench.run()
    found = bench.findings()[first : first + rows]
    z = logits / np.float32(SCHEDULE.temperature(STEP))
    padded = np.zeros((canvas, vocab), np.float32)
    padded[first : first + rows] = z
    drawn = SeededDraws(SEED, canvas, vocab).sample(BLOCK, STEP, padded)
    assert found["f0"].tolist() == logits.argmax(1).tolist()
    assert found["f1"].tolist() == drawn[first : first + rows].tolist()
    assert found["f2"].tolist() == logits.max(1).tolist()
    assert np.abs(found["f4"] - entropy(z)).max() <= LOGPROB
    assert np.abs(found["f5"] - np.log(softmax(logits).max(1))).max() <= LOGPROB
    assert not bench.findings()[:first].view(np.uint8).any()


def test_draws_have_the_probabilities_they_should() -> None:
    canvas = 256
    p = np.array([0.5, 0.25, 0.15, 0.1], np.float32)
    logits = np.tile(np.log(p) * np.float32(SCHEDULE.temperature(STEP)), (canvas, 1))
    bench = Bench(canvas, 4)
    counts = np.zeros(4, int)
    tensor = put(logits)
    for step in range(1, 21):
        packed = packed_denoising(replace(SCHEDULE, steps=10**3), SEED, 0, step)
        packed = struct.pack("<f", 1 / SCHEDULE.temperature(STEP)) + packed[4:]
        device().write(bench.easel.denoising.buffer, packed)
        bench.canvas.survey(tensor, 0)
        bench.run()
        counts += np.bincount(bench.findings()["f1"], minlength=4)
    number = counts.sum()
    assert (np.abs(counts - number * p) <= 4 * np.sqrt(number * p * (1 - p))).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_no_number(wrong: float) -> None:
    logits = random_logits(4, 300)
    logits[2, 299] = wrong
    bench = Bench(4, 300)
    bench.canvas.survey(put(logits), 0)
    bench.canvas.accept()
    bench.run()
    assert (bench.findings()["f4"] < 0).tolist() == [False, False, True, False]
    assert bench.left() is None


BENCHES: dict[int, Bench] = {}


@settings(max_examples=40)
@given(
    h=st.sampled_from([1, 5, 64, 256]).flatmap(
        lambda n: arrays(np.float32, n, elements=st.floats(0, 12, width=16))
    )
)
def test_accepted_positions_and_noise(h: np.ndarray) -> None:
    canvas, vocab = len(h), 1000
    bench = BENCHES.setdefault(canvas, Bench(canvas, vocab))
    best = np.arange(canvas, dtype=np.uint32) % 900
    bench.write_findings(h, best)
    device().write(bench.easel.left.buffer, blank_left(canvas))
    bench.canvas.accept()
    bench.run()
    left = bench.left()
    assert left is not None
    kept = np.array(left.accepted)
    order = np.argsort(h, kind="stable")
    count = int(kept.sum())
    assert count >= 1
    assert kept[order[:count]].all()
    sums = np.cumsum(h[order], dtype=np.float64)
    slack = 1e-5 * SCHEDULE.entropy_bound  # the kernel adds up in float32
    assert count == 1 or sums[count - 2] <= SCHEDULE.entropy_bound + slack
    assert count == canvas or sums[count - 1] > SCHEDULE.entropy_bound - slack
    noise = [position_bits(SEED, BLOCK, STEP, p, sampling=False) % vocab for p in range(canvas)]
    ids = np.where(kept, best + 1, noise).tolist()
    assert list(left.ids) == get(bench.ids, np.uint32).tolist() == ids
    assert list(left.best) == best.tolist()
    assert abs(left.entropy - h.mean()) <= 1e-5 * max(1, h.mean())


def test_a_block_is_done_when_nothing_changes_and_all_is_sure() -> None:
    bench = Bench(6, 50)
    best = np.arange(6, dtype=np.uint32)

    def done(entropies: float, best: np.ndarray, step: int = STEP) -> bool:
        device().write(bench.easel.denoising.buffer, packed_denoising(SCHEDULE, SEED, BLOCK, step))
        bench.write_findings(np.full(6, entropies, np.float32), best)
        bench.canvas.accept()
        bench.run()
        left = bench.left()
        assert left is not None
        return left.done

    assert not done(0.001, best)  # there was no step before
    assert done(0.001, best)
    assert not done(0.2, best)  # too uncertain
    assert not done(0.001, best[::-1])  # something changed
    assert done(0.2, best, SCHEDULE.steps)  # the last step


def test_a_step_leaves_what_the_reference_accepts() -> None:
    logits = random_logits(32, 700)
    bench = Bench(32, 700)
    bench.canvas.survey(put(logits), 0)
    bench.canvas.accept()
    bench.run()
    left = bench.left()
    assert left is not None
    h = entropy(logits / np.float32(SCHEDULE.temperature(STEP)))
    assert list(left.accepted) == accept(h, SCHEDULE.entropy_bound).tolist()


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.usable])
def test_expected_embeddings_in_every_format(name: str) -> None:
    assert_expected(name, 256, 75, 5)


@pytest.mark.parametrize(("width", "vocab", "rows"), [(4, 33, 1), (68, 200, 70), (192, 9000, 3)])
def test_expected_embeddings_of_awkward_shapes(width: int, vocab: int, rows: int) -> None:
    assert_expected("F32", width, vocab, rows)


def test_expected_embeddings_of_a_table_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 40 * FORMATS["Q8_0"].row_nbytes(256)
    monkeypatch.setattr(device(), "limits", replace(device().limits, binding_nbytes=room))
    assert_expected("Q8_0", 256, 75, 5, parts=3)


@pytest.mark.parametrize("gap", [4, 12, 60])
def test_expected_embeddings_where_most_ids_have_no_share(gap: int) -> None:
    logits = random_logits(5, 300) / 10 - 30
    rows = np.arange(5)
    logits[rows, 50 * rows], logits[rows, 299 - rows], logits[rows, 17] = 29, 28, 29 - gap
    assert_expected("F32", 68, 300, 5, logits=logits)


def assert_expected(
    name: str,
    width: int,
    vocab: int,
    rows: int,
    parts: int = 1,
    logits: np.ndarray | None = None,
) -> None:
    tensor = replace(matrix(name, width, vocab), name="token_embd.weight")
    model = load(tensor)
    assert len(model.matrices["token_embd.weight"].parts) == parts
    bench = Bench(rows + 3, vocab, model, width)
    logits = random_logits(rows, vocab) if logits is None else logits
    held = put(logits)
    bench.canvas.survey(held, 2)
    bench.canvas.expect(held, 2)
    bench.run()
    p = softmax(logits.astype(np.float64) / SCHEDULE.temperature(STEP))
    expected = p @ truth(tensor).astype(np.float64) * np.sqrt(width)
    found = get(bench.easel.expected)
    assert np.abs(found[2 : 2 + rows] - expected).max() <= F32_KERNEL * np.abs(expected).max()
    assert not found[:2].any()
    assert not found[2 + rows :].any()


def test_silent_tokens_have_no_probability() -> None:
    width, vocab = 64, 50
    model = load(replace(matrix("F32", width, vocab), name="token_embd.weight"))
    bench = Bench(4, vocab, model, width)
    rng = np.random.default_rng(1)
    logits = bench.canvas.logits(put(rng.standard_normal((4, width)).astype(np.float32)))
    bench.canvas.survey(logits, 0)
    bench.run()
    values = get(logits)
    assert (values[:, 3] < -1e29).all()
    assert np.isfinite(bench.findings()["f4"]).all()
    assert (np.delete(values, 3, 1) > -31).all()
    assert bench.easel.left.nbytes // 4 == LEFT + POSITION * 4


def test_the_sum_of_a_canvas_and_its_conditioning_is_normed() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 5, 68)).astype(np.float32)
    bench = Bench(5, 50)
    held = put(x)
    bench.canvas.call("sum_norm", (5,), [68, 1e-6], put(y), held, pieces=("sum",), THREADS=64)
    bench.run()
    total = (x + y).astype(np.float64)
    expected = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-6)
    assert np.abs(get(held) - expected).max() <= F32_KERNEL * np.abs(expected).max()
