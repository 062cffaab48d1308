"""The engine behind all routes: a request in, the pieces of its replies out.

Replies are written one after another. What batches them replaces this module alone."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from webgemma.api import Gemma
from webgemma.replies import Piece
from webgemma.server.protocol import Request, RequestError
from webgemma.settings import applicable

Indexed = tuple[int, Piece]  # the index of a reply, and a piece of it


class Engine:
    """A loaded model that serves requests."""

    def __init__(self, model: Gemma) -> None:
        self.model = model

    async def replies(self, request: Request) -> AsyncGenerator[Indexed, None]:
        """Yield the pieces of all replies, each with the index of its reply.

        There are `choices` replies to the first prompt, then those to the next. Closing this, or
        cancelling who awaits it, ends the reply that is being written at its next step."""
        self._check(request)
        for index, settings, prompt in self._jobs(request):
            async with aclosing(self._reply(request, prompt, settings)) as pieces:
                async for piece in pieces:
                    yield index, piece

    def _check(self, request: Request) -> None:
        """Refuse what no engine without constrained decoding can promise."""
        if request.tool_choice not in ("auto", "none"):
            raise RequestError(
                f"tool_choice is {request.tool_choice!r}, but the model cannot be made to call a "
                "tool: send 'auto', and ask for the call in a message.",
                param="tool_choice",
            )

    def _jobs(self, request: Request) -> Iterator[tuple[int, dict[str, Any], Any]]:
        """Yield the index, the settings and the prompt (None: the messages) of each reply."""
        known = applicable(self.model.config.diffusion is not None)
        settings = {name: value for name, value in request.settings.items() if name in known}
        seed = settings.get("seed")
        prompts: Sequence[Any] = request.prompts or [None]
        index = 0
        for prompt in prompts:
            for choice in range(request.choices):
                own = settings if seed is None else {**settings, "seed": (seed + choice) % 2**64}
                yield index, own, prompt
                index += 1

    def _reply(
        self, request: Request, prompt: Any, settings: dict[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        if prompt is not None:
            return self.model.agenerate(prompt, special=request.special, **settings)
        return self.model.achat(
            request.messages,
            tools=() if request.tool_choice == "none" else request.tools,
            think=bool(request.think),
            continue_last=request.continue_last,
            overflow=request.overflow,
            **settings,
        )
