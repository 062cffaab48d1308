"""Chat messages with images and audio, and a model's greedy reply."""

from webgemma import Gemma


def user(*content: object) -> dict[str, object]:
    """Return a user message of texts and other content parts."""
    parts = [{"type": "text", "text": x} if isinstance(x, str) else x for x in content]
    return {"role": "user", "content": parts}


def image(source: object) -> dict[str, object]:
    """Return an image as a content part."""
    return {"type": "image", "image": source}


def reply(gemma: Gemma, messages: list[dict[str, object]], count: int = 8) -> list[int]:
    """Return the tokens of a greedy reply."""
    return [p.token for p in gemma.chat(messages, temperature=0, max_tokens=count)]
