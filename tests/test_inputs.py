"""What callers may give: anything is taken, or refused with a sentence, in time for its size."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.anything import ANYTHING, ODD, nested, shared
from helpers.tiny import SMALL, tiny_gguf
from helpers.tiny_vision import SMALL_VISION, vision_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from webgemma import Gemma, InputError, WebgemmaError

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    path.write_bytes(tiny_gguf(replace(SMALL, context=256)))
    return path


@pytest.fixture(scope="module")
def small(path: Path) -> Iterator[Gemma]:
    mmproj = path.with_name("small.mmproj")
    mmproj.write_bytes(vision_gguf(replace(SMALL_VISION, positions=96)))
    with Gemma.load(path, "cpu", mmproj=mmproj) as loaded:
        yield loaded


def count(pieces: Iterator[object]) -> int:
    return sum(1 for _ in pieces)


# Any value in any place


@pytest.mark.parametrize(
    "name",
    ["model", "device", "context", "kv", "precision", "gpu", "memory_gb", "mmproj", "lora"],
)
def test_any_option_of_loading_is_taken_or_refused(path: Path, name: str) -> None:
    for value in (*ODD, "/dev/zero", "~nobody-has-this-name/x", ("x", 10**400), ("x", 1, 2)):
        options: dict[str, Any] = {"model": path, "device": "cpu", name: value}
        if name == "model" and value is None:
            continue  # the bundled model
        with suppress(WebgemmaError):
            Gemma.load(**options).close()


METHODS = {
    "logits": lambda model, value: model.logits(value),
    "generate": lambda model, value: count(model.generate(value, max_tokens=1)),
    "special": lambda model, value: count(model.generate("a", special=value, max_tokens=1)),
    "chat": lambda model, value: count(model.chat(value, max_tokens=1)),
    "message": lambda model, value: count(model.chat([value], max_tokens=1)),
    "tools": lambda model, value: count(model.chat("a", tools=value, max_tokens=1)),
    "tool": lambda model, value: count(model.chat("a", tools=[value], max_tokens=1)),
    "think": lambda model, value: count(model.chat("a", think=value, max_tokens=1)),
    "continue_last": lambda model, value: count(
        model.chat([USER, {"role": "assistant", "content": "a"}], continue_last=value, max_tokens=1)
    ),
    "overflow": lambda model, value: count(model.chat("a", overflow=value, max_tokens=1)),
    "encode_image": lambda model, value: model.encode_image(value),
    "budget": lambda model, value: model.encode_image(np.zeros((9, 9, 3), np.uint8), budget=value),
    "encode_audio": lambda model, value: model.encode_audio(value),
    "set_lora": lambda model, value: model.set_lora(value),
    "save": lambda model, value: model.save(value),
    "restore": lambda model, value: model.restore(value),
    "example_reader": lambda model, value: model.example_reader(value),
}


@pytest.mark.parametrize("name", METHODS)
def test_any_argument_is_taken_or_refused(small: Gemma, name: str) -> None:
    for value in ODD:
        with suppress(WebgemmaError):
            METHODS[name](small, value)


FIELDS = st.sampled_from(
    [
        *("role", "content", "images", "thinking", "tool_calls", "tool_responses", "tool_call_id"),
        *("name", "type", "text", "image", "path", "url", "image_url", "video", "audio", "fps"),
        *("input_audio", "budget", "function", "arguments", "id", "response", "items", "enum"),
    ]
)
OBJECTS: st.SearchStrategy[Any] = st.recursive(
    ANYTHING | st.sampled_from(["user", "assistant", "tool", "text", "image", "video"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(FIELDS, OBJECTS, max_size=5), st.sampled_from(["user", "assistant", "tool"]))
def test_any_message_is_taken_or_refused(small: Gemma, message: dict[str, Any], role: str) -> None:
    with suppress(WebgemmaError):
        count(small.chat([USER, {"role": role} | message, USER], max_tokens=1))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(FIELDS, OBJECTS, max_size=4))
def test_any_tool_is_taken_or_refused(small: Gemma, schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": schema, "b": {"type": "object"} | schema}}
    with suppress(WebgemmaError):
        small._template.parts([USER], [{"name": "f", "parameters": parameters}])


# What is right


def test_ids_of_every_kind_are_read(small: Gemma) -> None:
    expected = small.logits([2, 30, 31])
    ids = np.array([2, 30, 31])
    view = memoryview(bytes([2, 30, 31]))
    listed = [np.array(2), np.int8(30), 31]
    for given_ids in (ids, ids.astype(np.uint16), tuple(ids), iter(ids), view, listed):
        np.testing.assert_array_equal(small.logits(given_ids), expected)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([[1, 2]]), r"holds array\(\[1, 2\]\) at position 0; token ids are whole"),
        (np.array(3), r"is array\(3\); it must be a list of token ids"),
        ([np.array([2])], "token ids are whole numbers"),
        ([10**5000], "the id a value of type int at position 0"),
        (np.broadcast_to(np.int8(2), 10**9), "has 1000000000 tokens, but the context holds 256"),
        (iter(int, 1), "has at least 257 tokens, but the context holds 256"),
        (range(10**12), "1000000000000 tokens"),
    ],
    ids=["rows", "scalar", "array", "digits", "billion", "endless", "range"],
)
def test_wrong_ids_are_refused(small: Gemma, ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        small.logits(ids)


# Time and memory in proportion


def test_far_too_many_messages_are_left_out_or_refused(
    small: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    parts = small._template.parts
    monkeypatch.setattr(
        small._template,
        "parts",
        lambda messages, *a, **k: (written.append(len(messages)), parts(messages, *a, **k))[1],
    )
    messages = [{"role": "system", "content": "Be brief."}, *[USER] * 10**5]
    (piece,) = small.chat(messages, max_tokens=1)
    assert piece.usage is not None
    assert piece.usage.left_out > 10**5 - 256 // 4
    assert written[0] <= 2 * 256 // 4 + 2  # a turn takes at least 4 tokens
    with pytest.raises(InputError, match="at least 400004 tokens, but the context holds 256"):
        count(small.chat(messages, overflow="error"))
    with pytest.raises(InputError, match="at least 400000 tokens"):
        count(small.chat([{"role": "system", "content": ""}] * 10**5))
    assert len(written) == 1


def test_leaving_out_early_changes_nothing(small: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written with it has all that fits without it."""
    turns = [USER, {"role": "assistant", "content": "no"}] * 300
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    for messages in (turns, [*turns, USER, calls, {"role": "tool", "content": "x" * 100}]):
        pieces = [next(iter(small.chat(messages, max_tokens=1, temperature=0)))]
        with monkeypatch.context() as patch:
            patch.setattr(Gemma, "_shortened", lambda _, messages, *__: messages)
            pieces.append(next(iter(small.chat(messages, max_tokens=1, temperature=0))))
        early, late = (piece.usage for piece in pieces)
        assert early is not None
        assert late is not None
        assert early.left_out > 0
        assert abs(early.left_out - late.left_out) <= 256 // 5


