"""Training data: rows of a file become token ids, and which of them are supervised.

A row is a conversation (`messages`), a question and its answer (`prompt` and `completion`, or
Alpaca's `instruction`, `input` and `output`), or plain `text`. Of a conversation the assistant's
tokens are supervised, after exactly the prompt that the model reads when it replies."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from webgemma.errors import InputError
from webgemma.text.chat import Chat, encode_parts
from webgemma.text.inputs import THINKING_FIELDS, read_messages
from webgemma.text.markup import Media
from webgemma.text.tokenizer import Tokenizer
from webgemma.values import shown, whole_number

MIN_BUCKET = 32  # tokens
_MAX_FILE_NBYTES = 1 << 30
_SUPERVISED_ROLE = "assistant"


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids; token t is to be predicted from those before it where supervised[t]."""

    ids: tuple[int, ...]
    supervised: tuple[bool, ...]
    line: int  # of the row it comes from

    @property
    def targets(self) -> int:
        """How many tokens are supervised."""
        return sum(self.supervised[1:])


@dataclass(slots=True)
class Report:
    """What the rows gave, and which were truncated or skipped."""

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    targets: int = 0
    truncated: list[int] = field(default_factory=list)  # lines
    skipped: dict[int, str] = field(default_factory=dict)  # line -> reason

    def __str__(self) -> str:
        text = (
            f"{self.rows} rows: {self.examples} examples, {self.tokens} tokens, "
            f"{self.targets} of them supervised"
        )
        if self.truncated:
            text += f"; {len(self.truncated)} truncated ({_line_numbers(self.truncated)})"
        if self.skipped:
            line, reason = next(iter(self.skipped.items()))
            text += f"; {len(self.skipped)} skipped (line {line}: {reason})"
        return text


