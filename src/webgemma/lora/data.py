"""Texts to learn from: rows of a file become token ids, and which of them are to be foreseen.

A row is a conversation (`messages`), a question and its answer (`prompt` and `completion`, or
Alpaca's `instruction`, `input` and `output`), or plain `text`. Of a conversation the assistant's
part is learnt, after the very prompt that the model is given when it answers.
"""

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
from webgemma.text.markup import RESPONSE_OPEN, TURN_CLOSE, Media
from webgemma.text.tokenizer import Tokenizer

MIN_BUCKET = 32  # tokens
_MAX_FILE_NBYTES = 1 << 30
_SAYS = "assistant"  # the role whose words are learnt


@dataclass(frozen=True, slots=True)
class Example:
    """Token t is to be foreseen from those before it where supervised[t]."""

    ids: tuple[int, ...]
    supervised: tuple[bool, ...]
    line: int  # of the row it comes from

    @property
    def targets(self) -> int:
        """How many tokens are to be foreseen."""
        return sum(self.supervised[1:])


@dataclass(slots=True)
class Report:
    """What became of the rows."""

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    targets: int = 0
    truncated: list[int] = field(default_factory=list)  # lines
    skipped: dict[int, str] = field(default_factory=dict)  # line -> why

    def __str__(self) -> str:
        said = (
            f"{self.rows} rows: {self.examples} examples, {self.tokens} tokens, "
            f"{self.targets} of them to learn"
        )
        if self.truncated:
            said += f"; {len(self.truncated)} cut to the longest length ({_some(self.truncated)})"
        if self.skipped:
            line, why = next(iter(self.skipped.items()))
            said += f"; {len(self.skipped)} skipped (line {line}: {why})"
        return said


@dataclass(frozen=True, slots=True)
class Texts:
    """How rows become examples: a model's words and chat format, and the longest example."""

    tokenizer: Tokenizer
    chat: Chat
    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise InputError(f"An example has at least 2 tokens, not {self.max_tokens}.")

    def read(self, path: str | os.PathLike[str]) -> tuple[list[Example], Report]:
        """All examples of a file: JSON lines, a JSON list, or (.txt) one plain text."""
        file = Path(path)
        return self.parse(_file_text(file), file.name)

    def parse(self, text: str, name: str) -> tuple[list[Example], Report]:
        """All examples of a file's text; its name says which kind it is."""
        if name.lower().endswith(".txt"):
            return self.document(text)
        return self.examples(_rows(text), name)

    def document(self, text: str) -> tuple[list[Example], Report]:
        """A plain text, cut into pieces of the longest length."""
        ids, room = self.tokenizer.encode(text), self.max_tokens - 1
        pieces = [ids[start : start + room] for start in range(0, len(ids), room)]
        made = [self._plain(piece, 1) for piece in pieces]
        if not made:
            raise InputError("The text is empty: there is nothing to learn.")
        return made, _counted(Report(rows=1), made)

    def examples(
        self, rows: Iterable[tuple[int, object]], name: str = "The data"
    ) -> tuple[list[Example], Report]:
        """The examples of numbered rows; rows that cannot be used are reported, not raised."""
        report, made = Report(), list[Example]()
        for line, row in rows:
            report.rows += 1
            try:
                if isinstance(row, InputError):
                    raise row
                found = [self._cut(example, report) for example in self.row(row, line)]
                if not any(example.targets for example in found):
                    raise InputError(f"nothing to learn is left within {self.max_tokens} tokens.")
                made += [example for example in found if example.targets]
            except InputError as error:
                report.skipped[line] = str(error)
        if not made:
            line, why = next(iter(report.skipped.items()), (1, "it has no rows."))
            raise InputError(f"{name} has no row to learn from; line {line}: {why}")
        return made, _counted(report, made)

    def row(self, row: object, line: int) -> list[Example]:
        """The examples of one row, whole; InputError when it is none that we know."""
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
            f"it has {names}; wanted are 'messages', 'prompt' and 'completion', "
            "'instruction' and 'output', or 'text'."
        )

    def conversation(self, messages: Any, tools: Any, line: int) -> list[Example]:
        """What the assistant says, each time after the prompt it would be given there.

        Turns whose prompt is the beginning of a later one's share an example; where it is not (a
        thought that history forgets), the turn is an example of its own."""
        if not isinstance(messages, list):
            raise InputError(f"'messages' must be a list, not {type(messages).__name__}.")
        roles = [message.role for message in read_messages(messages)]
        starts = [at for at in range(1, len(roles)) if roles[at] == _SAYS != roles[at - 1]]
        if not starts:
            raise InputError("no message of an assistant follows another: nothing to learn.")
        made: list[Example] = []
        for at in reversed(starts):
            end = next((i for i in range(at, len(roles)) if roles[i] != _SAYS), len(roles))
            prompt, reply = self._turn(messages[:at], messages[:end], tools)
            ids, learnt = (*prompt, *reply), range(len(prompt), len(prompt) + len(reply))
            if made and made[-1].ids[: len(ids)] == ids:
                supervised = list(made[-1].supervised)
                supervised[learnt.start : learnt.stop] = [True] * len(learnt)
                made[-1] = Example(made[-1].ids, tuple(supervised), line)
            else:
                made.append(Example(ids, tuple(t in learnt for t in range(len(ids))), line))
        return made[::-1]

    def _turn(self, before: Any, whole: Any, tools: Any) -> tuple[list[int], list[int]]:
        """The prompt's ids and the reply's, which ends with the token that ends a turn."""
        think = any(
            any(message.get(key) for key in THINKING_FIELDS) for message in whole[len(before) :]
        )
        parts = self.chat.parts(whole, tools, think, add_generation_prompt=False)
        if any(isinstance(part, Media) for part in parts):
            raise InputError("it has pictures or sounds, which cannot be learnt from yet.")
        # A large model's prompt ends with an empty thought, which finished turns do not have.
        stem = Chat("small").encode(self.tokenizer, before, tools, think)
        ids = encode_parts(self.tokenizer, parts)
        ends = {self.tokenizer.special_ids[end] for end in (TURN_CLOSE, RESPONSE_OPEN)}
        stop = max((at + 1 for at, token in enumerate(ids) if token in ends), default=0)
        if ids[: len(stem)] != stem or stop <= len(stem):
            raise InputError("the assistant's part cannot be told from what stands before it.")
        return self.chat.encode(self.tokenizer, before, tools, think), ids[len(stem) : stop]

    def _question(self, prompt: str, completion: str, line: int) -> list[Example]:
        if not completion.strip():
            raise InputError("its answer is empty.")
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        return self.conversation(messages, None, line)

    def _plain(self, ids: Sequence[int], line: int) -> Example:
        return Example((self.tokenizer.bos, *ids), (False, *[True] * len(ids)), line)

    def _cut(self, example: Example, report: Report) -> Example:
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
    """Each row with its line, or with its number in a JSON list; an error in place of a bad one."""
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
        return InputError(f"it is no JSON: {error}.")


