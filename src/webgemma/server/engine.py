"""The engine behind all routes: a request in, the pieces of its replies out.

The replies of a request are written side by side, as many as the model has slots; those of other
requests beside them, as `Gemma` has it."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any

from webgemma.api import Gemma
from webgemma.replies import Piece
from webgemma.server.adapters import Adapters
from webgemma.server.protocol import Request, RequestError
from webgemma.settings import applicable

MAX_UNREAD = 64  # pieces that are written before the first of them is taken

Indexed = tuple[int, Piece]  # the index of a reply, and a piece of it
Job = tuple[int, dict[str, Any], Any]  # the index of a reply, its settings, its prompt


class Engine:
    """A loaded model that serves requests."""

    def __init__(self, model: Gemma, lora: Any = None) -> None:
        """`lora` is what the model was loaded with."""
        self.model = model
        self.adapters = Adapters(model, lora)
        self._requests: list[list[asyncio.Task[None]]] = []  # what writes the replies of each

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot: none of their replies has been begun."""
        begun = {turn.task for turn in self.model.worker.turns.streams}
        return sum(
            not any(writer.done() or writer in begun for writer in writers)
            for writers in list(self._requests)
        )

    async def replies(self, request: Request) -> AsyncGenerator[Indexed, None]:
        """Yield the pieces of all replies, each with the index of its reply.

        There are `choices` replies to the first prompt, then those to the next. Closing this, or
        cancelling who awaits it, ends the replies that are being written at their next step; so
        does the error of one."""
        self._check(request)
        jobs, unread = self._jobs(request), asyncio.Queue[Indexed | Exception | None](MAX_UNREAD)
        at_once = islice(jobs, len(self.model.slots))
        read = [asyncio.Event() for _ in range(max(1, len(request.prompts)))]
        writers = [
            asyncio.create_task(self._write(request, job, jobs, read, unread))
            for job in list(at_once)
        ]
        self._requests.append(writers)
        running = len(writers)
        try:
            while running:
                item = await unread.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            self._requests.remove(writers)
            for writer in writers:
                writer.cancel()
            await asyncio.wait(writers)

    async def _write(
        self,
        request: Request,
        job: Job | None,
        jobs: Iterator[Job],
        read: Sequence[asyncio.Event],
        unread: "asyncio.Queue[Indexed | Exception | None]",
    ) -> None:
        """Write a reply, then others of which nobody has begun one; at the end None or an error.

        The first reply to a prompt reads it; the others wait for that, and copy what it read."""
        end = None
        try:
            while job is not None:
                index, settings, prompt = job
                number, choice = divmod(index, request.choices)
                if choice:
                    await read[number].wait()
                async with aclosing(self._reply(request, prompt, settings)) as pieces:
                    async for piece in pieces:
                        read[number].set()
                        await unread.put((index, piece))
                read[number].set()
                job = next(jobs, None)
        except Exception as error:
            end = error
        await unread.put(end)

    def _check(self, request: Request) -> None:
        """Refuse what no engine without constrained decoding can promise."""
        if request.tool_choice not in ("auto", "none"):
            raise RequestError(
                f"tool_choice is {request.tool_choice!r}, but the model cannot be made to call a "
                "tool: send 'auto', and ask for the call in a message.",
                param="tool_choice",
            )

    def _jobs(self, request: Request) -> Iterator[Job]:
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
