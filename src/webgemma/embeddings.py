"""Embeddings: texts become ids, with the prefix of a task, and raw vectors rows of length 1.

EmbeddingGemma 2 also reads images and audio, which stand before the text that comes with them."""

import math
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from webgemma.errors import InputError
from webgemma.gemma.config import Config, Embedding
from webgemma.media.encoders import Encoders
from webgemma.media.prompt import Turn, items_of
from webgemma.replies import check_ids
from webgemma.text.chat import encode_parts
from webgemma.text.inputs import read_content, wrong_type
from webgemma.text.markup import VIDEO, Markup, Media
from webgemma.text.tokenizer import Tokenizer
from webgemma.values import shown, whole_number

Task = Literal[
    "query",
    "document",
    "question",
    "fact",
    "classification",
    "clustering",
    "similarity",
    "code",
    "summary",
]
# What stands before a text, as Google's model card has it.
PREFIXES: Mapping[str, str] = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "question": "task: question answering | query: ",
    "fact": "task: fact checking | query: ",
    "classification": "task: classification | query: ",
    "clustering": "task: clustering | query: ",
    "similarity": "task: sentence similarity | query: ",
    "code": "task: code retrieval | query: ",
    "summary": "task: summarization | query: ",
}
MEDIA_TOKENS = 16384  # of texts whose images and audio are in memory at once, or a few more
SHORTEST = 1e-12  # length of a vector that is divided by its length


class ReadTexts(NamedTuple):
    """The ids of texts, and the numbers of those that are longer than the context."""

    ids: list[list[int]]
    cut: list[int]


