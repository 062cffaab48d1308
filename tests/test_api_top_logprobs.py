"""The likeliest tokens of each step: equal on GPU and CPU, and as the pieces of a reply."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from helpers.gpu import device
from helpers.tiny import LARGE, SMALL, Tiny, tiny_gguf
from tolerance import GPU_LOGITS_OF_TRANSFORMERS, LOGPROB

from webgemma import Gemma, InputError, Piece, TopToken
from webgemma.engine.cpu import CpuEngine
from webgemma.engine.plans import PlanKey
from webgemma.engine.session import Session
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.sampler import SampledToken
from webgemma.settings import Settings, resolve
from webgemma.sync import iterate_sync, run_sync

IDS = [2, 4, 6, 5, 8, 11, 3]
SUPPRESSED = (7, 9)
SHAPES = {
    "usual": replace(LARGE, pattern="sf", suppressed=SUPPRESSED),
    "12 tokens": replace(LARGE, pattern="sf", suppressed=SUPPRESSED, vocab=12),
}
SETTINGS: dict[str, Settings] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 2.0, "top_k": 0, "top_p": 1.0},
    "biased": {"temperature": 0, "logit_bias": {7: 1e9, 8: 60.0}, "presence_penalty": 2.0},
}


@pytest.fixture(scope="module", params=SHAPES)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Session, CpuEngine]]:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(SHAPES[request.param]), "tiny.gguf")))
    config = Config.from_gguf(gguf)
    session = Session(run_sync(Model.load(gguf, config, device())), 64, kv="f32", precision="exact")
    yield session, CpuEngine(gguf, config)
    session.close()
    session.model.close()


def take(
    engine: Session | CpuEngine, settings: Settings, top_logprobs: int = 0
) -> list[SampledToken]:
    """Return six tokens."""
    resolved = resolve({**settings, "top_logprobs": top_logprobs})
    stream = iterate_sync(engine.generate(IDS, resolved, 5))
    tokens = list(islice(stream, 6))
    stream.close()
    return tokens


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_gpu_agrees_with_the_reference(
    engines: tuple[Session, CpuEngine], kind: str, count: int
) -> None:
    session, reference = engines
    found, expected = (take(engine, SETTINGS[kind], count) for engine in (session, reference))
    assert [step.token for step in found] == [step.token for step in expected]
    possible = session.model.config.vocab - len(SUPPRESSED)
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        np.testing.assert_allclose(
            [x for _, x in one.top],
            [x for _, x in other.top],
            rtol=0,
            atol=GPU_LOGITS_OF_TRANSFORMERS,
        )
        assert len(one.top) == min(count, possible)
        assert not {token for token, _ in one.top} & set(SUPPRESSED)


@pytest.mark.parametrize("kind", SETTINGS)
def test_top_logprobs_change_nothing_else(engines: tuple[Session, CpuEngine], kind: str) -> None:
    for engine in engines:
        for count in (20, 0, 3):
            reported = take(engine, SETTINGS[kind], count)
            plain = take(engine, SETTINGS[kind])
            assert [step.token for step in reported] == [step.token for step in plain]
            for one, other in zip(reported, plain, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=LOGPROB)
                assert other.top == ()


def test_the_first_is_the_likeliest_before_penalties_and_bias(
    engines: tuple[Session, CpuEngine],
) -> None:
    for engine in engines:
        for step in take(engine, SETTINGS["greedy"], 2):
            assert step.top[0][0] == step.token
            assert step.top[0][1] == pytest.approx(step.logprob, abs=LOGPROB)
        biased = take(engine, SETTINGS["biased"], 20)
        assert [step.token for step in biased] == [8] * 6
        assert any(step.top[0][0] != 8 for step in biased)
        for step in biased:
            assert dict(step.top).get(8, step.logprob) == pytest.approx(step.logprob, abs=LOGPROB)


def test_plans_report_top_logprobs_only_when_required() -> None:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(SHAPES["usual"]), "tiny.gguf")))
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    session = Session(model, 64)
    take(session, SETTINGS["greedy"])
    assert not any(key.top_logprobs for key in session.plans._plans)
    assert session.sampler.result(1)[2] == 8
    take(session, SETTINGS["greedy"], 1)
    assert {key for key in session.plans._plans if key.top_logprobs} == {
        PlanKey("sample", greedy=True, top_logprobs=True),
        PlanKey("decode", greedy=True, top_logprobs=True),
    }
    session.close()
    model.close()


Load = Callable[..., Gemma]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    opened: list[Gemma] = []

    def from_tiny(tiny: Tiny, where: str = "cpu") -> Gemma:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(tiny_gguf(tiny))
        opened.append(Gemma.load(path, where, context=128))
        return opened[-1]

    yield from_tiny
    for gemma in opened:
        gemma.close()


def check_pieces(gemma: Gemma, pieces: list[Piece], count: int) -> None:
    assert pieces
    for piece in pieces:
        assert isinstance(piece.top, tuple)
        assert len(piece.top) == count
        assert [t.text for t in piece.top] == [gemma.tokenizer.decode([t.token]) for t in piece.top]
        logprobs = [t.logprob for t in piece.top]
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(np.exp(logprobs)) <= 1 + LOGPROB
        same = [t for t in piece.top if t.token == piece.token]
        assert all(t.logprob == pytest.approx(piece.logprob, abs=LOGPROB) for t in same)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_pieces_of_generate_and_chat_have_them(load: Load, where: str) -> None:
    gemma = load(SMALL, where)
    settings = {"max_tokens": 5, "temperature": 0, "top_logprobs": 3}
    pieces = list(gemma.generate("the inner", **settings))
    check_pieces(gemma, pieces, 3)
    assert [piece.top[0].token for piece in pieces] == [piece.token for piece in pieces]
    check_pieces(gemma, list(gemma.chat("in the", **settings)), 3)
    assert [piece.top for piece in gemma.chat("in the", max_tokens=2)] == [(), ()]


@pytest.mark.parametrize("method", [Gemma.agenerate, Gemma.achat])
def test_asynchronous_pieces_have_them(load: Load, method: Callable) -> None:
    gemma = load(SMALL)

    async def pieces() -> list[Piece]:
        stream = method(gemma, "in the", max_tokens=2, top_logprobs=20)
        return [piece async for piece in stream]

    check_pieces(gemma, asyncio.run(pieces()), 20)


def test_the_last_piece_has_them(load: Load) -> None:
    gemma = load(SMALL)
    end = min(gemma.tokenizer.ends)
    settings = {"temperature": 0, "logit_bias": {end: 1000.0}, "top_logprobs": 2}
    for pieces in (list(gemma.generate("the", **settings)), list(gemma.chat("the", **settings))):
        assert [piece.finish for piece in pieces] == ["stop"]
        check_pieces(gemma, pieces, 2)


def test_special_tokens_are_spelled_out(load: Load) -> None:
    gemma = load(replace(SMALL, vocab=12))
    (piece,) = gemma.generate([2, 3], max_tokens=1, top_logprobs=20)
    spelled = {t.token: t.text for t in piece.top}
    assert len(spelled) == 12
    assert spelled[2] == "<bos>"
    assert spelled[9] == "<turn|>"


def test_without_a_vocabulary_they_have_no_text(load: Load) -> None:
    nothing = {f"tokenizer.ggml.{key}": None for key in ("tokens", "token_type", "merges")}
    gemma = load(replace(SMALL, metadata={**nothing, "tokenizer.ggml.model": "none"}))
    (piece,) = gemma.generate([2, 30], max_tokens=1, temperature=0, top_logprobs=1)
    assert piece.top == (TopToken(piece.token, piece.logprob, ""),)


@pytest.mark.parametrize("value", [-1, 21, True, "5", 2.5, None], ids=repr)
def test_invalid_numbers_raise_an_error(load: Load, value: object) -> None:
    gemma = load(SMALL)
    message = rf"top_logprobs is {value!r}; it must be a whole number between 0 and 20\."
    for method in (gemma.generate, gemma.chat):
        with pytest.raises(InputError, match=message):
            list(method("the", top_logprobs=value))
