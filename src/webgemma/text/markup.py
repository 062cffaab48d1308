"""The special tokens that give a conversation its form, kept apart from ordinary text."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Self, TypeAlias


class Markup(str):
    """The spelling of one special token, written by us and never by a user."""

    __slots__ = ()


class Media(Markup):
    """The placeholder of a picture or a sound, with what was handed in for it."""

    __slots__ = ("field", "given", "source", "where")

    def __new__(
        cls,
        markup: Markup,
        source: object,
        field: str,
        where: str,
        given: Mapping[str, Any] | None = None,
    ) -> Self:
        made = super().__new__(cls, markup)
        made.source = source  # as it was given; None: nothing was
        made.field = field  # what it was called
        made.where = where
        made.given = given or {}  # what else was said of it
        return made

    source: object
    field: str
    where: str
    given: Mapping[str, Any]


Part: TypeAlias = Markup | str

BOS = Markup("<bos>")
TURN_OPEN, TURN_CLOSE = Markup("<|turn>"), Markup("<turn|>")
THINK = Markup("<|think|>")
CHANNEL_OPEN, CHANNEL_CLOSE = Markup("<|channel>"), Markup("<channel|>")
TOOL_OPEN, TOOL_CLOSE = Markup("<|tool>"), Markup("<tool|>")
CALL_OPEN, CALL_CLOSE = Markup("<|tool_call>"), Markup("<tool_call|>")
RESPONSE_OPEN, RESPONSE_CLOSE = Markup("<|tool_response>"), Markup("<tool_response|>")
QUOTE = Markup('<|"|>')
IMAGE_OPEN, IMAGE_CLOSE = Markup("<|image>"), Markup("<image|>")
AUDIO_OPEN, AUDIO_CLOSE = Markup("<|audio>"), Markup("<audio|>")
IMAGE, AUDIO, VIDEO = Markup("<|image|>"), Markup("<|audio|>"), Markup("<|video|>")

THOUGHT = "thought\n"  # the name of the channel that holds the model's thinking


def merge(parts: Iterable[Part]) -> list[Part]:
    """The same parts with neighbouring plain strings joined and empty ones dropped."""
    merged: list[Part] = []
    for is_markup, run in groupby(parts, lambda part: isinstance(part, Markup)):
        if is_markup:
            merged.extend(run)
        elif text := "".join(run):
            merged.append(text)
    return merged