@dataclass(frozen=True, slots=True)
class Texts:
    """A model as a reader of texts that it embeds."""

    name: str
    config: Config
    tokenizer: Tokenizer | None
    context: int

    @property
    def embedding(self) -> Embedding:
        """What the model embeds with; InputError if it does not embed."""
        if self.config.embedding is None:
            raise InputError(
                f"{self.name} writes text and does not embed: load EmbeddingGemma (such as "
                "Ollama's embeddinggemma) or EmbeddingGemma 2."
            )
        return self.config.embedding

    def read(
        self, texts: Iterable[Any], task: str | None = None, titles: Iterable[Any] | None = None
    ) -> ReadTexts:
        """Return the ids of texts, each a string or a list of ids, which are taken as they are.

        What is longer than the context is cut. Documents may have titles."""
        _, given = self.embedding, listed(texts)  # InputError if the model does not embed
        prefixes = prefixes_of(task, titles, len(given))
        read = ReadTexts([], [])
        for number, text in enumerate(given):
            turn = self._turn(text, number, prefixes[number])
            if turn.cut:
                read.cut.append(number)
            read.ids.append(turn.ids)
        return read

    async def groups(
        self, texts: list[Any], task: str | None, titles: Iterable[Any] | None, encoders: Encoders
    ) -> AsyncGenerator[list[Turn], None]:
        """Yield the texts, some at once: all of them, or as many as may hold media in memory."""
        _, prefixes = self.embedding, prefixes_of(task, titles, len(texts))
        most = MEDIA_TOKENS if any(map(has_parts, texts)) else math.inf
        group: list[Turn] = []
        tokens = 0
        for number, text in enumerate(texts):
            group.append(await self.read_turn(text, number, prefixes[number], encoders))
            tokens += len(group[-1].ids)
            if tokens >= most:
                yield group
                group, tokens = [], 0
        if group:
            yield group

    async def read_turn(self, text: Any, number: int, prefix: str, encoders: Encoders) -> Turn:
        """Return the ids of a text, or of content parts, with their images and audio."""
        if not has_parts(text):
            return self._turn(text, number, prefix)
        where = f"Text {number}"
        if self.config.generation == 3:
            raise InputError(
                f"{where} is a list of content parts, but {self.name} reads text only: "
                "EmbeddingGemma 2 also embeds images and audio."
            )
        content = read_content(text, where)
        media = [part for part in content if isinstance(part, Media)]
        written = "".join(part for part in content if not isinstance(part, Markup))
        if not media and not written:
            raise InputError(f"{where} has no text and no media: there is nothing to embed.")
        before = Turn("", [self._vocabulary().bos])
        for part in media:
            if part == VIDEO:
                raise InputError(
                    f"{part.where} is a video, which is not embedded: give some of its frames as "
                    "images."
                )
            for item in await items_of(part):
                assert not isinstance(item, str)
                marks = item.parts(await item.soft_tokens(encoders))
                before.media.append((len(before.ids) + 1, item))
                before.ids += encode_parts(self._vocabulary(), marks)
        return self._ended(before, prefix + written, number)

    def _turn(self, text: Any, number: int, prefix: str) -> Turn:
        """Return the ids of a text, a string or a list of ids, as much as the context holds."""
        where = f"Text {number}"
        if isinstance(text, str):
            return self._ended(Turn("", [self._vocabulary().bos]), prefix + text, number)
        if isinstance(text, bytes | bytearray | Mapping) or not isinstance(text, Iterable):
            raise wrong_type(text, where, "a string or a list of token ids")
        ids = check_ids(text, self.config.vocab, where)
        if not ids:
            raise InputError(f"{where} has no ids: there is nothing to embed.")
        return Turn("", ids[: self.context], cut=len(ids) > self.context)

    def _ended(self, turn: Turn, text: str, number: int) -> Turn:
        """Return what stands before a text, with its ids and what stands after it."""
        end = [self._vocabulary().eos] if self.embedding.ends_with_eos else []
        room = self.context - len(turn.ids) - len(end)
        if room < 0 and turn.media:
            raise InputError(
                f"Text {number} has images or audio of {len(turn.ids)} tokens, but the context "
                f"holds {self.context}: give fewer, or load the model with a longer context."
            )
        room = max(0, room)
        ids = self._vocabulary().encode(text, most=room)
        turn.ids = [*turn.ids, *ids[:room], *end][: self.context]
        turn.cut = len(ids) > room
        return turn

    def _vocabulary(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no vocabulary; give token ids instead of text.")
        return self.tokenizer

    def size(self, size: int | None) -> int:
        """Return the size of vectors that are cut to one; InputError if there is no such size."""
        full = self.embedding.size
        if size is None:
            return full
        checked = whole_number(size)
        if checked is None or not 1 <= checked <= full:
            raise InputError(
                f"A size of {shown(size)} is not possible; this model's vectors have {full} "
                "numbers, of which the first ones can be taken (EmbeddingGemma is trained for 512, "
                "256 and 128)."
            )
        return checked

    def cut_warning(self, cut: list[int], total: int) -> str:
        """Return what to say about texts that are cut."""
        which = f"Text {cut[0]} has" if len(cut) == 1 else f"{len(cut)} of {total} texts have"
        return f"{which} more than {self.context} tokens: the rest is not embedded."


def listed(texts: Any) -> list[Any]:
    """Return texts as a list; InputError if they are none."""
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        raise wrong_type(texts, "texts", "a list of texts, each a string or a list of ids")
    return list(texts)


def has_parts(text: object) -> bool:
    """Return whether a text is a list of content parts, as those of a chat's message."""
    return isinstance(text, list | tuple) and any(isinstance(part, Mapping) for part in text)


def prefixes_of(task: str | None, titles: Iterable[Any] | None, count: int) -> list[str]:
    """Return what stands before each of so many texts."""
    return [prefix_of(task)] * count if titles is None else titled(titles, task, count)


def prefix_of(task: str | None) -> str:
    """Return what stands before a text for a task; InputError if there is no such task."""
    if task is None:
        return ""
    if not isinstance(task, str) or task not in PREFIXES:
        raise InputError(f"The task {shown(task)} does not exist; use {', '.join(PREFIXES)}.")
    return PREFIXES[task]


def titled(titles: Iterable[Any], task: str | None, count: int) -> list[str]:
    """Return what stands before each document that has a title, or None or "" for none."""
    if task != "document":
        raise InputError("Only documents have titles", "give them with task='document'")
    if isinstance(titles, str | bytes | Mapping) or not isinstance(titles, Iterable):
        raise wrong_type(titles, "titles", "a list with the title of each text, or None")
    given = list(titles)
    if len(given) != count:
        raise InputError(f"There are {len(given)} titles for {count} texts: give one for each.")
    for number, title in enumerate(given):
        if title is not None and not isinstance(title, str):
            raise wrong_type(title, f"Title {number}", "a string or None")
    none = PREFIXES["document"]
    return [none.replace("none", title, 1) if title else none for title in given]


def check_batch(batch: object) -> int | None:
    """Return how many tokens are computed at once; InputError if that is no such number."""
    if batch is not None and (whole_number(batch) or 0) < 1:
        raise InputError(
            f"batch is {shown(batch)}; it must be a whole number of tokens above zero."
        )
    return whole_number(batch)


def unit_rows(rows: Any, size: int) -> Any:
    """Return the first numbers of each row, divided by their length.

    The rows are an array or, without numpy, memoryviews of floats; then lists are returned."""
    if isinstance(rows, list):
        return [_unit(list(row[:size])) for row in rows]
    import numpy as np

    cut = rows[:, :size].astype(np.float32)
    lengths = np.linalg.norm(cut.astype(np.float64), axis=1, keepdims=True)
    return (cut / np.maximum(lengths, SHORTEST)).astype(np.float32)


def joined_rows(parts: list[Any]) -> Any:
    """Return the rows of several results of `unit_rows` as one."""
    if isinstance(parts[0], list):
        return [row for part in parts for row in part]
    import numpy as np

    return np.concatenate(parts)


def _unit(values: list[float]) -> list[float]:
    length = max(math.sqrt(math.fsum(x * x for x in values)), SHORTEST)
    return [x / length for x in values]


def lacks_dense_layers(name: str) -> str:
    """Return what to say about a file that lacks the dense layers."""
    return (
        f"{name} lacks EmbeddingGemma's dense layers: its vectors are other ones than those of "
        "complete files, and worse. Convert the model again (llama.cpp: "
        "--sentence-transformers-dense-modules) or use Ollama's."
    )
