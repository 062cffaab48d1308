"""Questions with pictures and sounds among their words, and a model's likeliest answer."""

from webgemma import Gemma


def user(*content: object) -> dict[str, object]:
    """A message of texts and other parts."""
    parts = [{"type": "text", "text": x} if isinstance(x, str) else x for x in content]
    return {"role": "user", "content": parts}


def image(source: object) -> dict[str, object]:
    return {"type": "image", "image": source}


def reply(gemma: Gemma, messages: list[dict[str, object]], count: int = 8) -> list[int]:
    """The likeliest tokens."""
    return [p.token for p in gemma.chat(messages, temperature=0, max_tokens=count)]
