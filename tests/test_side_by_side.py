"""Conversations side by side on one model: each is as it would be alone, whatever others do."""

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import tiny_model
from helpers.tiny import LARGE, SMALL, Tiny, tiny_gguf

from webgemma import DeviceMemoryError, Gemma, WebgemmaError
from webgemma.device.commands import NativeReading
from webgemma.engine.batching import Batch
from webgemma.engine.gpu import GpuEngine
from webgemma.errors import DeviceError
from webgemma.replies import Piece

COUNT, TOKENS = 16, 9
CHUNK = 32
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "recent": 12},
    {"temperature": 1.0, "logit_bias": {40: 4.0, 60: -3.0}, "presence_penalty": 1.0},
    {"temperature": 1.1, "top_logprobs": 3, "min_p": 0.02},
    {"temperature": 0, "top_logprobs": 5, "repetition_penalty": 1.3},
    {"temperature": 1.5, "typical_p": 0.8, "top_k": 12},
]


def prompt(number: int) -> list[int]:
    """Return a prompt of 3 to 78 tokens, which begins as no other one does."""
    chance = random.Random(number)
    return [2, 30 + number, *(chance.randrange(24, 300) for _ in range(1 + number * 5))]


CASES = [(prompt(n), {**KINDS[n % len(KINDS)], "seed": 100 + n}) for n in range(COUNT)]
Said = list[tuple[int, float, tuple[int, ...]]]


def told(pieces: list[Piece]) -> Said:
    """Return tokens, log-probabilities, and the likeliest tokens."""
    return [(p.token, round(p.logprob, 3), tuple(top.token for top in p.top)) for p in pieces]


def said(gemma: Gemma, ids: list[int], settings: dict[str, Any], count: int = TOKENS) -> Said:
    return told(list(gemma.generate(ids, max_tokens=count, **settings)))


async def asaid(
    gemma: Gemma, ids: list[int], settings: dict[str, Any], count: int = TOKENS
) -> Said:
    return told([piece async for piece in gemma.agenerate(ids, max_tokens=count, **settings)])


async def together(gemma: Gemma, count: int = COUNT) -> list[Said]:
    return await asyncio.gather(*(asaid(gemma, *case) for case in CASES[:count]))


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Read a few tokens at once, so that a short prompt has several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("webgemma.engine.slots.CHUNK", CHUNK)
        patch.setattr("webgemma.engine.session.PLAN_ROWS", (1, 8, CHUNK))
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


def load(path: Path, **options: Any) -> Gemma:
    return Gemma.load(path, "gpu", context=256, kv="f32", **options)


@pytest.fixture(scope="module", params=["exact", "int16"])
def gemma(request: pytest.FixtureRequest, path: Path) -> Iterator[Gemma]:
    with load(path, precision=request.param, slots=COUNT) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(gemma: Gemma) -> list[Said]:
    """What each says when nobody else is served."""
    return [said(gemma, *case) for case in CASES]


