"""llama.cpp's routes about prompts and tokens: `/tokenize`, `/detokenize`, `/apply-template`.

What takes time for long texts runs in a thread, so that the streams of others go on."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from webgemma.server.bodies import Body, check_conversation
from webgemma.server.http import read, respond
from webgemma.server.openai_messages import read_messages
from webgemma.server.registry import Registry
from webgemma.text.tokenizer import Tokenizer

MAX_NBYTES = 4 << 20  # of a body: more than any context holds
MAX_THREADS = 2  # others need some, too

T = TypeVar("T")


class Tokens:
    """The routes about tokens."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._threads = asyncio.Semaphore(MAX_THREADS)

    def routes(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """Return the endpoints by their paths."""
        return {
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/apply-template": self.apply_template,
        }

    async def tokenize(self, request: Any) -> Any:
        """Return the tokens of a text."""
        body = await read(request, Body, MAX_NBYTES)
        text, special = body.text("content"), body.flag("parse_special", True)
        add_bos, with_pieces = body.flag("add_special"), body.flag("with_pieces")

        def respond_tokens(tokenizer: Tokenizer) -> Any:
            tokens: list[Any] = tokenizer.encode(text, special=special)
            if add_bos and tokens[:1] != [tokenizer.bos]:
                tokens = [tokenizer.bos, *tokens]
            if with_pieces:
                tokens = [{"id": token, "piece": tokenizer.decode([token])} for token in tokens]
            return respond({"tokens": tokens})

        async with self.registry.use(body.text("model")) as engine:
            tokenizer = engine.model.tokenizer
            return await self._in_thread(lambda: respond_tokens(tokenizer))

    async def detokenize(self, request: Any) -> Any:
        """Return the text of tokens."""
        body = await read(request, Body, MAX_NBYTES)
        ids = body.items("tokens")

        def respond_text(tokenizer: Tokenizer, vocab: int) -> Any:
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                    raise body.wrong("tokens", f"a list of token ids from 0 to {vocab - 1}")
            return respond({"content": tokenizer.decode(ids)})

        async with self.registry.use(body.text("model")) as engine:
            model = engine.model
            tokenizer, vocab = model.tokenizer, model.config.vocab
            return await self._in_thread(lambda: respond_text(tokenizer, vocab))

    async def apply_template(self, request: Any) -> Any:
        """Return the prompt of a conversation."""
        name, asked = await read(request, _parse_template)
        async with self.registry.use(name) as engine:
            model = engine.model
            return await self._in_thread(lambda: respond({"prompt": model.render(**asked)}))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        async with self._threads:
            return await asyncio.to_thread(function)


def _parse_template(given: object) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the model, and the arguments of `Gemma.render`."""
    body = Body(given)
    messages = read_messages(body.given.get("messages"))
    tools = [tool.given for tool in body.objects("tools")]
    check_conversation(messages, tools)
    think = body.object("chat_template_kwargs").flag("enable_thinking")
    return body.text("model"), {"messages": messages, "tools": tools, "think": think}
