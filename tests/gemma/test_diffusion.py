"""DiffusionGemma on the GPU: as transformers draw by draw, and as the reference from a seed."""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from conftest import needs_shared
from helpers.blank import BlankGguf
from helpers.blank import diffusion as blank_diffusion
from helpers.gpu import device, get, hardware
from helpers.recorded import BLOCKS, DENOISING, Trace, array, opened, prompt
from helpers.tiny import DIFFUSION, Tiny, tiny_gguf
from tolerance import GPU_LOGITS_OF_TRANSFORMERS, RANDOM_LOGITS

from webgemma.denoising import Canvas, Denoising
from webgemma.device import Plan
from webgemma.device.null import NullDevice
from webgemma.engine.diffusion_session import DiffusionSession
from webgemma.errors import DeviceError, GgufError, InputError
from webgemma.gemma import diffusion
from webgemma.gemma.config import Config
from webgemma.gemma.diffusion import CanvasRecorder, canvas_from, packed_denoising
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.graph import Recorder, Tensor
from webgemma.reference.diffusion import DiffusionModel, SeededDraws, accept, entropy
from webgemma.reference.text import Cache
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

SHORT = Denoising(steps=2, entropy_bound=3.0)  # each step multiplies what rounding differs by


def session_of(gguf: Gguf, context: int = 256) -> DiffusionSession:
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    return DiffusionSession(model, context, kv="f32")


def tiny_session(tiny: Tiny = DIFFUSION, context: int = 256) -> tuple[Gguf, DiffusionSession]:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    return gguf, session_of(gguf, context)


async def canvases(
    session: DiffusionSession, ids: Sequence[int], denoising: Denoising, seed: int, blocks: int = 1
) -> list[Canvas]:
    found: list[Canvas] = []
    async for canvas in session.denoise(ids, denoising, seed):
        found.append(canvas)
        if canvas.done and canvas.block + 1 == blocks:
            break
    return found


def reference(
    gguf: Gguf, ids: Sequence[int], denoising: Denoising, seed: int, blocks: int = 1
) -> list[Canvas]:
    config = Config.from_gguf(gguf)
    model = DiffusionModel(config, Weights(gguf))
    cache, known, found = Cache(config), list(ids), []
    draws = SeededDraws(seed, model.canvas, config.vocab)
    for block in range(blocks):
        model.encode(known[cache.length :], cache)
        found += model.denoise(cache, denoising, draws, block)
        known += found[-1].best
    return found


def assert_same(found: list[Canvas], truth: list[Canvas]) -> None:
    for mine, theirs in zip(found, truth, strict=True):
        assert mine[:5] == theirs[:5]  # block, step, ids, accepted, best
        assert mine.done == theirs.done
        assert mine.entropy == pytest.approx(theirs.entropy, abs=1e-2)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=5e-2)


class Replay:
    """A session's canvas in two plans, so that recorded logits can come between them."""

    def __init__(self, session: DiffusionSession) -> None:
        self.session = session
        canvas = self.recorder()
        self.logits: Tensor = canvas.logits(canvas.body())
        self.look: Plan = canvas.recorder.plan()
        canvas = self.recorder()
        canvas.survey(self.logits, 0)
        canvas.expect(self.logits, 0)
        canvas.accept()
        self.settle: Plan = canvas.recorder.plan()

    def recorder(self) -> CanvasRecorder:
        session, recorder = self.session, Recorder(device())
        return CanvasRecorder(session.model, recorder, session._canvas, session._easel, "kv_f32")

    def begin(self, ids: Sequence[int], noise: np.ndarray) -> None:
        """Read what is not read yet; a canvas of this noise follows."""
        session = self.session
        turn = run_sync(session._take_turn())
        for batch, count in session._chunks(list(ids)):
            at = len(session.tokens)
            run_sync(session._read_chunk(batch, list(ids[at : at + count]), turn))
        session._stretch(0, 0)
        self.put(noise)

    def put(self, ids: np.ndarray) -> None:
        device().write(self.session._canvas.ids.buffer, ids.astype("<u4").tobytes())

    def step(self, block: int, step: int, logits: np.ndarray) -> tuple[np.ndarray, Canvas]:
        """The step's own logits, and what it makes of those that are given."""
        device().run(self.look)
        own = get(self.logits).copy()
        device().write(self.logits.buffer, logits.astype("<f4").tobytes())
        packed = packed_denoising(DENOISING, 0, block, step)
        device().write(self.session._easel.denoising.buffer, packed)
        device().run(self.settle)
        words = get(self.session._easel.left, np.uint32)
        left = canvas_from(words.tobytes(), block, step)
        assert left is not None
        return own, left


