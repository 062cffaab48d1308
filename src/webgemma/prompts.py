"""What a user gives, as a model takes it: the ids of a text, a conversation after its opening."""

from collections.abc import Mapping, Sequence

from webgemma.defaults import Message
from webgemma.text.tokenizer import Tokenizer


def text_ids(text: str, tokenizer: Tokenizer, special: bool) -> list[int]:
    """The ids of a text to continue, after <bos>; `special` reads tags as tokens."""
    ids = tokenizer.encode(text, special=special)
    return ids if ids[:1] == [tokenizer.bos] else [tokenizer.bos, *ids]


def conversation(given: str | Sequence[Message], opening: Sequence[Message]) -> Sequence[Message]:
    """Messages, or one text, after the model's opening; a system message replaces the opening's."""
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    own_system = any(isinstance(m, Mapping) and m.get("role") == "system" for m in messages)
    kept = [m for m in opening if not (own_system and m.get("role") == "system")]
    return [*kept, *messages] if kept else messages
