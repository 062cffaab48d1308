"""The kernels of a denoising step against the reference: statistics, draws, acceptance."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.blank import e2b
from helpers.gpu import device, get, put
from helpers.matrices import load, matrix, truth
from helpers.matrix_units import small_tiles, use_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tolerance import F16_PRODUCT, F32_KERNEL, LOGPROB

from webgemma.denoising import Canvas, Denoising, position_bits
from webgemma.gemma.config import Diffusion
from webgemma.gemma.diffusion import (
    POSITION_WORDS,
    RESULT_WORDS,
    STATS_WORDS,
    CanvasRecorder,
    CanvasState,
    blank_result,
    packed_denoising,
    parse_result,
)
from webgemma.gemma.record.matmul_backward import MatmulBackward
from webgemma.gemma.record.matrix_tiling import MatrixUnits
from webgemma.gemma.text import Inputs
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder
from webgemma.reference.diffusion import SeededDraws, accept, entropy
from webgemma.reference.text import softmax

SCHEDULE = Denoising(steps=5, entropy_bound=1.5)
SEED = (7 << 32) + 5
CANVAS, STEP = 2, 3
STATS = np.dtype(
    [
        ("best", "u4"),
        ("sampled", "u4"),
        ("top", "f4"),
        ("total", "f4"),
        ("entropy", "f4"),
        ("logprob", "f4"),
    ]
)


class CanvasCase:
    """A canvas with only what the kernels of one step read and write."""

    def __init__(
        self,
        canvas: int,
        vocab: int,
        model: Model | None = None,
        width: int = 64,
        precision: str = "exact",
    ) -> None:
        model = model or Model(e2b(), device())
        diffusion = Diffusion(canvas, 4, 0.4, 0.8, 0.1, 1, 0.005, 4)
        model.config = replace(
            e2b(), vocab=vocab, width=width, diffusion=diffusion, suppressed=(3,)
        )
        self.state = CanvasState(
            denoising=put(np.frombuffer(packed_denoising(SCHEDULE, SEED, CANVAS, STEP), np.uint8)),
            expected=put(np.zeros((canvas, width), np.float32)),
            stats=put(np.zeros((canvas, STATS_WORDS), np.float32)),
            result=put(np.frombuffer(blank_result(canvas), np.uint8)),
            suppressed=put(np.array([3], np.uint32)),
        )
        self.ids = put(np.zeros(canvas, np.uint32))
        inputs = Inputs(put(np.array([0, canvas], np.uint32)), self.ids, {})
        self.canvas = CanvasRecorder(
            model, Recorder(device()), inputs, self.state, "f32", precision
        )

    def run(self) -> None:
        """Run what was recorded, and begin again."""
        device().run(self.canvas.recorder.plan())
        self.canvas.recorder.calls.clear()

    def stats(self) -> np.ndarray:
        return get(self.state.stats).reshape(-1).view(STATS)

    def write_stats(self, entropies: np.ndarray, best: np.ndarray) -> None:
        stats = np.zeros(len(entropies), STATS)
        stats["best"], stats["sampled"], stats["entropy"] = best, best + 1, entropies
        device().write(self.state.stats.buffer, stats.tobytes())

    def result(self) -> Canvas | None:
        return parse_result(get(self.state.result, np.uint8).tobytes(), CANVAS, STEP)


def random_logits(rows: int, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 3
    logits[0, 5] = 29  # one that is almost certain
    return logits


@pytest.mark.parametrize("vocab", [2, 257, 5000])
def test_statistics_are_the_references(vocab: int) -> None:
    canvas, first, rows = 9, 2, 6
    logits = random_logits(rows, max(vocab, 6))[:, :vocab]
    case = CanvasCase(canvas, vocab)
    case.canvas.canvas_stats(put(logits), first)
    case.run()
    stats = case.stats()[first : first + rows]
    z = logits / np.float32(SCHEDULE.temperature(STEP))
    padded = np.zeros((canvas, vocab), np.float32)
    padded[first : first + rows] = z
    drawn = SeededDraws(SEED, canvas, vocab).sample(CANVAS, STEP, padded)
    assert stats["best"].tolist() == logits.argmax(1).tolist()
    assert stats["sampled"].tolist() == drawn[first : first + rows].tolist()
    assert stats["top"].tolist() == logits.max(1).tolist()
    assert np.abs(stats["entropy"] - entropy(z)).max() <= LOGPROB
    assert np.abs(stats["logprob"] - np.log(softmax(logits).max(1))).max() <= LOGPROB
    assert not case.stats()[:first].view(np.uint8).any()


def test_draws_follow_the_probabilities() -> None:
    canvas = 256
    p = np.array([0.5, 0.25, 0.15, 0.1], np.float32)
    temperature = SCHEDULE.temperature(STEP)
    schedule = replace(SCHEDULE, steps=10**3, t_min=temperature, t_max=temperature)
    logits = np.tile(np.log(p) * np.float32(temperature), (canvas, 1))
    case = CanvasCase(canvas, 4)
    counts = np.zeros(4, int)
    tensor = put(logits)
    for step in range(1, 21):
        packed = packed_denoising(schedule, SEED, 0, step)
        device().write(case.state.denoising.buffer, packed)
        case.canvas.canvas_stats(tensor, 0)
        case.run()
        counts += np.bincount(case.stats()["sampled"], minlength=4)
    number = counts.sum()
    assert (np.abs(counts - number * p) <= 4 * np.sqrt(number * p * (1 - p))).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite(wrong: float) -> None:
    logits = random_logits(4, 300)
    logits[2, 299] = wrong
    case = CanvasCase(4, 300)
    case.canvas.canvas_stats(put(logits), 0)
    case.canvas.accept_tokens()
    case.run()
    assert (case.stats()["entropy"] < 0).tolist() == [False, False, True, False]
    assert case.result() is None


CASES: dict[int, CanvasCase] = {}


@settings(max_examples=40)
@given(
    h=st.sampled_from([1, 5, 64, 256]).flatmap(
        lambda n: arrays(np.float32, n, elements=st.floats(0, 12, width=16))
    )
)
def test_accepted_positions_and_noise(h: np.ndarray) -> None:
    canvas, vocab = len(h), 1000
    case = CASES.setdefault(canvas, CanvasCase(canvas, vocab))
    best = np.arange(canvas, dtype=np.uint32) % 900
    case.write_stats(h, best)
    device().write(case.state.result.buffer, blank_result(canvas))
    case.canvas.accept_tokens()
    case.run()
    result = case.result()
    assert result is not None
    kept = np.array(result.accepted)
    order = np.argsort(h, kind="stable")
    count = int(kept.sum())
    assert count >= 1
    assert kept[order[:count]].all()
    sums = np.cumsum(h[order], dtype=np.float64)
    slack = 1e-5 * SCHEDULE.entropy_bound  # the kernel adds up in float32
    assert count == 1 or sums[count - 2] <= SCHEDULE.entropy_bound + slack
    assert count == canvas or sums[count - 1] > SCHEDULE.entropy_bound - slack
    noise = [position_bits(SEED, CANVAS, STEP, p, sampling=False) % vocab for p in range(canvas)]
    ids = np.where(kept, best + 1, noise).tolist()
    assert list(result.ids) == get(case.ids, np.uint32).tolist() == ids
    assert list(result.best) == best.tolist()
    assert abs(result.entropy - h.mean()) <= 1e-5 * max(1, h.mean())


def test_a_canvas_is_done_when_nothing_changes_and_the_entropy_is_low() -> None:
    case = CanvasCase(6, 50)
    best = np.arange(6, dtype=np.uint32)

    def done(entropies: float, best: np.ndarray, step: int = STEP) -> bool:
        device().write(case.state.denoising.buffer, packed_denoising(SCHEDULE, SEED, CANVAS, step))
        case.write_stats(np.full(6, entropies, np.float32), best)
        case.canvas.accept_tokens()
        case.run()
        result = case.result()
        assert result is not None
        return result.done

    assert not done(0.001, best)  # there was no step before
    assert done(0.001, best)
    assert not done(0.2, best)  # too uncertain
    assert not done(0.001, best[::-1])  # something changed
    assert done(0.2, best, SCHEDULE.steps)  # the last step


def test_a_step_accepts_what_the_reference_accepts() -> None:
    logits = random_logits(32, 700)
    case = CanvasCase(32, 700)
    case.canvas.canvas_stats(put(logits), 0)
    case.canvas.accept_tokens()
    case.run()
    result = case.result()
    assert result is not None
    h = entropy(logits / np.float32(SCHEDULE.temperature(STEP)))
    assert list(result.accepted) == accept(h, SCHEDULE.entropy_bound).tolist()


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.usable])
def test_expected_embeddings_in_every_format(name: str) -> None:
    assert_expected(name, 256, 75, 5)


@pytest.mark.parametrize(("width", "vocab", "rows"), [(4, 33, 1), (68, 200, 70), (192, 9000, 3)])
def test_expected_embeddings_of_awkward_shapes(width: int, vocab: int, rows: int) -> None:
    assert_expected("F32", width, vocab, rows)


def test_expected_embeddings_of_a_table_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 40 * FORMATS["Q8_0"].row_nbytes(256)
    monkeypatch.setattr(device(), "limits", replace(device().limits, binding_nbytes=nbytes))
    assert_expected("Q8_0", 256, 75, 5, parts=3)


@pytest.mark.parametrize("gap", [4, 12, 60])
def test_expected_embeddings_where_most_ids_have_almost_no_probability(gap: int) -> None:
    logits = random_logits(5, 300) / 10 - 30
    rows = np.arange(5)
    logits[rows, 50 * rows], logits[rows, 299 - rows], logits[rows, 17] = 29, 28, 29 - gap
    assert_expected("F32", 68, 300, 5, logits=logits)


@pytest.mark.parametrize(("name", "vocab"), [("Q6_K", 1000), ("Q8_0", 96)])
def test_expected_embeddings_on_matrix_units(
    name: str, vocab: int, matrix_units: MatrixUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiles(monkeypatch, *small_tiles(matrix_units))
    assert_expected(name, 256, vocab, 21, precision="f16", bound=F16_PRODUCT)


def assert_expected(
    name: str,
    width: int,
    vocab: int,
    rows: int,
    parts: int = 1,
    logits: np.ndarray | None = None,
    precision: str = "exact",
    bound: float = F32_KERNEL,
) -> None:
    tensor = replace(matrix(name, width, vocab), name="token_embd.weight")
    model = load(tensor)
    assert len(model.matrices["token_embd.weight"].parts) == parts
    case = CanvasCase(rows + 3, vocab, model, width, precision)
    logits = random_logits(rows, vocab) if logits is None else logits
    uploaded = put(logits)
    case.canvas.canvas_stats(uploaded, 2)
    MatmulBackward(case.canvas.matmul).expected_embedding(
        model.matrices["token_embd.weight"],
        uploaded,
        case.state.stats,
        case.state.denoising,
        2,
        case.state.expected,
    )
    ops = [call.kernel.name.split()[0] for call in case.canvas.recorder.calls]
    assert ("round_f16" in ops) == (precision == "f16")
    case.run()
    p = softmax(logits.astype(np.float64) / SCHEDULE.temperature(STEP))
    expected = p @ truth(tensor).astype(np.float64) * np.sqrt(width)
    found = get(case.state.expected)
    assert np.abs(found[2 : 2 + rows] - expected).max() <= bound * np.abs(expected).max()
    assert not found[:2].any()
    assert not found[2 + rows :].any()


def test_suppressed_tokens_have_no_probability() -> None:
    width, vocab = 64, 50
    model = load(replace(matrix("F32", width, vocab), name="token_embd.weight"))
    case = CanvasCase(4, vocab, model, width)
    rng = np.random.default_rng(1)
    logits = case.canvas.logits(put(rng.standard_normal((4, width)).astype(np.float32)))
    case.canvas.canvas_stats(logits, 0)
    case.run()
    values = get(logits)
    assert (values[:, 3] < -1e29).all()
    assert np.isfinite(case.stats()["entropy"]).all()
    assert (np.delete(values, 3, 1) > -31).all()
    assert case.state.result.nbytes // 4 == RESULT_WORDS + POSITION_WORDS * 4


def test_the_sum_of_a_canvas_and_its_conditioning_is_normed() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 5, 68)).astype(np.float32)
    case = CanvasCase(5, 50)
    sums = put(x)
    case.canvas.recorder.call("sum_norm", (5,), y=put(y), x=sums, width=68, eps=1e-6, THREADS=64)
    case.run()
    total = (x + y).astype(np.float64)
    expected = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-6)
    assert np.abs(get(sums) - expected).max() <= F32_KERNEL * np.abs(expected).max()
