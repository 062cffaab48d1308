"""The engine behind all routes: a request in, the pieces of its replies out.

The replies of a request are written side by side, as many as the model has slots; those of other
requests beside them, as `Gemma` has it."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from webgemma.api import Gemma
from webgemma.errors import InputError
from webgemma.progress import Progress
from webgemma.replies import Piece
from webgemma.server.protocol import Request
from webgemma.settings import applicable

MAX_UNREAD = 64  # pieces that are written before the first of them is taken

Indexed = tuple[int, Piece]  # the index of a reply, and a piece of it
Writers = list[asyncio.Task[None]]
Job = tuple[int, dict[str, Any], Any]  # the index of a reply, its settings, its prompt


class Engine:
    """A loaded model that serves requests."""

    def __init__(self, model: Gemma) -> None:
        self.model = model
        self._requests: dict[int, Writers] = {}  # what writes the replies of each, by its id

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot: none of their replies has been begun."""
        return len(self._waiting())

    def is_waiting(self, request: Request) -> bool:
        """Return whether this very request waits for a slot."""
        return id(request) in self._waiting()

    def _waiting(self) -> list[int]:
        begun = {turn.task for turn in self.model.worker.turns.streams}
        return [
            request
            for request, writers in list(self._requests.items())
            if not any(writer.done() or writer in begun for writer in writers)
        ]

    async def prepare(self) -> None:
        """Build ahead what the first reply with a structure would wait for, if anything."""
        if self.model.config.diffusion is None and self.model.config.embedding is None:
            with suppress(InputError):  # such as a package that is missing
                await self.model.aprepare_structure()

    async def replies(
        self, request: Request, adapter: str | None = None, progress: Progress | None = None
    ) -> AsyncGenerator[Indexed, None]:
        """Yield the pieces of all replies, with an adapter or without, each with its reply's index.

        There are `choices` replies to the first prompt, then those to the next. Closing this, or
        cancelling who awaits it, ends the replies that are being written at their next step; so
        does the error of one. `progress` is called while images and audio are encoded."""
        jobs, unread = (
            self._jobs(request, adapter),
            asyncio.Queue[Indexed | Exception | None](MAX_UNREAD),
        )
        at_once = islice(jobs, len(self.model.slots))
        read = [asyncio.Event() for _ in range(max(1, len(request.prompts)))]
        writers = [
            asyncio.create_task(self._write(request, job, jobs, read, unread, progress))
            for job in list(at_once)
        ]
        self._requests[id(request)] = writers
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
            del self._requests[id(request)]
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
        progress: Progress | None,
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
                async with aclosing(self._reply(request, prompt, settings, progress)) as pieces:
                    async for piece in pieces:
                        read[number].set()
                        await unread.put((index, piece))
                read[number].set()
                job = next(jobs, None)
        except Exception as error:
            end = error
        await unread.put(end)

    def _jobs(self, request: Request, adapter: str | None) -> Iterator[Job]:
        """Yield the index, the settings and the prompt (None: the messages) of each reply."""
        known = applicable(self.model.config.diffusion is not None)
        settings = {name: value for name, value in request.settings.items() if name in known}
        if adapter is not None:
            settings["lora"] = adapter
        seed = settings.get("seed")
        prompts: Sequence[Any] = request.prompts or [None]
        index = 0
        for prompt in prompts:
            for choice in range(request.choices):
                own = settings if seed is None else {**settings, "seed": (seed + choice) % 2**64}
                yield index, own, prompt
                index += 1

    def _reply(
        self, request: Request, prompt: Any, settings: dict[str, Any], progress: Progress | None
    ) -> AsyncGenerator[Piece, None]:
        structure = request.structure.arguments() if request.structure else {}
        if prompt is not None:
            return self.model.agenerate(prompt, special=request.special, **structure, **settings)
        pieces = self.model.achat(
            request.messages,
            tools=request.tools,
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel,
            think=bool(request.think),
            continue_last=request.continue_last,
            overflow=request.overflow,
            progress=progress,
            **structure,
            **settings,
        )
        return pieces if request.parallel else _with_one_call(pieces)


async def _with_one_call(stream: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    """Yield pieces with one tool call at most, where no constraint could see to that: without
    llguidance, and for DiffusionGemma."""
    room = 1
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            kept = piece.tool_calls[:room]
            room -= len(kept)
            yield piece if len(kept) == len(piece.tool_calls) else replace(piece, tool_calls=kept)