@needs_shared
def test_as_transformers() -> None:
    with opened() as gguf:
        session = session_of(gguf)
        replay = Replay(session)
        replay.begin(prompt(), array("canvas0"))
        hidden = get(session._hidden)[: len(prompt())]
        assert np.abs(hidden - array("encoder_last_hidden")).max() <= GPU_LOGITS_OF_TRANSFORMERS
        conditioning = array("selfcond_logits") * np.float32(DENOISING.temperature(1))
        own, _ = replay.step(0, 1, conditioning)
        assert np.abs(own - array("logits_step1")).max() <= GPU_LOGITS_OF_TRANSFORMERS
        replay.put(array("canvas0"))
        own, _ = replay.step(0, 2, conditioning)
        truth = array("logits_step2_selfcond")
        assert np.abs(own - truth).max() <= GPU_LOGITS_OF_TRANSFORMERS
        session.close()
        session.model.close()


@needs_shared
def test_a_recorded_generation_draw_by_draw() -> None:
    trace, known = Trace(), prompt()
    with opened() as gguf:
        session = session_of(gguf)
        replay = Replay(session)
        for block in range(BLOCKS):
            replay.begin(known, trace.noise(block, 0))
            for step in range(1, DENOISING.steps + 1):
                truth = trace.logits[block, step - 1]
                own, left = replay.step(block, step, truth)
                assert np.abs(own - truth).max() <= GPU_LOGITS_OF_TRANSFORMERS
                kept = accept(entropy(truth / DENOISING.temperature(step)), 2.0)
                assert list(left.accepted) == kept.tolist()
                drawn = trace.sample(block, step, truth)
                replay.put(np.where(kept, drawn, trace.noise(block, step)))
                assert left.done == (step == DENOISING.steps)
            known += left.best
        session.close()
        session.model.close()
    assert known == trace.ids


@pytest.mark.parametrize("seed", [1, 2**40 + 3])
def test_blocks_are_the_references(seed: int) -> None:
    ids = [2, *range(30, 51)]
    gguf, session = tiny_session()
    found = run_sync(canvases(session, ids, SHORT, seed, blocks=2))
    assert_same(found, reference(gguf, ids, SHORT, seed, blocks=2))
    assert session.tokens == ids + list(found[1].best)  # the last block is not read
    session.close()
    session.model.close()


@pytest.mark.parametrize(("format", "precision"), [("BF16", "exact"), ("Q8_0", "int16")])
def test_cut_up_as_for_a_real_gpu(format: str, precision: str) -> None:
    tiny = replace(DIFFUSION, formats=(format,), canvas=40)
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), hardware()))
    session = DiffusionSession(model, 256, kv="f32", precision=precision)
    one = replace(SHORT, steps=1)
    (found,) = run_sync(canvases(session, [2, *range(30, 51)], one, 5))
    (truth,) = reference(gguf, [2, *range(30, 51)], one, 5)
    assert found.best == truth.best
    assert found.logprobs == pytest.approx(truth.logprobs, abs=RANDOM_LOGITS["int16"])
    session.close()
    session.model.close()


def test_logits_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion, "LOGITS_NBYTES", 1)
    wide = replace(DIFFUSION, canvas=80, suppressed=(7, 9), formats=("Q8_0",))
    gguf, session = tiny_session(wide)
    one = replace(SHORT, steps=1)
    found = run_sync(canvases(session, [2, 30, 31], one, 5))
    names = [dispatch.name for dispatch in session._plans["denoise", 80].dispatches]
    assert names.count("survey") == 2
    assert_same(found, reference(gguf, [2, 30, 31], one, 5))
    session.close()
    session.model.close()


