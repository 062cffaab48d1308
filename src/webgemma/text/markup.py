"""The special tokens that give a conversation its form, kept apart from ordinary text."""

from collections.abc import Iterable
from itertools import groupby
from typing import TypeAlias


class Markup(str):
    """The spelling of one special token, written by us and never by a user."""

    __slots__ = ()


Part: TypeAlias = Markup | str

BOS = Markup("<bos>")
TURN_OPEN, TURN_CLOSE = Markup("<|turn>"), Markup("<turn|>")
THINK = Markup("<|think|>")
CHANNEL_OPEN, CHANNEL_CLOSE = Markup("<|channel>"), Markup("<channel|>")
TOOL_OPEN, TOOL_CLOSE = Markup("<|tool>"), Markup("<tool|>")
CALL_OPEN, CALL_CLOSE = Markup("<|tool_call>"), Markup("<tool_call|>")
RESPONSE_OPEN, RESPONSE_CLOSE = Markup("<|tool_response>"), Markup("<tool_response|>")
QUOTE = Markup('<|"|>')
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
