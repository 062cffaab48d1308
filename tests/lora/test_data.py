"""Rows become examples: the prompt of inference, the assistant's tokens to learn, a report."""

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
from webgemma.lora.data import MIN_BUCKET, Example, Texts, batches, bucket, split
from webgemma.sync import run_sync
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_gguf(run_sync(Gguf.aopen(BytesSource(tiny_gguf(SMALL), "tiny.gguf"))))
SIZES = ("small", "large")


def texts(size: Any = "small", max_tokens: int = 400) -> Texts:
    return Texts(TOKENIZER, Chat(size), max_tokens)


def learnt(example: Example) -> str:
    """What is to be foreseen, runs of it separated by ¦."""
    pieces, was = [], False
    for token, now in zip(example.ids, example.supervised, strict=True):
        if now:
            pieces.append(("" if was else "¦") + TOKENIZER.decode([token]))
        was = now
    return "".join(pieces)[1:]


def message(role: str, content: str, **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


TALK = [
    message("system", "be kind"),
    message("user", "hello"),
    message("assistant", "hi there"),
    message("user", "bye"),
    message("assistant", "see you"),
]


def test_a_conversation_is_learnt_in_one_go() -> None:
    (example,) = texts().row({"messages": TALK}, 7)
    assert example.line == 7
    assert learnt(example) == "hi there<turn|>¦see you<turn|>"
    shown = Chat().render(TALK, add_generation_prompt=False)
    assert TOKENIZER.decode(example.ids) == shown.rstrip("\n")


@pytest.mark.parametrize("size", SIZES)
def test_replies_follow_the_prompt_of_inference(size: Any) -> None:
    examples = texts(size).row({"messages": TALK}, 1)
    assert learnt(examples[-1]).split("¦")[-1] == "see you<turn|>"
    for at in (2, 4):
        prompt = Chat(size).encode(TOKENIZER, TALK[:at])
        assert any(
            list(example.ids[: len(prompt)]) == prompt and example.supervised[len(prompt)]
            for example in examples
        )


def test_thoughts_are_learnt_where_the_template_keeps_them() -> None:
    talk = [message("user", "why"), message("assistant", "so", thinking="hm")]
    (example,) = texts().row({"messages": talk}, 1)
    assert learnt(example) == "<|channel>thought\nhm\n<channel|>so<turn|>"
    prompt = Chat().encode(TOKENIZER, talk[:1], think=True)
    assert list(example.ids[: len(prompt)]) == prompt


def test_calls_of_tools_are_learnt_and_answers_are_not() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    talk = [
        message("user", "go"),
        message("assistant", "", tool_calls=[call]),
        message("tool", "done", tool_name="f"),
        message("assistant", "it is done"),
    ]
    examples = texts().row({"messages": talk}, 1)
    said = [learnt(example) for example in examples]
    assert said[-1].endswith("it is done<turn|>")
    assert any("<|tool_call>" in part for part in said)
    assert not any("value" in part for part in said)


ROWS: dict[str, Mapping[str, object]] = {
    "completion": {"prompt": "ask", "completion": "tell"},
    "messages": {"prompt": [message("user", "ask")], "completion": [message("assistant", "tell")]},
    "alpaca": {"instruction": "ask", "input": "", "output": "tell"},
}


@pytest.mark.parametrize("kind", ROWS)
def test_questions_and_answers_are_conversations(kind: str) -> None:
    talk = [message("user", "ask"), message("assistant", "tell")]
    assert texts().row(ROWS[kind], 1) == texts().row({"messages": talk}, 1)


def test_alpacas_input_follows_its_instruction() -> None:
    (example,) = texts().row({"instruction": "ask", "input": "this", "output": "tell"}, 1)
    assert "user\nask\n\nthis<turn|>" in TOKENIZER.decode(example.ids)


def test_plain_text_is_learnt_whole() -> None:
    (example,) = texts().row({"text": "the inner"}, 1)
    assert example.ids[0] == TOKENIZER.bos
    assert learnt(example) == "the inner<eos>"
    assert not example.supervised[0]


BAD: dict[str, tuple[object, str]] = {
    "list": ([1], "must be an object"),
    "nothing": ({}, "it has nothing; wanted"),
    "other": ({"question": "x"}, "it has 'question'; wanted"),
    "number": ({"text": 3}, "'text' must be a text, not int"),
    "empty": ({"text": ""}, "its text is empty"),
    "no answer": ({"prompt": "x", "completion": " "}, "its answer is empty"),
    "no list": ({"messages": "x"}, "must be a list"),
    "no assistant": ({"messages": [message("user", "x")]}, "nothing to learn"),
    "only assistant": ({"messages": [message("assistant", "x")]}, "nothing to learn"),
    "role": ({"messages": [message("robot", "x"), message("assistant", "y")]}, "role"),
    "strings": ({"messages": ["x", message("assistant", "y")]}, "messages"),
    "picture": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
                message("assistant", "y"),
            ]
        },
        "pictures or sounds",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_skipped_and_named(case: str, tmp_path: Path) -> None:
    row, why = BAD[case]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "good"}) + "\n\n" + json.dumps(row) + "\n{broken\n")
    examples, report = texts().read(file)
    assert len(examples) == 1
    assert why in report.skipped[3]
    assert "no JSON" in report.skipped[4]
    assert report.rows == 3
    assert "2 skipped (line 3" in str(report)


