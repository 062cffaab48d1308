"""DiffusionGemma on the GPU: against transformers draw by draw, and the reference from a seed."""

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from conftest import needs_shared
from helpers.blank import BlankGguf, op_counts
from helpers.blank import diffusion as blank_diffusion
from helpers.gpu import device, get, hardware
from helpers.recorded import BLOCKS, DENOISING, Trace, array, opened, prompt
from helpers.tiny import DIFFUSION, Tiny, tiny_gguf
from tolerance import GPU_LOGITS_OF_TRANSFORMERS, RANDOM_LOGITS

from webgemma.denoising import Canvas, Denoising
from webgemma.device import Plan
from webgemma.device.null import NullDevice
from webgemma.engine.diffusion_session import DiffusionSession
from webgemma.engine.plans import PlanKey
from webgemma.errors import DeviceError, GgufError, InputError
from webgemma.gemma import diffusion
from webgemma.gemma.config import Config
from webgemma.gemma.diffusion import CanvasRecorder, packed_denoising, parse_result
from webgemma.gemma.record.matmul_backward import MatmulBackward
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.graph import Recorder, Tensor
from webgemma.reference.diffusion import DiffusionModel, SeededDraws, accept, entropy
from webgemma.reference.text import Cache
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

SHORT = Denoising(steps=2, entropy_bound=3.0)  # each step amplifies rounding errors


def session_of(gguf: Gguf, context: int = 256) -> DiffusionSession:
    """Load a model on the tests' GPU."""
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    return DiffusionSession(model, context, kv="f32")


def tiny_session(tiny: Tiny = DIFFUSION, context: int = 256) -> tuple[Gguf, DiffusionSession]:
    """Load a tiny model; return its file, too."""
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    return gguf, session_of(gguf, context)


async def canvases(
    session: DiffusionSession, ids: Sequence[int], denoising: Denoising, seed: int, count: int = 1
) -> list[Canvas]:
    """Return all steps of so many canvases."""
    steps: list[Canvas] = []
    async for canvas in session.denoise(ids, denoising, seed):
        steps.append(canvas)
        if canvas.done and canvas.number + 1 == count:
            break
    return steps


def reference(
    gguf: Gguf, ids: Sequence[int], denoising: Denoising, seed: int, count: int = 1
) -> list[Canvas]:
    """Return all steps of so many canvases, computed by the reference."""
    config = Config.from_gguf(gguf)
    model = DiffusionModel(config, Weights(gguf))
    cache, tokens = Cache(config), list(ids)
    steps: list[Canvas] = []
    draws = SeededDraws(seed, model.canvas, config.vocab)
    for number in range(count):
        model.encode(tokens[cache.length :], cache)
        steps += model.denoise(cache, denoising, draws, number)
        tokens += steps[-1].best
    return steps


def assert_same(found: list[Canvas], expected: list[Canvas]) -> None:
    for step, expected_step in zip(found, expected, strict=True):
        assert step[:5] == expected_step[:5]  # number, step, ids, accepted, best
        assert step.done == expected_step.done
        assert step.entropy == pytest.approx(expected_step.entropy, abs=1e-2)
        assert step.logprobs == pytest.approx(expected_step.logprobs, abs=5e-2)


class Replay:
    """A session's denoising step as two plans, so that recorded logits can replace its own."""

    def __init__(self, session: DiffusionSession) -> None:
        self.session = session
        canvas = self.recorder()
        self.logits: Tensor = canvas.logits(canvas.body())
        self.compute_logits: Plan = canvas.recorder.plan()
        canvas = self.recorder()
        canvas.canvas_stats(self.logits, 0)
        MatmulBackward(canvas.matmul).expected_embedding(
            session.model.matrices["token_embd.weight"],
            self.logits,
            canvas.state.stats,
            canvas.state.denoising,
            0,
            canvas.state.expected,
        )
        canvas.accept_tokens()
        self.use_logits: Plan = canvas.recorder.plan()

    def recorder(self) -> CanvasRecorder:
        """Return a recorder of the session's canvas."""
        session, recorder = self.session, Recorder(device())
        return CanvasRecorder(session.model, recorder, session.canvas_inputs, session.state, "f32")

    def begin(self, ids: Sequence[int], noise: np.ndarray) -> None:
        """Read the tokens that are not read yet, and write a canvas of this noise."""
        session, marks = self.session, list(ids)
        epoch = run_sync(session._next_epoch())
        for rows, count in session.chunks(marks):
            run_sync(session.read_chunk(rows, marks, count, epoch))
        session._reset_canvas(0, 0)
        self.write_canvas(noise)

    def write_canvas(self, ids: np.ndarray) -> None:
        """Write the tokens of the canvas."""
        device().write(self.session.canvas_inputs.ids.buffer, ids.astype("<u4").tobytes())

    def step(self, number: int, step: int, logits: np.ndarray) -> tuple[np.ndarray, Canvas]:
        """Return the step's own logits, and its result with those that are given."""
        device().run(self.compute_logits)
        own = get(self.logits).copy()
        device().write(self.logits.buffer, logits.astype("<f4").tobytes())
        packed = packed_denoising(DENOISING, 0, number, step)
        device().write(self.session.state.denoising.buffer, packed)
        device().run(self.use_logits)
        words = get(self.session.state.result, np.uint32)
        result = parse_result(words.tobytes(), number, step)
        assert result is not None
        return own, result


