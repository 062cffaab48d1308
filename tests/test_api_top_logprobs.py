"""The likeliest tokens of each step: the same from GPU and reference, and as pieces show them."""

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
from webgemma.engine.session import Session
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.sampler import Chosen, Sampling
from webgemma.sync import iterate_sync, run_sync

IDS = [2, 4, 6, 5, 8, 11, 3]
SUPPRESSED = (7, 9)
SHAPES = {
    "usual": replace(LARGE, pattern="sf", suppressed=SUPPRESSED),
    "12 tokens": replace(LARGE, pattern="sf", suppressed=SUPPRESSED, vocab=12),
}
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "drawn": Sampling(temperature=2.0, top_k=0, top_p=1.0),
    "favoured": Sampling(temperature=0, logit_bias={7: 1e9, 8: 60.0}, presence_penalty=2.0),
}


@pytest.fixture(scope="module", params=SHAPES)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Session, CpuEngine]]:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(SHAPES[request.param]), "tiny.gguf")))
    config = Config.from_gguf(gguf)
    session = Session(run_sync(Model.load(gguf, config, device())), 64, kv="f32", precision="exact")
    yield session, CpuEngine(gguf, config)
    session.close()
    session.model.close()


def take(engine: Session | CpuEngine, sampling: Sampling, count: int = 6) -> list[Chosen]:
    stream = iterate_sync(engine.generate(IDS, sampling, 5))
    found = list(islice(stream, count))
    stream.close()
    return found


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_the_gpu_says_what_the_reference_does(
    engines: tuple[Session, CpuEngine], kind: str, count: int
) -> None:
    session, reference = engines
    sampling = replace(SAMPLINGS[kind], top_logprobs=count)
    found, wanted = take(session, sampling), take(reference, sampling)
    assert [step.token for step in found] == [step.token for step in wanted]
    possible = session.model.config.vocab - len(SUPPRESSED)
    for mine, theirs in zip(found, wanted, strict=True):
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        np.testing.assert_allclose(
            [x for _, x in mine.top],
            [x for _, x in theirs.top],
            rtol=0,
            atol=GPU_LOGITS_OF_TRANSFORMERS,
        )
        assert len(mine.top) == min(count, possible)
        assert not {token for token, _ in mine.top} & set(SUPPRESSED)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_asking_changes_nothing_else(engines: tuple[Session, CpuEngine], kind: str) -> None:
    sampling = SAMPLINGS[kind]
    for engine in engines:
        for count in (20, 0, 3):
            asked = take(engine, replace(sampling, top_logprobs=count))
            plain = take(engine, sampling)
            assert [step.token for step in asked] == [step.token for step in plain]
            for one, other in zip(asked, plain, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=LOGPROB)
                assert other.top == ()


def test_the_first_is_the_best_before_penalties_and_bias(
    engines: tuple[Session, CpuEngine],
) -> None:
    for engine in engines:
        for step in take(engine, replace(SAMPLINGS["greedy"], top_logprobs=2)):
            assert step.top[0][0] == step.token
            assert step.top[0][1] == pytest.approx(step.logprob, abs=LOGPROB)
        favoured = take(engine, replace(SAMPLINGS["favoured"], top_logprobs=20))
        assert [step.token for step in favoured] == [8] * 6
        assert any(step.top[0][0] != 8 for step in favoured)
        for step in favoured:
            assert dict(step.top).get(8, step.logprob) == pytest.approx(step.logprob, abs=LOGPROB)


def test_nothing_is_recorded_until_asked_for() -> None:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(SHAPES["usual"]), "tiny.gguf")))
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    session = Session(model, 64)
    take(session, SAMPLINGS["greedy"])
    assert not any("top" in kind for kind, _ in session._plans)
    assert session._sampler.result(0)[2] == 8
    take(session, replace(SAMPLINGS["greedy"], top_logprobs=1))
    assert {kind for kind, _ in session._plans if "top" in kind} == {
        *("greedy top", "decode greedy top")
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
def test_pieces_of_text_and_chat(load: Load, where: str) -> None:
    gemma = load(SMALL, where)
    settings = {"max_tokens": 5, "temperature": 0, "top_logprobs": 3}
    pieces = list(gemma.generate("the inner", **settings))
    check_pieces(gemma, pieces, 3)
    assert [piece.top[0].token for piece in pieces] == [piece.token for piece in pieces]
    check_pieces(gemma, list(gemma.chat("in the", **settings)), 3)
    assert [piece.top for piece in gemma.chat("in the", max_tokens=2)] == [(), ()]


@pytest.mark.parametrize("ask", [Gemma.agenerate, Gemma.achat])
def test_asynchronous_pieces(load: Load, ask: Callable) -> None:
    gemma = load(SMALL)

    async def all_of_it() -> list[Piece]:
        stream = ask(gemma, "in the", max_tokens=2, top_logprobs=20)
        return [piece async for piece in stream]

    check_pieces(gemma, asyncio.run(all_of_it()), 20)


def test_the_piece_that_ends_it_has_them_too(load: Load) -> None:
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
def test_numbers_that_cannot_be_had(load: Load, value: object) -> None:
    gemma = load(SMALL)
    sentence = rf"top_logprobs is {value!r}; it must be a whole number between 0 and 20\."
    for ask in (gemma.generate, gemma.chat):
        with pytest.raises(InputError, match=sentence):
            list(ask("the", top_logprobs=value))
