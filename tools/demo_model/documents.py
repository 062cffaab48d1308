"""Documents: texts and chats as token ids, with a flag for each token of the model's turns."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import settings  # noqa: F401  (puts src on the path)

from webgemma.text.chat import Chat, encode_parts
from webgemma.text.markup import TURN_CLOSE, TURN_OPEN
from webgemma.text.tokenizer import Tokenizer

Document = tuple[list[int], list[int]]  # ids, and for each 1 if the model generates it

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
THOUGHT_CHARACTERS = 120  # of the user's text, which a thought repeats


class Writer:
    """Writes documents with a tokenizer and the chat template that also writes prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat = Chat("small")

    def text(self, text: str) -> Document:
        """Return a plain text, of which every token is learnt."""
        ids = [self.tokenizer.bos, *self.tokenizer.encode(text.strip()), self.tokenizer.eos]
        return ids, [1] * len(ids)

    def conversation(self, turns: Sequence[Sequence[str]], rng: random.Random | None) -> Document:
        """Return a chat of turns ["u" or "a", text].

        With `rng`, some get a system turn or a thought."""
        messages, think = self.messages(turns, rng)
        parts = self.chat.parts(messages, think=think, add_generation_prompt=False)
        ids: list[int] = []
        generated: list[int] = []
        in_model_turn = False
        for at, part in enumerate(parts):
            new = encode_parts(self.tokenizer, [part])
            opened = at > 0 and parts[at - 1] == TURN_OPEN
            if opened and part.startswith("model\n"):
                head = self.tokenizer.encode("model\n")
                assert new[: len(head)] == head, "the newline and the text after it share a token"
                generated += [0] * len(head) + [1] * (len(new) - len(head))
                in_model_turn = True
            else:
                generated += [int(in_model_turn)] * len(new)
            if part == TURN_CLOSE:
                in_model_turn = False
            ids += new
        return ids, generated

    def messages(
        self, turns: Sequence[Sequence[str]], rng: random.Random | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the turns as messages, and whether the model thinks first."""
        roles = {"u": "user", "a": "assistant"}
        messages: list[dict[str, Any]] = [
            {"role": roles[role], "content": text} for role, text in turns
        ]
        think = bool(rng) and rng.random() < THINK_SHARE and len(messages[-1]["content"]) < 300
        if rng and think:
            repeated = messages[-2]["content"][:THOUGHT_CHARACTERS]
            messages[-1]["thinking"] = rng.choice(THOUGHTS).format(said=repeated)
        if rng and rng.random() < SYSTEM_SHARE:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
        return messages, think


def join_chats(
    chats: Iterable[list[list[str]]], rng: random.Random, share: float
) -> Iterable[list[list[str]]]:
    """Yield the same chats, but join a share of them with the next: long conversations."""
    joined: list[list[str]] = []
    for chat in chats:
        joined = joined + chat
        if rng.random() >= share or len(joined) > 24:
            yield joined
            joined = []
    if joined:
        yield joined
