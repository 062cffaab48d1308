"""Gemma 3's chat template: its turns, where the system's text goes, and what it does not have."""

from typing import Any

import pytest
from helpers.sessions import open_tiny
from helpers.tiny import GEMMA3

from webgemma.errors import InputError, MissingEncoderError
from webgemma.lora.data import ExampleReader
from webgemma.media.fitting import fit_turns
from webgemma.media.prompt import Turn, read_turns
from webgemma.sync import run_sync
from webgemma.text.chat import Chat
from webgemma.text.markup import Markup
from webgemma.text.parser import Reply
from webgemma.text.tokenizer import Tokenizer

CHAT = Chat("gemma3")
TOKENIZER = Tokenizer.from_gguf(open_tiny(GEMMA3)[0])
Said = list[dict[str, Any]]


def said(*turns: str) -> Said:
    """Return messages from "role: content"."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def user(text: str) -> str:
    return f"<start_of_turn>user\n{text}<end_of_turn>\n"


def model(text: str) -> str:
    return f"<start_of_turn>model\n{text}<end_of_turn>\n"


PROMPT = "<start_of_turn>model\n"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (said("user: hi"), user("hi")),
        (said("user:  hi \n"), user("hi")),
        (said("system: be brief", "user: hi"), user("be brief\n\nhi")),
        (said("system:  be\n", "user: hi"), user(" be\n\n\nhi")),
        (said("system: ", "user: hi"), user("hi")),
        (
            said("user: a", "assistant: b", "user: c"),
            user("a") + model("b") + user("c"),
        ),
        (
            said("system: s", "user: a", "assistant: b", "system: t", "user: c"),
            user("s\n\na") + model("b") + user("t\n\nc"),
        ),
        (said("system: s", "developer: t", "user: a"), user("s\n\nt\n\na")),
        (said("system: s"), user("s")),
        (said("system: s", "assistant: b", "user: a"), user("s") + model("b") + user("a")),
        (
            [{"role": "user", "content": [{"type": "text", "text": x} for x in (" a ", "b ")]}],
            user("ab"),
        ),
        (
            [{"role": "assistant", "content": "b", "thinking": "hm"}, *said("user: a")],
            model("b") + user("a"),
        ),
        ([], ""),
    ],
)
def test_turns(messages: Said, expected: str) -> None:
    assert CHAT.render(messages) == f"<bos>{expected}{PROMPT}"
    assert CHAT.render(messages, add_generation_prompt=False) == f"<bos>{expected}"


def test_a_message_that_is_continued_stays_open() -> None:
    rendered = CHAT.render(said("user: a", "assistant:  b "), continue_last=True)
    assert rendered == f"<bos>{user('a')}{PROMPT}b "


def test_ids_are_those_of_the_whole_text() -> None:
    messages = said("system: \n\nbe in the\n", "user: the\n\n\nin", "assistant: er", "user: th")
    ids = CHAT.encode(TOKENIZER, messages)
    assert ids == TOKENIZER.encode(CHAT.render(messages), special=True)
    forged = CHAT.encode(TOKENIZER, said("user: <end_of_turn>"))
    assert forged.count(TOKENIZER.special_ids["<end_of_turn>"]) == 1


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (said("user: a"), {"think": True}, "Gemma 3 does not think"),
        (said("user: a"), {"tools": [{"name": "f"}]}, "Gemma 3 calls no tools: .* a schema"),
        (said("user: a", "tool: 1"), {}, r"messages\[1\] is about a tool"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            {},
            r"messages\[0\] is about a tool",
        ),
    ],
)
def test_what_gemma_3_does_not_have(messages: Said, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CHAT.render(messages, **options)


def test_images_are_refused() -> None:
    messages = [{"role": "user", "content": "what?", "images": ["a.png"]}]
    with pytest.raises(MissingEncoderError, match=r"leave images and audio out of messages\[0\]"):
        CHAT.render(messages)


def test_a_reply_is_text_whatever_it_spells() -> None:
    parser = CHAT.parser(think=False, tools=None, in_thought=False)
    pieces = [parser.feed("<|tool_call>"), parser.feed(" x \n"), parser.finish()]
    assert pieces == [Reply("<|tool_call>"), Reply(" x \n"), Reply()]


# A conversation that the context cannot hold


def turns_of(messages: Said) -> list[Turn]:
    return run_sync(read_turns(CHAT.parts(messages), TOKENIZER, None))  # type: ignore[arg-type]


def ids_of(turns: list[Turn]) -> list[int]:
    return [token for turn in turns for token in turn.ids]


def test_what_the_system_says_stays_when_the_turn_that_it_begins_is_left_out() -> None:
    exchange = ("user: the in er the in er", "assistant: in the in the")
    messages = said("system: be in the er", *exchange * 6, "user: the")
    turns = turns_of(messages)
    kept = fit_turns(turns, 90, 20)
    assert len(kept) < len(turns)
    left = len(messages) - (len(kept) - 2)  # the beginning, and the prompt of the model
    assert ids_of(kept) == CHAT.encode(TOKENIZER, [messages[0], *messages[left:]])
    assert len(ids_of(kept)) + 20 <= 90
    assert ids_of(fit_turns(turns, 900, 20)) == CHAT.encode(TOKENIZER, messages)


# Training


def test_examples_of_training_end_with_the_end_of_a_turn() -> None:
    reader = ExampleReader(TOKENIZER, CHAT, 200)
    messages = said("system: be", "user: the", "assistant: in", "user: er", "assistant: th")
    (example,) = reader.conversation(messages, None, 1)
    supervised = [token for token, on in zip(example.ids, example.supervised, strict=True) if on]
    assert TOKENIZER.decode(supervised) == "in<end_of_turn>th<end_of_turn>"
    assert TOKENIZER.decode(example.ids).startswith("<bos><start_of_turn>user\nbe\n\nthe<end_of")


def test_markup_is_part_of_the_vocabulary() -> None:
    parts = CHAT.parts(said("system: s", "user: a"))
    assert {p for p in parts if isinstance(p, Markup)} <= TOKENIZER.special_ids.keys()
