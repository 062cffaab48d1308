"""`Gemma.batch`: many prompts, whose replies come as they finish, on the CPU and on slots."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import tiny_model

from webgemma import BatchReply, Gemma, InputError, Slot

TEXTS = ["in the end", "then", "here and there", "the", "hint", "inner"]
SETTINGS: dict[str, Any] = {"seed": 7, "max_tokens": 6}


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def gemma(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    path: Path = tiny_model(tmp_path_factory.mktemp("models"))
    with Gemma.load(path, request.param, context=256) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(gemma: Gemma) -> list[list[int]]:
    return [[piece.token for piece in gemma.chat(text, **SETTINGS)] for text in TEXTS]


def tokens(replies: dict[int, Any], count: int = len(TEXTS)) -> list[list[int]]:
    return [[piece.token for piece in replies[index].pieces] for index in range(count)]


def is_idle(gemma: Gemma) -> bool:
    return not gemma.worker.turns._queue and not any(slot.busy for slot in gemma.slots)


async def gathered(gemma: Gemma, *args: Any, **kwargs: Any) -> dict[int, Any]:
    return {index: reply async for index, reply in gemma.abatch(*args, **kwargs)}


def test_each_reply_is_that_of_chat(gemma: Gemma, alone: list[list[int]]) -> None:
    finished: list[tuple[int, int]] = []

    def progress(*now: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        finished.append(now)  # type: ignore[arg-type]

    prompts = [*TEXTS[:5], [{"role": "user", "content": TEXTS[5]}]]
    for replies in (
        dict(gemma.batch(prompts, progress=progress, **SETTINGS)),
        asyncio.run(gathered(gemma, prompts, progress=progress, **SETTINGS)),
    ):
        assert tokens(replies) == alone
        reply = replies[2]
        assert isinstance(reply, BatchReply)
        pieces = list(gemma.chat(TEXTS[2], **SETTINGS))
        assert reply.content == "".join(piece.text for piece in pieces)
        assert (reply.finish, reply.usage.reply, reply.thinking) == ("length", 6, "")
        assert is_idle(gemma)
    assert finished == [(n, 6) for n in range(1, 7)] * 2


def test_the_failure_of_one_is_its_result(gemma: Gemma, alone: list[list[int]]) -> None:
    wrong = [{"role": "nobody", "content": "x"}]
    prompts: list[Any] = [TEXTS[0], "in " * 2000, wrong, TEXTS[3], 7]
    for replies in (
        dict(gemma.batch(prompts, overflow="error", **SETTINGS)),
        asyncio.run(gathered(gemma, prompts, overflow="error", **SETTINGS)),
    ):
        assert tokens({0: replies[0], 1: replies[3]}, 2) == [alone[0], alone[3]]
        assert "the context holds 256" in str(replies[1])
        assert "nobody" in str(replies[2])
        assert all(isinstance(replies[index], InputError) for index in (1, 2, 4))
        assert is_idle(gemma)


def test_what_is_wrong_for_all_is_raised(gemma: Gemma) -> None:
    for wrong in ("a text", 5, None):
        with pytest.raises(InputError, match="prompts"):
            list(gemma.batch(wrong))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="temperature"):
        list(gemma.batch(TEXTS, temperature=-1))
    assert list(gemma.batch([])) == []
    assert asyncio.run(gathered(gemma, TEXTS[:2], max_tokens=0)) == {
        n: BatchReply("", "", (), "", None, ()) for n in range(2)
    }


def test_closing_ends_what_is_written(gemma: Gemma, alone: list[list[int]]) -> None:
    replies = gemma.batch(TEXTS, **SETTINGS)
    next(replies)
    replies.close()  # type: ignore[attr-defined]
    assert is_idle(gemma)

    async def main() -> None:
        stream = gemma.abatch(TEXTS, **SETTINGS)
        await anext(stream)
        await stream.aclose()
        assert is_idle(gemma)
        task = asyncio.create_task(gathered(gemma, TEXTS, seed=7, max_tokens=200))
        while is_idle(gemma):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_idle(gemma)

    asyncio.run(main())

    def stop(*_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dict(gemma.batch(TEXTS, progress=stop, **SETTINGS))
    assert is_idle(gemma)
    assert tokens(dict(gemma.batch(TEXTS, **SETTINGS))) == alone


def test_batches_share_the_slots(gemma: Gemma, alone: list[list[int]]) -> None:
    """None waits for itself, and none keeps others from their turn."""

    async def both() -> list[Any]:
        async def chat() -> list[int]:
            return [piece.token async for piece in gemma.achat(TEXTS[1], **SETTINGS)]

        return await asyncio.gather(*(gathered(gemma, TEXTS, **SETTINGS) for _ in range(2)), chat())

    one, two, chat = asyncio.run(both())
    assert tokens(one) == tokens(two) == alone
    assert chat == alone[1]
    with ThreadPoolExecutor(3) as pool:
        batches = pool.map(lambda _: dict(gemma.batch(TEXTS, **SETTINGS)), range(3))
        assert [tokens(replies) for replies in batches] == [alone] * 3
    assert is_idle(gemma)


def test_a_reply_between_those_of_a_batch(gemma: Gemma, alone: list[list[int]]) -> None:
    """A slot is free whenever a reply has finished; a model with one ends the batch instead."""

    def compare() -> None:
        for index, reply in gemma.batch(TEXTS, **SETTINGS):
            assert isinstance(reply, BatchReply)
            assert [piece.token for piece in gemma.chat(TEXTS[index], **SETTINGS)] == alone[index]

    if len(gemma.slots) > 1:
        compare()
    else:
        with pytest.raises(InputError, match="the same caller has begun another one"):
            compare()
    assert is_idle(gemma)


def test_slots(gemma: Gemma) -> None:
    slots = gemma.slots
    assert len(slots) == (1 if gemma.device.startswith("CPU") else 4)
    assert [slot.id for slot in slots] == list(range(len(slots)))
    assert all(isinstance(slot, Slot) and slot.context == 256 for slot in slots)
    with pytest.raises(FrozenInstanceError):
        slots[0].busy = True  # type: ignore[misc]
    stream = gemma.chat("hello", max_tokens=9, seed=1)
    for piece in stream:
        assert piece.usage
        (busy,) = [slot for slot in gemma.slots if slot.busy]
        assert busy.tokens >= piece.usage.prompt
    assert is_idle(gemma)