@needs_shared
def test_agrees_with_transformers() -> None:
    with opened() as gguf:
        session = session_of(gguf)
        replay = Replay(session)
        replay.begin(prompt(), array("canvas0"))
        hidden = get(session.plans.hidden)[: len(prompt())]
        assert np.abs(hidden - array("encoder_last_hidden")).max() <= GPU_LOGITS_OF_TRANSFORMERS
        conditioning = array("selfcond_logits") * np.float32(DENOISING.temperature(1))
        own, _ = replay.step(0, 1, conditioning)
        assert np.abs(own - array("logits_step1")).max() <= GPU_LOGITS_OF_TRANSFORMERS
        replay.write_canvas(array("canvas0"))
        own, _ = replay.step(0, 2, conditioning)
        expected = array("logits_step2_selfcond")
        assert np.abs(own - expected).max() <= GPU_LOGITS_OF_TRANSFORMERS
        session.close()
        session.model.close()


@needs_shared
def test_a_recorded_generation_draw_by_draw() -> None:
    trace, tokens = Trace(), prompt()
    with opened() as gguf:
        session = session_of(gguf)
        replay = Replay(session)
        for number in range(BLOCKS):
            replay.begin(tokens, trace.noise(number, 0))
            for step in range(1, DENOISING.steps + 1):
                expected = trace.logits[number, step - 1]
                own, result = replay.step(number, step, expected)
                assert np.abs(own - expected).max() <= GPU_LOGITS_OF_TRANSFORMERS
                accepted = accept(entropy(expected / DENOISING.temperature(step)), 2.0)
                assert list(result.accepted) == accepted.tolist()
                drawn = trace.sample(number, step, expected)
                replay.write_canvas(np.where(accepted, drawn, trace.noise(number, step)))
                assert result.done == (step == DENOISING.steps)
            tokens += result.best
        session.close()
        session.model.close()
    assert tokens == trace.ids


@pytest.mark.parametrize("seed", [1, 2**40 + 3])
def test_canvases_agree_with_the_reference(seed: int) -> None:
    ids = [2, *range(30, 51)]
    gguf, session = tiny_session()
    found = run_sync(canvases(session, ids, SHORT, seed, count=2))
    assert_same(found, reference(gguf, ids, SHORT, seed, count=2))
    assert session.tokens == ids + list(found[1].best)  # the last canvas is not read
    session.close()
    session.model.close()


@pytest.mark.parametrize(("format", "precision"), [("BF16", "exact"), ("Q8_0", "int16")])
def test_divided_as_for_a_hardware_gpu(format: str, precision: str) -> None:
    tiny = replace(DIFFUSION, formats=(format,), canvas=40)
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), hardware()))
    session = DiffusionSession(model, 256, kv="f32", precision=precision)
    one = replace(SHORT, steps=1)
    (found,) = run_sync(canvases(session, [2, *range(30, 51)], one, 5))
    (expected,) = reference(gguf, [2, *range(30, 51)], one, 5)
    assert found.best == expected.best
    assert found.logprobs == pytest.approx(expected.logprobs, abs=RANDOM_LOGITS["int16"])
    session.close()
    session.model.close()