def steps(gemma: Gemma, patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list of the steps from now on: what is done, and for how many conversations."""
    batch, taken = batch_of(gemma), list[tuple[str, int]]()
    compute, read = batch._compute, batch._read

    async def computed(lines: list[Any], kind: Any) -> bool:
        taken.append((kind, len(lines)))
        return await compute(lines, kind)

    async def reading(generation: Any) -> None:
        taken.append(("read", 1))
        await read(generation)

    patch.setattr(batch, "_compute", computed)
    patch.setattr(batch, "_read", reading)
    return taken


def engine_of(gemma: Gemma) -> GpuEngine:
    return gemma.gpu_engine("A test")


def batch_of(gemma: Gemma) -> Batch:
    return engine_of(gemma)._session.batch


# Sixteen of them


def test_tasks_say_what_they_would_say_alone(
    gemma: Gemma, alone: list[Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = steps(gemma, monkeypatch)
    assert asyncio.run(together(gemma)) == alone
    assert max(count for _, count in taken) == COUNT
    assert len({str(each) for each in alone}) == COUNT


def test_threads_say_what_they_would_say_alone(gemma: Gemma, alone: list[Said]) -> None:
    with ThreadPoolExecutor(COUNT) as pool:
        assert list(pool.map(lambda case: said(gemma, *case), CASES)) == alone


def test_threads_and_tasks_of_two_loops_mix(gemma: Gemma, alone: list[Said]) -> None:
    def loop(cases: list[Any]) -> list[Said]:
        async def main() -> list[Said]:
            return await asyncio.gather(*(asaid(gemma, *case) for case in cases))

        return asyncio.run(main())

    with ThreadPoolExecutor(8) as pool:
        loops = [pool.submit(loop, CASES[:5]), pool.submit(loop, CASES[5:10])]
        threads = list(pool.map(lambda case: said(gemma, *case), CASES[10:]))
    assert [*loops[0].result(), *loops[1].result(), *threads] == alone


def test_one_that_is_cancelled_changes_no_other(gemma: Gemma, alone: list[Said]) -> None:
    async def main() -> list[Said]:
        tasks = []

        async def one(number: int) -> Said:
            """Read a reply; every third one ends after as many tokens as it has predecessors."""
            pieces: list[Piece] = []
            ids, settings = CASES[number]
            async for piece in gemma.agenerate(ids, max_tokens=TOKENS, **settings):
                pieces.append(piece)
                if number % 3 == 0 and len(pieces) == number // 3 + 1:
                    asyncio.get_running_loop().call_soon(tasks[number].cancel)
            return told(pieces)

        tasks += [asyncio.create_task(one(number)) for number in range(COUNT)]
        await asyncio.wait(tasks)
        assert all(tasks[number].cancelled() for number in range(0, COUNT, 3))
        return [alone[n] if t.cancelled() else t.result() for n, t in enumerate(tasks)]

    assert asyncio.run(main()) == alone
    assert not any(slot.busy for slot in gemma.slots)


def test_a_long_prompt_does_not_stop_others(
    gemma: Gemma, alone: list[Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two tokens of a reply there is at most one chunk of another's prompt."""
    long = [2, *(24 + n * 11 % 270 for n in range(200))]
    taken = steps(gemma, monkeypatch)

    async def main() -> Said:
        async with aclosing(
            gemma.agenerate(*CASES[0][:1], max_tokens=TOKENS, **CASES[0][1])
        ) as one:
            pieces = [await anext(one)]
            del taken[:]
            other = asyncio.create_task(asaid(gemma, long, {"temperature": 0}, 3))
            pieces += [piece async for piece in one]
            await other
            return told(pieces)

    assert asyncio.run(main()) == alone[0]
    kinds = "".join(kind[0] for kind, _ in taken)
    assert kinds.count("r") >= 200 // CHUNK
    reading = kinds[kinds.index("r") : kinds.rindex("r") + 1]
    assert "rr" not in reading[: 2 * (TOKENS - 2)]  # while the first one is written


def test_who_waits_gets_a_slot_in_order(path: Path) -> None:
    with load(path, slots=2) as gemma:
        began: list[int] = []

        async def one(number: int) -> None:
            ids, settings = CASES[number]
            async for piece in gemma.agenerate(ids, max_tokens=3 + number, **settings):
                assert piece.usage
                if piece.usage.reply == 1:
                    began.append(number)

        async def main() -> None:
            await asyncio.gather(*map(one, range(7)))

        asyncio.run(main())
        assert sorted(began[:2]) == [0, 1]
        assert all(abs(began.index(number) - number) <= 1 for number in range(7))
        assert len(gemma.slots) == 2


# Memory


@pytest.mark.parametrize(("kind", "number"), [(SMALL, 5), (LARGE, 5), (LARGE, 12)])
def test_a_reply_goes_on_while_slots_are_allocated(tmp_path: Path, kind: Tiny, number: int) -> None:
    """Models that read images whole get longer rings than 40 positions; prompts have 28 and 63."""
    path, cases = tmp_path / "model.gguf", [CASES[number], *CASES[1:4]]
    path.write_bytes(tiny_gguf(kind))
    with load(path) as gemma:
        expected = [said(gemma, *case) for case in cases]
        before = gemma.memory_nbytes
    with load(path) as gemma:
        first = gemma.generate(cases[0][0], max_tokens=TOKENS, **cases[0][1])
        pieces = [next(first) for _ in range(4)]
        assert len(engine_of(gemma)._sessions) == 1
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(said, gemma, *case) for case in cases[1:]]
            while len(engine_of(gemma)._sessions) == 1:
                time.sleep(0.001)
            pieces += first
            assert [told(pieces), *(each.result() for each in others)] == expected
        assert len(engine_of(gemma)._sessions) == 4
        assert gemma.memory_nbytes > before


