"""LoRA adapters of a served model: which one it applies, and who waits for another."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from webgemma.api import Gemma


class Adapters:
    """The adapter that a model applies; it is changed while nobody uses the model.

    Requests for the same one are served side by side. Who needs another one waits until those
    before it have ended, and who comes later waits behind it, so that nobody waits for ever."""

    def __init__(self, model: Gemma, always: Any = None) -> None:
        """`always` is what the model applies beside any of them, as for `Gemma.load(lora=…)`."""
        self._model = model
        several = isinstance(always, Sequence) and not isinstance(always, str | tuple)
        self._always: list[Any] = list(always) if several else [always] * (always is not None)
        self._applied: str | None = ""  # none beside those; None: unknown, as a change has failed
        self._users = 0
        self._line: list[object] = []  # those who wait, in their order
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def applied(self, adapter: str) -> AsyncIterator[None]:
        """Apply an adapter (a path, or "path:scale"; "" for none) as long as this is open."""
        await self._begin(adapter)
        try:
            yield
        finally:
            self._users -= 1
            self._change()

    async def _begin(self, adapter: str) -> None:
        ticket = object()
        self._line.append(ticket)
        try:
            while self._line[0] is not ticket or (self._users and adapter != self._applied):
                await self._changed.wait()
            if adapter != self._applied:
                self._applied = None
                lora = [*self._always, *[adapter] * bool(adapter)]
                await asyncio.to_thread(self._model.set_lora, lora or None)
                self._applied = adapter
            self._users += 1
        finally:
            self._line.remove(ticket)
            self._change()

    def _change(self) -> None:
        """Let all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()
