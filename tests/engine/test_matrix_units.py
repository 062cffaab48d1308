"""Models on matrix units against the reference: text, experts, adapters, canvases, in chunks."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.gpu import device, hardware
from helpers.sessions import open_tiny, take
from helpers.tiny import DIFFUSION, GEMMA3, MIXED, MOE, Tiny
from helpers.tiny_adapter import EXPERTS, LAYER, tiny_adapter, tiny_pairs
from tolerance import F16_LOGITS

from webgemma.denoising import Canvas, Denoising
from webgemma.engine import selftest
from webgemma.engine.batching import Batch
from webgemma.engine.diffusion_session import DiffusionSession
from webgemma.engine.selftest import check_matrix_units
from webgemma.engine.session import Session
from webgemma.engine.slots import Slots
from webgemma.gemma.config import Config
from webgemma.gemma.record.matrix_tiling import MatrixUnits
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.graph import Recorder
from webgemma.reference.diffusion import DiffusionModel, SeededDraws
from webgemma.reference.lora import AdaptedWeights, Pair
from webgemma.reference.text import Cache, TextModel
from webgemma.reference.weights import Weights
from webgemma.settings import resolve
from webgemma.sync import run_sync

pytestmark = pytest.mark.usefixtures("matrix_units")

# Heads of sizes that matrix units attend with. F16 and BF16 compile fastest on a CPU.
TEXT = replace(MIXED, pattern="sfsf", shared=2, formats=("F16", "BF16"))
WIDE_HEADS = {"head_dims": (64, 128), "width": 128, "formats": ("F16",)}
KINDS = {
    "text": TEXT,
    "experts": replace(MOE, pattern="sf", **WIDE_HEADS),
    "unfused experts": replace(MOE, pattern="sf", fused=False, **WIDE_HEADS),
    "gemma3": replace(GEMMA3, pattern="sf", **WIDE_HEADS | {"head_dims": (64, 64)}),
}
IDS = [2, *(24 + i * 7 % 280 for i in range(1, 60))]
CHUNKINGS = {"in one batch": (1, 64), "in chunks": (1, 24)}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each op was recorded, with the provider of its product."""
    counts: Counter[str] = Counter()
    call = Recorder.call

    def counted(self: Recorder, op: str, grid: Any, **arguments: Any) -> Any:
        counts[f"{op} {arguments.get('tiled_product', '')}".strip()] += 1
        return call(self, op, grid, **arguments)

    monkeypatch.setattr(Recorder, "call", counted)
    return counts


def set_chunks(monkeypatch: pytest.MonkeyPatch, chunking: str) -> None:
    rows = CHUNKINGS[chunking]
    monkeypatch.setattr("webgemma.engine.slots.CHUNK", max(rows))
    monkeypatch.setattr("webgemma.engine.session.PLAN_ROWS", rows)


@contextmanager
def session_of(tiny: Tiny, pairs: dict[str, Pair] | None = None) -> Iterator[Session]:
    """Yield a session that computes in float16."""
    gguf, config = open_tiny(tiny)
    model = run_sync(Model.load(gguf, config, device()))
    if pairs:
        model.set_adapters([(tiny_adapter(pairs).pairs, 1.0)])
    session = Session(model, 128, kv="f16", precision="f16")
    try:
        yield session
    finally:
        session.close()
        model.close()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare logits, in their standard deviations; all but near ties have the same best token."""
    error = np.sqrt(np.mean((found - expected) ** 2)) / expected.std()
    assert error <= F16_LOGITS
    chosen = expected[np.arange(len(expected)), found.argmax(1)]
    assert (expected.max(1) - chosen <= F16_LOGITS * expected.std()).all()


def logits(session: Session) -> np.ndarray:
    return np.frombuffer(run_sync(session.logits(IDS)), np.float32).reshape(len(IDS), -1)


def assert_likeliest(logits: np.ndarray, tokens: Sequence[int]) -> None:
    """Assert that each token is the likeliest of its row, but for what rounding may change."""
    for row, token in zip(logits, tokens, strict=True):
        assert row.max() - row[token] <= F16_LOGITS * row.std()


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_those_of_the_reference(
    kind: str, chunking: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_chunks(monkeypatch, chunking)
    gguf, config = open_tiny(KINDS[kind])
    reference = TextModel(config, Weights(gguf))
    with session_of(KINDS[kind]) as session:
        found, expected = logits(session), reference.forward(IDS)
        assert_close(found, expected)
        assert calls["attention_matrix_units"] > 0
        assert calls["attention_prefill"] == 0
        assert calls["matmul matrix_units"] > 0
        assert (calls["expert_matmul matrix_units"] > 0) == ("experts" in kind)
        tokens = take(session, IDS, 6)
    for at, token in enumerate(tokens):
        assert_likeliest(reference.forward(IDS + tokens[:at], last_only=True), [token])


@pytest.mark.parametrize("kind", ["text", "experts"])
def test_conversations_that_decode_together(
    kind: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than eight, matrix units multiply them, except where matrices are small."""
    monkeypatch.setattr("webgemma.gemma.record.matmul.FEWEST_PRODUCTS", 16 * 4000)
    gguf, config = open_tiny(KINDS[kind])
    reference = TextModel(config, Weights(gguf))
    model = run_sync(Model.load(gguf, config, device()))
    batch = Batch(Slots(model, 64, precision="f16", count=16))
    prompts = [IDS[at : at + 9] for at in range(16)]
    generations = []
    for index, ids in enumerate(prompts):
        session = Session.in_slot(batch, index)
        generations.append(run_sync(session.begin(ids, resolve({"temperature": 0}), 0)))
    read = calls["matmul matrix_units"]
    for _ in range(3):
        for ids, generation in zip(prompts, generations, strict=True):
            sampled = run_sync(generation.next())
            assert sampled is not None
            assert_likeliest(reference.forward(ids, last_only=True), [sampled.token])
            ids.append(sampled.token)
    assert calls["matmul matrix_units"] > read
    assert calls["matmul_software"] > 0  # as matvec is called on a software GPU
    assert (calls["expert_matmul matrix_units"] > 0) == (kind == "experts")
    batch.close()
    model.close()