@pytest.mark.parametrize("possible", [1, 2])
def test_without_memory_for_more_they_wait(
    path: Path, possible: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(path) as gemma:
        expected = [said(gemma, *case) for case in CASES[:6]]
    grow = Batch.grow

    async def growing(batch: Batch, count: int, sessions: Any) -> None:
        if count > possible:
            raise DeviceMemoryError("There is no memory.", 1)
        await grow(batch, count, sessions)

    monkeypatch.setattr(Batch, "grow", growing)
    with load(path) as gemma:
        assert asyncio.run(together(gemma, 6)) == expected
        assert len(gemma.slots) == possible
    with load(path) as gemma, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda case: said(gemma, *case), CASES[:6])) == expected
    with load(path) as gemma:
        replies = dict(gemma.batch(["in the end", "then", "here", "there"], max_tokens=3, seed=1))
        assert sorted(replies) == [0, 1, 2, 3]
        assert all(len(reply.pieces) == 3 for reply in replies.values())


# Prefixes


def cached(gemma: Gemma, messages: Any, count: int = 3) -> int:
    pieces = list(gemma.chat(messages, max_tokens=count, temperature=0))
    assert pieces[0].usage
    return pieces[0].usage.cached


def test_what_conversations_have_in_common_is_read_once(path: Path) -> None:
    system = {"role": "system", "content": "the end in the inner thin hinter " * 3}
    chats = [[system, {"role": "user", "content": text}] for text in ("then?", "in?", "here?")]
    with load(path) as fresh:
        prefix = len(fresh.tokenizer.encode(fresh.render([system]), special=True))
    expected = []
    for chat in chats:
        with load(path) as fresh:
            expected.append([p.token for p in fresh.chat(chat, max_tokens=4, temperature=0)])

    async def main(gemma: Gemma) -> list[tuple[list[int], int]]:
        async def one(messages: Any) -> tuple[list[int], int]:
            pieces = [p async for p in gemma.achat(messages, max_tokens=4, temperature=0)]
            return [piece.token for piece in pieces], pieces[0].usage.cached  # type: ignore[union-attr]

        first = await one(chats[0])
        return [first, *await asyncio.gather(*map(one, chats[1:]))]

    with load(path, slots=4) as gemma:
        replies = asyncio.run(main(gemma))
        assert [tokens for tokens, _ in replies] == expected
        assert replies[0][1] == 0
        for _, reused in replies[1:]:
            assert prefix - 4 <= reused <= prefix + 8
        # A conversation that goes on finds its own slot again, with the reply in it.
        text = gemma.tokenizer.decode(expected[0])
        longer = [*chats[0], {"role": "assistant", "content": text}, chats[1][1]]
        assert cached(gemma, longer) >= gemma.count_tokens(chats[0]) - 1
        assert cached(gemma, chats[2]) == gemma.count_tokens(chats[2]) - 1


def reused(gemma: Gemma, ids: list[int]) -> int:
    """Return how many tokens of a prompt are not read again."""
    (piece,) = gemma.generate(ids, max_tokens=1, temperature=0)
    assert piece.usage
    return piece.usage.cached