def _text(row: Mapping[str, object], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise InputError(f"{key!r} must be a text, not {type(value).__name__}.")
    return value


def _counted(report: Report, examples: list[Example]) -> Report:
    report.examples = len(examples)
    report.tokens = sum(len(example.ids) for example in examples)
    report.targets = sum(example.targets for example in examples)
    return report


def _some(lines: list[int]) -> str:
    named = ", ".join(map(str, lines[:5]))
    return f"line {named}" if len(lines) == 1 else f"lines {named}" + ", …" * (len(lines) > 5)


def split(
    examples: Sequence[Example], share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """To learn from, and to judge by: a share of the rows, the same ones for the same seed."""
    if not 0 <= share < 1:
        raise InputError(f"The share of rows to judge by must be from 0 to below 1, not {share}.")
    lines = sorted({example.line for example in examples})
    count = min(round(share * len(lines)), len(lines) - 1)
    if share and len(lines) > 1:
        count = max(1, count)
    kept = set(random.Random(seed).sample(lines, count))
    learn = [example for example in examples if example.line not in kept]
    return learn, [example for example in examples if example.line in kept]


def bucket(length: int) -> int:
    """The length an example is filled up to: 32, 48, 64, 96, 128, … at most half of it in vain."""
    size = MIN_BUCKET
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def batches(examples: Sequence[Example], size: int, seed: int) -> list[list[Example]]:
    """One epoch: at most `size` examples of one bucket together, in an order of the seed."""
    shuffled = list(examples)
    order = random.Random(seed)
    order.shuffle(shuffled)
    shuffled.sort(key=lambda example: bucket(len(example.ids)))  # stable: shuffled inside
    made = []
    for _, group in groupby(shuffled, key=lambda example: bucket(len(example.ids))):
        held = list(group)
        made += [held[start : start + size] for start in range(0, len(held), size)]
    order.shuffle(made)
    return made