def test_logits_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion, "LOGITS_NBYTES", 1)
    wide = replace(DIFFUSION, canvas=80, suppressed=(7, 9), formats=("Q8_0",))
    gguf, session = tiny_session(wide)
    one = replace(SHORT, steps=1)
    found = run_sync(canvases(session, [2, 30, 31], one, 5))
    assert op_counts(session.plans.get(PlanKey("denoise", 80)))["canvas_stats"] == 2
    assert_same(found, reference(gguf, [2, 30, 31], one, 5))
    session.close()
    session.model.close()


def test_a_prompt_longer_than_the_rings() -> None:
    """Denoise a canvas whose positions wrap around the ring of a sliding layer."""
    long = replace(DIFFUSION, context=1024)
    ids = [2, *(30 + (7 * i) % 200 for i in range(531))]
    gguf, session = tiny_session(long, 1024)
    assert session.cache.ring == 520
    one = replace(SHORT, steps=1)
    assert_same(run_sync(canvases(session, ids, one, 4)), reference(gguf, ids, one, 4))
    session.close()
    session.model.close()


def test_the_cache_is_reused_and_a_reply_can_be_stopped() -> None:
    ids = [2, *range(30, 51)]
    _, session = tiny_session()
    found = run_sync(canvases(session, ids, SHORT, 3))

    async def stop_early() -> None:
        stream = session.denoise(ids, SHORT, 3)
        async for _ in stream:
            break
        await stream.aclose()

    run_sync(stop_early())
    assert session.tokens == ids
    assert run_sync(canvases(session, ids, SHORT, 3)) == found
    fork = session.fork()
    assert isinstance(fork, DiffusionSession)
    assert run_sync(canvases(fork, ids, SHORT, 3)) == found
    fork.close()
    session.close()
    session.model.close()


def test_a_canvas_does_not_change_what_was_read() -> None:
    ids = [2, *range(30, 51)]
    _, session = tiny_session()

    async def cached() -> bytes:
        return b"".join([chunk async for chunk in session.cache.read(len(ids))])

    async def cached_after_each_step() -> list[bytes]:
        found = []
        async for canvas in session.denoise(ids, SHORT, 3):
            found.append(await cached())
            if canvas.done:
                break
        return found

    replay = Replay(session)
    replay.begin(ids, np.zeros(DIFFUSION.canvas))
    before = run_sync(cached())
    assert any(before)
    assert run_sync(cached_after_each_step()) == [before, before]
    session.close()
    session.model.close()


def test_memory_is_freed() -> None:
    before = device().nbytes
    _, session = tiny_session()
    run_sync(canvases(session, [2, 30], SHORT, 3))
    session.close()
    session.model.close()
    assert device().nbytes == before


def test_the_real_shapes_within_the_limits_of_every_device() -> None:
    """Record a canvas of 256 tokens: no kernel binds more than 128 MiB of a buffer."""
    null = NullDevice()
    blank = BlankGguf(blank_diffusion())
    model = Model.allocate_all(blank, blank_diffusion(), null)
    run_sync(model._derive(blank, blank.tensors))
    session = DiffusionSession(model, 1024)
    before = null.nbytes
    ops = op_counts(session.plans.get(PlanKey("denoise", 256)))
    assert ops["canvas_stats"] == 2  # the logits of 128 rows at a time
    assert (ops["qkv_heads"], ops["attention_prefill"], ops["accept_tokens"]) == (30, 30, 1)
    assert ops["expert_matmul"] >= 2 * 30
    assert null.nbytes - before < 600e6  # scratch of a step


def test_canvases_that_do_not_fit_raise_an_error() -> None:
    _, session = tiny_session(context=20)
    with pytest.raises(InputError, match="no space for a canvas of 12 in a context of 20"):
        run_sync(canvases(session, [2] * 9, SHORT, 1))
    found = run_sync(canvases(session, [2] * 8, SHORT, 1, count=9))  # ends when the context is full
    assert [canvas.number for canvas in found] == [0, 0]
    session.close()
    session.model.close()
    with pytest.raises(DeviceError, match="a canvas of 300 tokens; the kernels support 256"):
        tiny_session(replace(DIFFUSION, canvas=300))


def test_weights_that_are_not_finite_raise_an_error() -> None:
    _, session = tiny_session()
    nans = struct.pack("<f", float("nan")) * DIFFUSION.width
    norm = session.model.vectors["output_norm.weight"]
    device().write(norm.buffer, nans, norm.offset)
    with pytest.raises(GgufError, match="computes NaN or infinity"):
        run_sync(canvases(session, [2, 30], SHORT, 1))
    assert session.tokens == []
    session.close()
    session.model.close()