@pytest.mark.parametrize("text", ["x" * 10**8, "the " * 10**7, "<" * 10**7])
def test_a_long_text_is_refused_at_once(
    small: Gemma, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[int] = []
    plain = small.tokenizer._plain
    monkeypatch.setattr(
        small.tokenizer, "_plain", lambda text: (tokenised.append(len(text)), plain(text))[1]
    )
    for pieces in (
        small.generate(text),
        small.generate(text, special=True),
        small.chat(text),
        small.chat([{"role": "assistant", "content": text}]),
    ):
        with pytest.raises(InputError, match=r"at least \d+ tokens, but the context holds 256"):
            count(pieces)
    assert sum(tokenised) < 4 * 2 * 300 * small.tokenizer.token_length


def test_a_long_old_turn_is_left_out(small: Gemma) -> None:
    (piece,) = small.chat([{"role": "user", "content": "x" * 10**7}, USER], max_tokens=1)
    assert piece.usage is not None
    assert piece.usage.left_out == 1


def schema(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value, "b": value}}
    return value


def called(arguments: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"} | arguments}]}]


@pytest.mark.parametrize("depth", [20, 60])
def test_values_that_share_their_parts_are_refused_at_once(small: Gemma, depth: int) -> None:
    cases: list[tuple[list[dict[str, Any]], Any]] = [
        ([USER], [{"name": "f", "parameters": schema(depth)}]),
        ([USER], [{"name": "f", "parameters": {"type": "object", "properties": {
            "a": {"type": "string", "enum": shared(depth)}}}}]),
        (called({"arguments": {"a": shared(depth)}}), None),
        ([*called({}), {"role": "tool", "content": {"a": shared(depth)}}], None),
        ([{"role": "assistant", "tool_responses": [{"response": shared(depth)}]}], None),
        (called({"arguments": {"a": ["x" * 10**6] * 1000}}), None),
    ]  # fmt: skip
    for messages, tools in cases:
        with pytest.raises(InputError, match="more tokens than the longest context has"):
            count(small.chat(messages, tools=tools))


def test_many_moderate_values_are_refused_together(small: Gemma) -> None:
    message = called({"arguments": {"a": shared(15)}})[1]
    with pytest.raises(InputError, match=r"With messages\[\d+\].*more than 1048576 values"):
        count(small.chat([USER, *[message] * 40]))


def test_values_that_contain_themselves_are_refused(small: Gemma) -> None:
    endless: dict[str, Any] = {"type": "object"}
    endless["properties"] = {"a": endless}
    for value in (endless, {"a": nested(100_000)}):
        with pytest.raises(InputError, match="nested more than 64 levels deep, or contains itself"):
            count(small.chat(called({"arguments": value})))
        with pytest.raises(InputError, match="nested more than 64 levels deep, or contains itself"):
            count(small.chat("a", tools=[{"name": "f", "parameters": value}]))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes have names on Unix only")
def test_a_pipe_is_not_waited_for(small: Gemma, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="it is not a file"):
        small.encode_image(pipe)
    with pytest.raises(InputError, match="There is no audio file at"):
        small.encode_audio(pipe)
    for part in ({"type": "video", "video": pipe}, {"type": "image", "path": pipe}):
        with pytest.raises(InputError, match="it is not a file"):
            count(small.chat([{"role": "user", "content": [part]}]))
    with pytest.raises(WebgemmaError):
        Gemma.load(pipe)