def test_after_more_than_the_rings_hold() -> None:
    """The canvas stands where a sliding layer's ring has come round."""
    long = replace(DIFFUSION, context=1024)
    ids = [2, *(30 + (7 * i) % 200 for i in range(531))]
    gguf, session = tiny_session(long, 1024)
    assert session._cache.ring == 520
    one = replace(SHORT, steps=1)
    assert_same(run_sync(canvases(session, ids, one, 4)), reference(gguf, ids, one, 4))
    session.close()
    session.model.close()


def test_what_was_read_is_not_read_again_and_a_reply_can_be_left() -> None:
    ids = [2, *range(30, 51)]
    _, session = tiny_session()
    found = run_sync(canvases(session, ids, SHORT, 3))

    async def leave() -> None:
        stream = session.denoise(ids, SHORT, 3)
        async for _ in stream:
            break
        await stream.aclose()

    run_sync(leave())
    assert session.tokens == ids
    assert run_sync(canvases(session, ids, SHORT, 3)) == found
    copy = session.fork()
    assert isinstance(copy, DiffusionSession)
    assert run_sync(canvases(copy, ids, SHORT, 3)) == found
    copy.close()
    session.close()
    session.model.close()


def test_a_canvas_leaves_what_was_read_alone() -> None:
    ids = [2, *range(30, 51)]
    _, session = tiny_session()

    async def held() -> bytes:
        return b"".join([piece async for piece in session._cache.read(len(ids))])

    async def go() -> list[bytes]:
        found = []
        async for canvas in session.denoise(ids, SHORT, 3):
            found.append(await held())
            if canvas.done:
                break
        return found

    replay = Replay(session)
    replay.begin(ids, np.zeros(DIFFUSION.canvas))
    before = run_sync(held())
    assert any(before)
    assert run_sync(go()) == [before, before]
    session.close()
    session.model.close()


def test_memory_is_given_back() -> None:
    held = device().nbytes
    _, session = tiny_session()
    run_sync(canvases(session, [2, 30], SHORT, 3))
    session.close()
    session.model.close()
    assert device().nbytes == held


def test_the_true_shapes_on_the_least_that_webgpu_promises() -> None:
    """A canvas of 256 after 512 tokens: no kernel sees more than 128 MiB of a buffer."""
    null = NullDevice()
    blank = BlankGguf(blank_diffusion())
    model = Model.reserve(blank, blank_diffusion(), null)
    run_sync(model._derive(blank, blank.tensors))
    session = DiffusionSession(model, 1024)
    held = null.nbytes
    plan = session._plan("denoise", 256)
    names = Counter(dispatch.name.partition("/")[0] for dispatch in plan.dispatches)
    assert names["survey"] == 2  # the logits of 128 rows at a time
    assert (names["heads"], names["attention_prefill"], names["accept"]) == (30, 30, 1)
    assert names["expert_matmul"] >= 2 * 30
    assert null.nbytes - held < 600e6  # what a step works in


def test_mistakes_get_a_sentence() -> None:
    _, session = tiny_session(context=20)
    with pytest.raises(InputError, match="no room for a canvas of 12 in a context of 20"):
        run_sync(canvases(session, [2] * 9, SHORT, 1))
    found = run_sync(canvases(session, [2] * 8, SHORT, 1, blocks=9))  # ends when there is no room
    assert [canvas.block for canvas in found] == [0, 0]
    session.close()
    session.model.close()
    with pytest.raises(DeviceError, match="a canvas of 300 tokens; the kernels have room for 256"):
        tiny_session(replace(DIFFUSION, canvas=300))


def test_weights_that_are_no_numbers_get_a_sentence() -> None:
    _, session = tiny_session()
    nothing = struct.pack("<f", float("nan")) * DIFFUSION.width
    device().write(session.model.vectors["output_norm.weight"].buffer, nothing)
    with pytest.raises(GgufError, match="computes NaN or infinity"):
        run_sync(canvases(session, [2, 30], SHORT, 1))
    assert session.tokens == []
    session.close()
    session.model.close()