@pytest.mark.parametrize(("format", "ffn"), [("F16", 20), ("F32", 32)])
def test_experts_that_matrix_units_do_not_multiply(
    format: str, ffn: int, calls: Counter[str]
) -> None:
    """Rows of eights only; and what a file keeps in float32 must not be rounded."""
    tiny = replace(KINDS["experts"], experts=(6, 2, ffn), formats=(format,))
    gguf, config = open_tiny(tiny)
    with session_of(tiny) as session:
        assert_close(logits(session), TextModel(config, Weights(gguf)).forward(IDS))
    assert calls["expert_matmul matrix_units"] == 0


ADAPTED = [("text", LAYER), ("experts", LAYER), ("experts", EXPERTS)]


@pytest.mark.parametrize(("kind", "targets"), ADAPTED)
def test_adapters(
    kind: str, targets: tuple[str, ...], calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_chunks(monkeypatch, "in chunks")
    gguf, config = open_tiny(KINDS[kind])
    pairs = tiny_pairs(gguf, targets, strength=0.1)
    expected = TextModel(config, AdaptedWeights(gguf, [pairs])).forward(IDS)
    with session_of(KINDS[kind], pairs) as session:
        assert_close(logits(session), expected)
    assert calls["matmul matrix_units"] > 0
    assert np.abs(expected - TextModel(config, Weights(gguf)).forward(IDS)).max() > 1


def test_a_canvas(calls: Counter[str]) -> None:
    """A step of DiffusionGemma: its tokens, and how sure it is of them."""
    gguf, config = open_tiny(replace(DIFFUSION, pattern="sf", **WIDE_HEADS))
    denoising, ids = Denoising(steps=1, entropy_bound=3.0), IDS[:20]
    expected = denoised(gguf, config, denoising, ids)
    model = run_sync(Model.load(gguf, config, device()))
    session = DiffusionSession(model, 128, kv="f16", precision="f16")

    async def first_step() -> Canvas:
        steps = session.denoise(ids, denoising, 3)
        canvas = await anext(steps)
        await steps.aclose()
        return canvas

    found = run_sync(first_step())
    session.close()
    model.close()
    assert calls["attention_matrix_units"] > 0
    assert found.ids == expected.ids
    assert found.best == expected.best
    assert found.logprobs == pytest.approx(expected.logprobs, abs=0.01)


def denoised(gguf: Gguf, config: Config, denoising: Denoising, ids: list[int]) -> Canvas:
    """Return the first step of the reference."""
    model, cache = DiffusionModel(config, Weights(gguf)), Cache(config)
    model.encode(ids, cache)
    draws = SeededDraws(3, model.canvas, config.vocab)
    return next(iter(model.denoise(cache, denoising, draws, 0)))


# The self-test, which gives up matrix units that compute wrongly


def test_right_matrix_units_pass_the_selftest() -> None:
    tried = copy.copy(hardware())
    assert run_sync(check_matrix_units(tried)) is None
    assert MatrixUnits.of(tried) is not None


@pytest.mark.parametrize("what", ["a product of matrices", "attention of matrices"])
def test_wrong_matrix_units_are_given_up(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = selftest._judge

    def judged(name: str, probe: Any, values: Sequence[float]) -> None:
        judge(name, probe, [2 * value + 1 for value in values] if probe.what == what else values)

    monkeypatch.setattr(selftest, "_judge", judged)
    tried = copy.copy(hardware())
    sentence = run_sync(check_matrix_units(tried))
    assert sentence is not None
    assert what in sentence
    assert MatrixUnits.of(tried) is None
    assert MatrixUnits.of(hardware()) is not None