def test_a_prefix_is_taken_from_where_all_layers_have_it(path: Path) -> None:
    """The rings of a conversation that has gone far beyond it have it no longer."""
    chance = random.Random(1)
    text = [2, *(chance.randrange(24, 300) for _ in range(159))]
    with load(path, slots=3) as gemma:
        assert reused(gemma, text) == 0
        assert reused(gemma, [*text[:50], 30, 31]) == 0
        assert reused(gemma, [*text[:60], 32, 33]) == 50


def test_a_saved_prompt_is_reused_beside_others(path: Path, tmp_path: Path) -> None:
    """It takes the place of what was used longest ago, and is what was used last."""
    prompts = [prompt(number) for number in (3, 4, 5, 6)]
    with load(path, slots=3) as gemma:
        expected = said(gemma, [*prompts[0], 40, 41], {"temperature": 0})
    with load(path, slots=3) as gemma:
        assert reused(gemma, prompts[0]) == 0
        gemma.save(tmp_path / "saved")
        assert all(reused(gemma, ids) <= 1 for ids in prompts[1:3])
        assert gemma.restore(tmp_path / "saved")[: len(prompts[0])] == prompts[0]
        assert reused(gemma, prompts[3]) <= 1  # in the place of the second
        assert reused(gemma, prompts[2]) == len(prompts[2]) - 1
        assert reused(gemma, prompts[0]) == len(prompts[0]) - 1
        gemma.restore(tmp_path / "saved")
        assert said(gemma, [*prompts[0], 40, 41], {"temperature": 0}) == expected


# Failures


def test_a_device_that_fails_ends_all_with_a_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(path, slots=4) as gemma:
        expected = [said(gemma, *case) for case in CASES[:4]]
        device, left = batch_of(gemma).device, [9]
        run = device.run

        def fails(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise DeviceError("The GPU is gone.")
            return run(*args)

        async def main() -> list[Any]:
            replies = (asaid(gemma, *case) for case in CASES[:4])
            return await asyncio.gather(*replies, return_exceptions=True)

        with monkeypatch.context() as patch:
            patch.setattr(device, "run", fails)
            assert [str(each) for each in asyncio.run(main())] == ["The GPU is gone."] * 4
            outcomes = dict(gemma.batch(["a", "b", "c", "d", "e"]))
            assert [str(outcomes[n]) for n in range(5)] == ["The GPU is gone."] * 5
        assert not any(slot.busy for slot in gemma.slots)
        assert asyncio.run(together(gemma, 4)) == expected


# In a tab: no threads, and every wait lets other tasks run


@pytest.fixture
def tab(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, read = random.Random(1), NativeReading.bytes

    async def waits(reading: NativeReading) -> bytes:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        return await read(reading)

    def refused(*_: Any) -> None:
        raise AssertionError("There are no threads here.")

    monkeypatch.setattr(NativeReading, "bytes", waits)
    monkeypatch.setattr("webgemma.sync.IN_BROWSER", True)
    monkeypatch.setattr("webgemma.sync.ThreadPoolExecutor", refused)


def test_in_a_tab(path: Path, request: pytest.FixtureRequest) -> None:
    texts = ["in the end", "then", "here and there", "", "thin " * 400, "the", "hint", "inner"]
    with load(path) as gemma:
        expected = [said(gemma, *case) for case in CASES[:8]]
        replies = dict(gemma.batch(texts, max_tokens=5, seed=3))
        assert isinstance(replies[4], WebgemmaError)
        length = gemma.count_tokens("hello")

    async def main(gemma: Gemma) -> None:
        assert await together(gemma, 8) == expected
        again = {index: reply async for index, reply in gemma.abatch(texts, max_tokens=5, seed=3)}
        for index, reply in replies.items():
            assert getattr(again[index], "content", "") == getattr(reply, "content", "")
        both = asyncio.gather(together(gemma, 3), gemma.acount_tokens("hello"))
        assert await both == [expected[:3], length]

    with load(path) as gemma:
        request.getfixturevalue("tab")
        asyncio.run(main(gemma))
