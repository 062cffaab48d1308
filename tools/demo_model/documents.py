"""From texts and chats to token ids as the model will meet them, with a mark on its own turns."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import settings  # noqa: F401  (puts src on the path)

from webgemma.text.chat import Chat, encode_parts
from webgemma.text.markup import TURN_CLOSE, TURN_OPEN
from webgemma.text.tokenizer import Tokenizer

Document = tuple[list[int], list[int]]  # ids, and for each 1 where the model speaks

SYSTEM = [
    *("You are a helpful assistant.", "You are a friendly assistant.", "You are Webgemma."),
    *("Be kind and brief.", "Answer in short sentences.", "You are a tiny demo model."),
    *("You help children.", "You tell stories.", "Answer the questions of the user."),
    *("You are a helpful AI assistant. Answer briefly.", "Be polite.", "Keep your answers simple."),
]
THOUGHTS = [
    "The user says: {said} I will give a short answer.",
    "The user wrote: {said} I know a simple answer.",
    "I read: {said} I should answer in simple words.",
]
SYSTEM_SHARE, THINK_SHARE = 0.08, 0.04
LONGEST_THOUGHT = 120  # characters of the user's words that a thought repeats


class Writer:
    """Writes documents with a tokenizer, by the very code that writes prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat = Chat("small")

    def text(self, text: str) -> Document:
        """A plain text: all of it is to be learned."""
        ids = [self.tokenizer.bos, *self.tokenizer.encode(text.strip()), self.tokenizer.eos]
        return ids, [1] * len(ids)

    def conversation(self, turns: Sequence[Sequence[str]], rng: random.Random | None) -> Document:
        """A chat of turns ["u" or "a", text]; with rng some get a system turn or a thought."""
        messages, think = self.messages(turns, rng)
        parts = self.chat.parts(messages, think=think, add_generation_prompt=False)
        ids: list[int] = []
        speaks: list[int] = []
        model = False
        for at, part in enumerate(parts):
            new = encode_parts(self.tokenizer, [part])
            opened = at > 0 and parts[at - 1] == TURN_OPEN
            if opened and part.startswith("model\n"):
                head = self.tokenizer.encode("model\n")
                assert new[: len(head)] == head, "the text after a newline joins it"
                speaks += [0] * len(head) + [1] * (len(new) - len(head))
                model = True
            else:
                speaks += [int(model)] * len(new)
            if part == TURN_CLOSE:
                model = False
            ids += new
        return ids, speaks

    def messages(
        self, turns: Sequence[Sequence[str]], rng: random.Random | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """The turns as messages, and whether the model is to think."""
        roles = {"u": "user", "a": "assistant"}
        messages: list[dict[str, Any]] = [
            {"role": roles[role], "content": text} for role, text in turns
        ]
        think = bool(rng) and rng.random() < THINK_SHARE and len(messages[-1]["content"]) < 300
        if rng and think:
            said = messages[-2]["content"][:LONGEST_THOUGHT]
            messages[-1]["thinking"] = rng.choice(THOUGHTS).format(said=said)
        if rng and rng.random() < SYSTEM_SHARE:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
        return messages, think


def join_chats(
    chats: Iterable[list[list[str]]], rng: random.Random, share: float
) -> Iterable[list[list[str]]]:
    """The same chats, but a share of them goes on in the next: long conversations."""
    held: list[list[str]] = []
    for chat in chats:
        held = held + chat
        if rng.random() >= share or len(held) > 24:
            yield held
            held = []
    if held:
        yield held