@dataclass(frozen=True, slots=True)
class ExampleReader:
    """Makes examples of rows, with a model's tokenizer and chat template, up to a length."""

    tokenizer: Tokenizer
    chat: Chat
    max_tokens: int

    def __post_init__(self) -> None:
        if (whole_number(self.max_tokens) or 0) < 2:
            raise InputError(f"An example has at least 2 tokens, not {shown(self.max_tokens)}.")

    def read(self, path: str | os.PathLike[str]) -> tuple[list[Example], Report]:
        """Return the examples of a file: JSON lines, a JSON list, or (.txt) one plain text."""
        file = Path(path)
        return self.parse(_file_text(file), file.name)

    def parse(self, text: str, name: str) -> tuple[list[Example], Report]:
        """Return the examples of a file's text; the ending of its name decides how it is read."""
        if name.lower().endswith(".txt"):
            return self.document(text)
        return self.examples(_rows(text), name)

    def document(self, text: str) -> tuple[list[Example], Report]:
        """Return a plain text divided into examples of the greatest length."""
        ids, length = self.tokenizer.encode(text), self.max_tokens - 1
        chunks = [ids[start : start + length] for start in range(0, len(ids), length)]
        examples = [self._plain(chunk, 1) for chunk in chunks]
        if not examples:
            raise InputError("The text is empty: there is nothing to train on.")
        return examples, _counted(Report(rows=1), examples)

    def examples(
        self, rows: Iterable[tuple[int, object]], name: str = "The data"
    ) -> tuple[list[Example], Report]:
        """Return the examples of numbered rows; rows that cannot be used are reported."""
        report, examples = Report(), list[Example]()
        for line, row in rows:
            report.rows += 1
            try:
                if isinstance(row, InputError):
                    raise row
                found = [self._truncated(example, report) for example in self.row(row, line)]
                if not any(example.targets for example in found):
                    raise InputError(f"none of its first {self.max_tokens} tokens is supervised.")
                examples += [example for example in found if example.targets]
            except InputError as error:
                report.skipped[line] = str(error)
        if not examples:
            line, reason = next(iter(report.skipped.items()), (1, "it has no rows."))
            raise InputError(f"{name} has no row to train on; line {line}: {reason}")
        return examples, _counted(report, examples)

    def row(self, row: object, line: int) -> list[Example]:
        """Return the examples of one row, not truncated; InputError if its form is unknown."""
        if not isinstance(row, Mapping):
            raise InputError(f"a row must be an object, not {type(row).__name__}.")
        if "messages" in row:
            return self.conversation(row["messages"], row.get("tools"), line)
        if "prompt" in row and "completion" in row:
            prompt, completion = row["prompt"], row["completion"]
            if isinstance(prompt, list) and isinstance(completion, list):
                return self.conversation([*prompt, *completion], row.get("tools"), line)
            return self._question(_text(row, "prompt"), _text(row, "completion"), line)
        if "instruction" in row and "output" in row:
            given = _text(row, "input") if row.get("input") else ""
            question = _text(row, "instruction") + (f"\n\n{given}" if given else "")
            return self._question(question, _text(row, "output"), line)
        if "text" in row:
            ids = self.tokenizer.encode(_text(row, "text"))
            if not ids:
                raise InputError("its text is empty.")
            return [self._plain([*ids, self.tokenizer.eos], line)]
        names = ", ".join(repr(str(name)[:40]) for name in list(row)[:6]) or "nothing"
        raise InputError(
            f"it has {names}, but needs 'messages', 'prompt' and 'completion', "
            "'instruction' and 'output', or 'text'."
        )

    def conversation(self, messages: Any, tools: Any, line: int) -> list[Example]:
        """Return the assistant's turns, each after the prompt that it replies to.

        Turns whose prompt begins a later one's share an example; where it does not (the template
        drops thinking from history), the turn is an example of its own."""
        if not isinstance(messages, list):
            raise InputError(f"'messages' must be a list, not {type(messages).__name__}.")
        roles = [message.role for message in read_messages(messages)]
        role = _SUPERVISED_ROLE
        starts = [at for at in range(1, len(roles)) if roles[at] == role != roles[at - 1]]
        if not starts:
            raise InputError("it has no message of an assistant after another role's.")
        examples: list[Example] = []
        for at in reversed(starts):
            end = next((i for i in range(at, len(roles)) if roles[i] != role), len(roles))
            prompt, reply = self._turn(messages[:at], messages[:end], tools)
            ids, start = (*prompt, *reply), len(prompt)
            if examples and examples[-1].ids[: len(ids)] == ids:
                supervised = list(examples[-1].supervised)
                supervised[start : len(ids)] = [True] * len(reply)
                examples[-1] = Example(examples[-1].ids, tuple(supervised), line)
            else:
                examples.append(Example(ids, tuple(t >= start for t in range(len(ids))), line))
        return examples[::-1]

    def _turn(self, before: Any, whole: Any, tools: Any) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt and of the reply, which ends with the end of a turn."""
        think = any(
            any(message.get(key) for key in THINKING_FIELDS) for message in whole[len(before) :]
        )
        parts = self.chat.parts(whole, tools, think, add_generation_prompt=False)
        if any(isinstance(part, Media) for part in parts):
            raise InputError("it has images or audio, which training does not support yet.")
        # A large model's prompt ends with empty thinking, which finished turns do not have.
        stem = self.chat.without_empty_thought.encode(self.tokenizer, before, tools, think)
        ids = encode_parts(self.tokenizer, parts)
        ends = {self.tokenizer.special_ids[end] for end in self.chat.ends}
        stop = max((at + 1 for at, token in enumerate(ids) if token in ends), default=0)
        if ids[: len(stem)] != stem or stop <= len(stem):
            raise InputError("the assistant's turn does not follow from the messages before it.")
        return self.chat.encode(self.tokenizer, before, tools, think), ids[len(stem) : stop]

    def _question(self, prompt: str, completion: str, line: int) -> list[Example]:
        if not completion.strip():
            raise InputError("its completion is empty.")
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        return self.conversation(messages, None, line)

    def _plain(self, ids: Sequence[int], line: int) -> Example:
        return Example((self.tokenizer.bos, *ids), (False, *[True] * len(ids)), line)

    def _truncated(self, example: Example, report: Report) -> Example:
        if len(example.ids) <= self.max_tokens:
            return example
        if example.line not in report.truncated:
            report.truncated.append(example.line)
        ids, supervised = example.ids[: self.max_tokens], example.supervised[: self.max_tokens]
        return Example(ids, supervised, example.line)


def _file_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_NBYTES:
            raise InputError(f"{path} is larger than 1 GiB: split it.")
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}.") from None


def _rows(text: str) -> Iterator[tuple[int, object]]:
    """Yield each row with its line, or its number in a JSON list; an error instead of a bad one."""
    if text.lstrip().startswith("["):
        listed = _json(text)
        yield from enumerate(listed if isinstance(listed, list) else [listed], 1)
        return
    for line, row in enumerate(text.split("\n"), 1):
        if row.strip():
            yield line, _json(row)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return InputError(f"it is not valid JSON: {error}.")


def _text(row: Mapping[str, object], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise InputError(f"{key!r} must be a string, not {type(value).__name__}.")
    return value


def _counted(report: Report, examples: list[Example]) -> Report:
    report.examples = len(examples)
    report.tokens = sum(len(example.ids) for example in examples)
    report.targets = sum(example.targets for example in examples)
    return report


def _line_numbers(lines: list[int]) -> str:
    first = ", ".join(map(str, lines[:5]))
    return f"line {first}" if len(lines) == 1 else f"lines {first}" + ", …" * (len(lines) > 5)


def split(
    examples: Sequence[Example], share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Split examples into those to train on and a held-out share of the rows, by the seed."""
    if not 0 <= share < 1:
        raise InputError(f"The held-out share must be from 0 to below 1, not {share}.")
    lines = sorted({example.line for example in examples})
    count = min(round(share * len(lines)), len(lines) - 1)
    if share and len(lines) > 1:
        count = max(1, count)
    held_out = set(random.Random(seed).sample(lines, count))
    train = [example for example in examples if example.line not in held_out]
    return train, [example for example in examples if example.line in held_out]


def bucket(length: int) -> int:
    """Return the length to which an example is padded: 32, 48, 64, 96, 128, …"""
    size = MIN_BUCKET
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def batches(examples: Sequence[Example], size: int, seed: int) -> list[list[Example]]:
    """Return an epoch's batches: up to `size` examples of one bucket, shuffled by the seed."""
    shuffled = list(examples)
    order = random.Random(seed)
    order.shuffle(shuffled)
    shuffled.sort(key=lambda example: bucket(len(example.ids)))  # stable: shuffled inside
    result = []
    for _, group in groupby(shuffled, key=lambda example: bucket(len(example.ids))):
        alike = list(group)
        result += [alike[start : start + size] for start in range(0, len(alike), size)]
    order.shuffle(result)
    return result