def test_long_rows_are_cut_and_named(tmp_path: Path) -> None:
    rows = [{"text": "a" * 30}, {"text": "b"}, {"prompt": "c" * 50, "completion": "d"}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    examples, report = texts(max_tokens=20).read(file)
    assert [len(example.ids) for example in examples] == [20, 3]
    assert report.truncated == [1, 3]
    assert "nothing to learn is left within 20 tokens" in report.skipped[3]
    assert (report.tokens, report.targets) == (23, 21)


def test_a_plain_file_is_cut_into_pieces(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("a" * 45)
    examples, _ = texts(max_tokens=20).read(file)
    assert [example.targets for example in examples] == [19, 19, 7]


def test_files_with_nothing_to_learn(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(InputError, match=r"rows\.jsonl has no row to learn from; line 1: 'text'"):
        texts().read(tmp_path / "rows.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        texts().read(tmp_path / "bytes.jsonl")
    with pytest.raises(InputError, match="There is no file"):
        texts().read(tmp_path / "none.jsonl")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="is empty"):
        texts().read(tmp_path / "empty.txt")


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
def test_any_row_is_learnt_or_refused(row: object) -> None:
    try:
        examples = texts().row(row, 1)
    except InputError:
        return
    for example in examples:
        assert len(example.ids) == len(example.supervised)
        assert example.targets


def test_the_split_is_by_rows_and_by_seed() -> None:
    examples = [Example((2, 3), (False, True), line // 2) for line in range(40)]
    learn, judge = split(examples, 0.2, 5)
    assert len(judge) == 8
    assert not {e.line for e in learn} & {e.line for e in judge}
    assert split(examples, 0.2, 5) == (learn, judge)
    assert split(examples, 0.2, 6)[1] != judge
    assert split(examples, 0, 5)[1] == []
    assert len(split(examples[:2], 0.5, 5)[0]) == 2  # one row is always left to learn from
    with pytest.raises(InputError, match="from 0 to below 1"):
        split(examples, 1.0, 5)


@given(st.integers(1, 10_000))
def test_buckets_waste_less_than_half(length: int) -> None:
    assert length <= bucket(length) <= max(MIN_BUCKET, length * 3 // 2)


def test_batches_hold_every_example_once() -> None:
    examples = [Example((0,) * n, (True,) * n, n) for n in range(2, 90)]
    made = batches(examples, 4, 1)
    assert sorted(e.line for batch in made for e in batch) == list(range(2, 90))
    assert all(len(batch) <= 4 and len({bucket(e.line) for e in batch}) == 1 for batch in made)
    assert batches(examples, 4, 1) == made
    assert batches(examples, 4, 2) != made
