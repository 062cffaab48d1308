"""Special tokens of the chat template, as a type distinct from ordinary text."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Self, TypeAlias


class Markup(str):
    """The spelling of one special token. Text from users is never of this type."""

    __slots__ = ()


class Media(Markup):
    """The placeholder token of an image, audio or video, with the caller's source for it."""

    __slots__ = ("field", "given", "source", "where")

    def __new__(
        cls,
        markup: Markup,
        source: object,
        field: str,
        where: str,
        given: Mapping[str, Any] | None = None,
    ) -> Self:
        media = super().__new__(cls, markup)
        media.source = source  # as given; None if it is missing
        media.field = field  # name of the field with the source
        media.where = where  # path of that field, for messages
        media.given = given or {}  # all fields of the content part
        return media

    source: object
    field: str
    where: str
    given: Mapping[str, Any]


class Lead(str):
    """The beginning of a turn with what the system says, where it has no turn of its own.

    If that turn is left out, another one begins with it."""

    __slots__ = ()


Part: TypeAlias = Markup | str

BOS = Markup("<bos>")
TURN_OPEN, TURN_CLOSE = Markup("<|turn>"), Markup("<turn|>")
START_OF_TURN, END_OF_TURN = Markup("<start_of_turn>"), Markup("<end_of_turn>")  # Gemma 3's
THINK = Markup("<|think|>")
CHANNEL_OPEN, CHANNEL_CLOSE = Markup("<|channel>"), Markup("<channel|>")
TOOL_OPEN, TOOL_CLOSE = Markup("<|tool>"), Markup("<tool|>")
CALL_OPEN, CALL_CLOSE = Markup("<|tool_call>"), Markup("<tool_call|>")
RESPONSE_OPEN, RESPONSE_CLOSE = Markup("<|tool_response>"), Markup("<tool_response|>")
QUOTE = Markup('<|"|>')
IMAGE_OPEN, IMAGE_CLOSE = Markup("<|image>"), Markup("<image|>")
AUDIO_OPEN, AUDIO_CLOSE = Markup("<|audio>"), Markup("<audio|>")
IMAGE, AUDIO, VIDEO = Markup("<|image|>"), Markup("<|audio|>"), Markup("<|video|>")

THOUGHT = "thought\n"  # name of the channel for the model's thinking


def merge(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with adjacent plain strings joined and empty ones dropped."""
    merged: list[Part] = []
    for is_apart, run in groupby(parts, lambda part: isinstance(part, Markup | Lead)):
        if is_apart:
            merged.extend(run)
        elif text := "".join(run):
            merged.append(text)
    return merged
