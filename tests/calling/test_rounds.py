"""Replies that call Python functions, round after round."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.scripted import follow_script

from webgemma import Gemma, InputError, Piece
from webgemma.calling.rounds import DECLINED, as_json, check_rounds

ASKED = r"<\|turn>user\nSum\?<turn\|>"
CALL = "<|tool_call>call:add{a:2,b:3}<tool_call|>"
RESULT = r"response:add\{value:5\}"


def add(a: int, b: int) -> int:
    """Add numbers."""
    return a + b


@pytest.fixture
def gemma(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gemma]:
    follow_script(
        monkeypatch,
        {
            RESULT: "It is five.",
            r"response:add\{error": "I cannot.",
            ASKED: CALL,
            "Both": CALL + "<|tool_call>call:add{a:4,b:4}<tool_call|>",
            "Again": CALL,
            "Mixed": "<|tool_call>call:other{}<tool_call|>",
        },
    )
    with Gemma.load(device="cpu") as model:
        yield model


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def results_of(pieces: list[Piece]) -> list[Any]:
    return [result.value for piece in pieces for result in piece.tool_results]


def test_the_model_is_told_what_a_function_returns(gemma: Gemma) -> None:
    pieces = list(gemma.chat("Sum?", tools=[add]))
    assert results_of(pieces) == [5]
    assert text_of(pieces) == "It is five."
    assert [piece.finish for piece in pieces if piece.finish] == ["stop"]
    assert pieces[-1].finish == "stop"
    (call,) = [call for piece in pieces for call in piece.tool_calls]
    assert call.arguments == {"a": 2, "b": 3}


def test_asynchronously_and_with_a_coroutine(gemma: Gemma) -> None:
    thread = []

    async def add(a: int, b: int) -> int:
        """Add numbers, at leisure."""
        await asyncio.sleep(0.01)
        thread.append(threading.current_thread())
        return a + b

    async def replies() -> list[Piece]:
        return [piece async for piece in gemma.achat("Sum?", tools=[add])]

    pieces = asyncio.run(replies())
    assert results_of(pieces) == [5]
    assert text_of(pieces) == "It is five."
    assert thread == [threading.main_thread()]


def test_a_coroutine_is_waited_for_without_an_event_loop_and_within_one(gemma: Gemma) -> None:
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0.01)
        return a + b

    def reply() -> list[Piece]:
        return list(gemma.chat("Sum?", tools=[add]))

    async def within() -> list[Piece]:
        return reply()

    for pieces in (reply(), asyncio.run(within())):
        assert results_of(pieces) == [5]
        assert text_of(pieces) == "It is five."


@pytest.mark.parametrize("listed", [[1, "a"], [{"type": "image", "image": "/no/such/file"}]])
def test_a_list_that_a_function_returns_is_no_list_of_media(
    gemma: Gemma, listed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(a: int, b: int) -> list[Any]:
        return listed if a < b else []

    follow_script(monkeypatch, {r"response:add\{value:\[": "So many.", ASKED: CALL})
    pieces = list(gemma.chat("Sum?", tools=[add]))
    assert results_of(pieces) == [listed]
    assert text_of(pieces) == "So many."


def test_a_reply_that_is_continued_may_call_functions(gemma: Gemma) -> None:
    begun = [{"role": "user", "content": "Sum?"}, {"role": "assistant", "content": "Let me see:"}]
    pieces = list(gemma.chat(begun, tools=[add], continue_last=True))
    assert results_of(pieces) == [5]
    assert text_of(pieces) == "It is five."


def test_several_calls_at_once(gemma: Gemma) -> None:
    pieces = list(gemma.chat("Both?", tools=[add], max_tokens=80, max_rounds=1))
    assert results_of(pieces)[:2] == [5, 8]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda a, b: a / (b - 3), "ZeroDivisionError: division by zero"),
        (lambda a: a, "an object with 'b'"),
        (lambda a, b: {a, b}, None),
    ],
)
def test_what_a_function_raises_is_told_to_the_model(
    gemma: Gemma, function: Callable[..., Any], error: str | None
) -> None:
    function.__name__ = "add"
    pieces = list(gemma.chat("Sum?", tools=[function], max_tokens=60, max_rounds=1))
    (result,) = [result for piece in pieces for result in piece.tool_results]
    if error is None:
        assert result.value == str({2, 3})  # what is no JSON becomes text
    else:
        assert error in result.value["error"]
        assert result.failed
        assert text_of(pieces) == "I cannot."


def test_calls_that_are_declined(gemma: Gemma) -> None:
    asked = []

    def confirm(call: Any) -> bool:
        asked.append(call)
        return False

    called = []

    def add(a: int, b: int) -> None:
        """Add."""
        called.append((a, b))

    pieces = list(gemma.chat("Sum?", tools=[add], confirm=confirm, max_tokens=60))
    assert results_of(pieces) == [{"error": DECLINED}]
    assert len(asked) == 1
    assert not called


def test_rounds_are_limited(gemma: Gemma) -> None:
    """After the last one the model has to do without tools."""
    calls = []

    def add(a: int, b: int) -> str:
        """Add."""
        calls.append((a, b))
        return "Again"

    pieces = list(gemma.chat("Again?", tools=[add], max_rounds=3, max_tokens=30))
    assert len(calls) == 3
    assert pieces[-1].finish


def test_calls_of_other_tools_are_the_callers(gemma: Gemma) -> None:
    other = {"name": "other", "description": "Something else."}
    pieces = list(gemma.chat("Mixed?", tools=[add, other]))
    assert [call.name for piece in pieces for call in piece.tool_calls] == ["other"]
    assert results_of(pieces) == []
    assert pieces[-1].finish == "stop"


def test_a_function_may_use_the_model(gemma: Gemma) -> None:
    """The lock is free meanwhile, and so are other threads."""

    def add(a: int, b: int) -> int:
        """Add."""
        counted: list[int] = []
        thread = threading.Thread(target=lambda: counted.append(gemma.count_tokens("Hi")))
        thread.start()
        thread.join(10)
        assert counted
        return a + b

    assert results_of(list(gemma.chat("Sum?", tools=[add]))) == [5]


def test_a_reply_that_is_closed_early_calls_nothing_more(gemma: Gemma) -> None:
    calls = []

    def add(a: int, b: int) -> int:
        """Add."""
        calls.append(a)
        return a + b

    pieces = gemma.chat("Sum?", tools=[add])
    next(iter(pieces))
    pieces.close()  # type: ignore[attr-defined]
    assert not calls


def test_prompts_have_the_declarations_of_functions(gemma: Gemma) -> None:
    rendered = gemma.render("Sum?", tools=[add])
    assert "declaration:add{description:" in rendered
    assert gemma.count_tokens("Sum?", tools=[add]) > gemma.count_tokens("Sum?")


def test_results_are_json() -> None:
    assert as_json({"a": (1, 2.5)}) == {"a": [1, 2.5]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json(float("nan"))
    with pytest.raises(InputError, match="max_rounds"):
        check_rounds("3")
