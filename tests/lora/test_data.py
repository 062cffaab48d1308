"""Training data: the prompts of inference, the supervised tokens, and the report on the rows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import SMALL, tiny_gguf
from hypothesis import given
from hypothesis import strategies as st

from webgemma.errors import InputError
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.lora.data import MIN_BUCKET, Example, ExampleReader, batches, bucket, split
from webgemma.sync import run_sync
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_gguf(run_sync(Gguf.aopen(BytesSource(tiny_gguf(SMALL), "tiny.gguf"))))
SIZES = ("small", "large")


def reader(size: Any = "small", max_tokens: int = 400) -> ExampleReader:
    return ExampleReader(TOKENIZER, Chat(size), max_tokens)


def supervised_text(example: Example) -> str:
    """Return the text of the supervised tokens, runs of them separated by ¦."""
    texts, previous = [], False
    for token, supervised in zip(example.ids, example.supervised, strict=True):
        if supervised:
            texts.append(("" if previous else "¦") + TOKENIZER.decode([token]))
        previous = supervised
    return "".join(texts)[1:]


def message(role: str, content: str, **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


CONVERSATION = [
    message("system", "be kind"),
    message("user", "hello"),
    message("assistant", "hi there"),
    message("user", "bye"),
    message("assistant", "see you"),
]


def test_a_conversation_is_one_example() -> None:
    (example,) = reader().row({"messages": CONVERSATION}, 7)
    assert example.line == 7
    assert supervised_text(example) == "hi there<turn|>¦see you<turn|>"
    rendered = Chat().render(CONVERSATION, add_generation_prompt=False)
    assert TOKENIZER.decode(example.ids) == rendered.rstrip("\n")


@pytest.mark.parametrize("size", SIZES)
def test_replies_follow_the_prompts_of_inference(size: Any) -> None:
    examples = reader(size).row({"messages": CONVERSATION}, 1)
    assert supervised_text(examples[-1]).split("¦")[-1] == "see you<turn|>"
    for at in (2, 4):
        prompt = Chat(size).encode(TOKENIZER, CONVERSATION[:at])
        assert any(
            list(example.ids[: len(prompt)]) == prompt and example.supervised[len(prompt)]
            for example in examples
        )


def test_thinking_is_supervised_where_the_template_keeps_it() -> None:
    messages = [message("user", "why"), message("assistant", "so", thinking="hm")]
    (example,) = reader().row({"messages": messages}, 1)
    assert supervised_text(example) == "<|channel>thought\nhm\n<channel|>so<turn|>"
    prompt = Chat().encode(TOKENIZER, messages[:1], think=True)
    assert list(example.ids[: len(prompt)]) == prompt


def test_tool_calls_are_supervised_and_their_results_are_not() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        message("user", "go"),
        message("assistant", "", tool_calls=[call]),
        message("tool", "done", tool_name="f"),
        message("assistant", "it is done"),
    ]
    examples = reader().row({"messages": messages}, 1)
    texts = [supervised_text(example) for example in examples]
    assert texts[-1].endswith("it is done<turn|>")
    assert any("<|tool_call>" in text for text in texts)
    assert not any("value" in text for text in texts)


ROWS: dict[str, Mapping[str, object]] = {
    "completion": {"prompt": "ask", "completion": "tell"},
    "messages": {"prompt": [message("user", "ask")], "completion": [message("assistant", "tell")]},
    "alpaca": {"instruction": "ask", "input": "", "output": "tell"},
}


@pytest.mark.parametrize("kind", ROWS)
def test_prompts_with_completions_are_conversations(kind: str) -> None:
    messages = [message("user", "ask"), message("assistant", "tell")]
    assert reader().row(ROWS[kind], 1) == reader().row({"messages": messages}, 1)


def test_the_input_of_alpaca_follows_its_instruction() -> None:
    (example,) = reader().row({"instruction": "ask", "input": "this", "output": "tell"}, 1)
    assert "user\nask\n\nthis<turn|>" in TOKENIZER.decode(example.ids)


def test_plain_text_is_supervised_throughout() -> None:
    (example,) = reader().row({"text": "the inner"}, 1)
    assert example.ids[0] == TOKENIZER.bos
    assert supervised_text(example) == "the inner<eos>"
    assert not example.supervised[0]


INVALID: dict[str, tuple[object, str]] = {
    "list": ([1], "must be an object"),
    "nothing": ({}, "it has nothing, but needs"),
    "other": ({"question": "x"}, "it has 'question', but needs"),
    "number": ({"text": 3}, "'text' must be a string, not int"),
    "empty": ({"text": ""}, "its text is empty"),
    "no answer": ({"prompt": "x", "completion": " "}, "its completion is empty"),
    "no list": ({"messages": "x"}, "must be a list"),
    "no assistant": ({"messages": [message("user", "x")]}, "no message of an assistant"),
    "only assistant": (
        {"messages": [message("assistant", "x")]},
        "no message of an assistant after another role's",
    ),
    "role": ({"messages": [message("robot", "x"), message("assistant", "y")]}, "role"),
    "strings": ({"messages": ["x", message("assistant", "y")]}, "messages"),
    "image": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
                message("assistant", "y"),
            ]
        },
        "images or audio",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_rows_are_skipped_and_reported(case: str, tmp_path: Path) -> None:
    row, reason = INVALID[case]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "good"}) + "\n\n" + json.dumps(row) + "\n{broken\n")
    examples, report = reader().read(file)
    assert len(examples) == 1
    assert reason in report.skipped[3]
    assert "not valid JSON" in report.skipped[4]
    assert report.rows == 3
    assert "2 skipped (line 3" in str(report)


def test_long_rows_are_truncated_and_reported(tmp_path: Path) -> None:
    rows = [{"text": "a" * 30}, {"text": "b"}, {"prompt": "c" * 50, "completion": "d"}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    examples, report = reader(max_tokens=20).read(file)
    assert [len(example.ids) for example in examples] == [20, 3]
    assert report.truncated == [1, 3]
    assert "none of its first 20 tokens is supervised" in report.skipped[3]
    assert (report.tokens, report.targets) == (23, 21)


def test_a_plain_file_is_divided_into_examples(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("a" * 45)
    examples, _ = reader(max_tokens=20).read(file)
    assert [example.targets for example in examples] == [19, 19, 7]


def test_files_without_examples_raise_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(InputError, match=r"rows\.jsonl has no row to train on; line 1: 'text'"):
        reader().read(tmp_path / "rows.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        reader().read(tmp_path / "bytes.jsonl")
    with pytest.raises(InputError, match="There is no file"):
        reader().read(tmp_path / "none.jsonl")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="is empty"):
        reader().read(tmp_path / "empty.txt")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "prompt",
                    "completion",
                    "text",
                    "role",
                    "content",
                    "instruction",
                    "output",
                ]
            ),
            inner | st.sampled_from(["user", "assistant"]),
            max_size=4,
        )
    ),
)


@given(JSON)
def test_any_row_gives_examples_or_an_error(row: object) -> None:
    try:
        examples = reader().row(row, 1)
    except InputError:
        return
    for example in examples:
        assert len(example.ids) == len(example.supervised)
        assert example.targets


def test_the_split_is_by_rows_and_by_seed() -> None:
    examples = [Example((2, 3), (False, True), line // 2) for line in range(40)]
    train, held_out = split(examples, 0.2, 5)
    assert len(held_out) == 8
    assert not {e.line for e in train} & {e.line for e in held_out}
    assert split(examples, 0.2, 5) == (train, held_out)
    assert split(examples, 0.2, 6)[1] != held_out
    assert split(examples, 0, 5)[1] == []
    assert len(split(examples[:2], 0.5, 5)[0]) == 2  # one row is always left to train on
    with pytest.raises(InputError, match="from 0 to below 1"):
        split(examples, 1.0, 5)


@given(st.integers(1, 10_000))
def test_buckets_add_at_most_half_of_the_length(length: int) -> None:
    assert length <= bucket(length) <= max(MIN_BUCKET, length * 3 // 2)


def test_batches_hold_every_example_once() -> None:
    examples = [Example((0,) * n, (True,) * n, n) for n in range(2, 90)]
    first = batches(examples, 4, 1)
    assert sorted(e.line for batch in first for e in batch) == list(range(2, 90))
    assert all(len(batch) <= 4 and len({bucket(e.line) for e in batch}) == 1 for batch in first)
    assert batches(examples, 4, 1) == first
    assert batches(examples, 4, 2) != first
