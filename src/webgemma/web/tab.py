"""The chat page's Python: it loads a model from what its worker hands it, and talks."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from webgemma.api import Gemma
from webgemma.device import aopen_device
from webgemma.errors import DeviceError, GgufError, ModelNotFoundError, WebgemmaError
from webgemma.gguf.sources import check_range

FRAME_SECONDS = 1 / 60  # pieces of a reply are told no oftener
PROGRESS_SECONDS = 0.1


class TabSource:
    """A file that JavaScript reads: `read(begin, end)` gives a promise of an ArrayBuffer."""

    def __init__(self, name: str, nbytes: int, read: Any) -> None:
        self.name = name
        self.nbytes = nbytes
        self._read = read

    async def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes, or a GgufError."""
        check_range(self, offset, nbytes)
        if not nbytes:
            return b""
        try:
            data: bytes = (await self._read(offset, offset + nbytes)).to_bytes()
        except Exception as error:  # JavaScript's, whatever it is
            raise GgufError(f"{self.name} cannot be read: {error}") from error
        if len(data) != nbytes:
            raise GgufError(f"{self.name} became shorter while it was read; choose it again.")
        return data

    async def sibling(self, name: str) -> "TabSource":
        """A page is handed one file."""
        raise ModelNotFoundError(
            f"{self.name} is split and needs {name} beside it; a page takes whole files only."
        )

    def close(self) -> None:
        """Nothing is held."""


class Tab:
    """One model and the replies it gives; `post` tells the page, in JSON."""

    def __init__(self, post: Callable[[str], None]) -> None:
        self._post = post
        self._model: Gemma | None = None
        self._replies: dict[Any, asyncio.Future[None]] = {}

    async def greet(self) -> None:
        """Find what computes, and say it."""
        try:
            device = await aopen_device()
        except WebgemmaError as error:
            self._tell_error(error, "no-webgpu")
            return
        self._tell("ready", device=device.name, software=device.software)
        device.close()

    async def load(
        self, name: str, nbytes: int, read: Any, context: int | None, precision: Any
    ) -> None:
        """Load what `read` reads, or without it the bundled model."""
        await self.unload()
        source = TabSource(name, nbytes, read) if read else None
        told, size = time.monotonic(), 0

        def progress(loaded: int, total: int) -> None:
            nonlocal told, size
            size = total
            if time.monotonic() - told >= PROGRESS_SECONDS or loaded == total:
                told = time.monotonic()
                self._tell("progress", loaded=loaded, total=total)

        try:
            model = await Gemma.aload(
                source, "gpu", context=context, precision=precision, progress=progress
            )
        except WebgemmaError as error:
            kind = "file" if isinstance(error, GgufError | ModelNotFoundError) else _kind(error)
            self._tell_error(error, kind)
            return
        self._model = model
        self._tell(
            "loaded", name=model.name, context=model.context, device=model.device, nbytes=size
        )

    async def chat(self, id: Any, messages: str, settings: str) -> None:
        """Reply to a conversation, until it ends or is stopped."""
        reply = self._replies[id] = asyncio.ensure_future(
            self._reply(id, json.loads(messages), json.loads(settings))
        )
        try:
            await reply
        except asyncio.CancelledError:
            if not reply.cancelled():
                raise
            self._tell("done", id=id, finish="stopped", tokens=0, tokens_per_second=0)
        finally:
            del self._replies[id]

    def stop(self, id: Any) -> None:
        """End a reply at once, also while its prompt is read."""
        if id in self._replies:
            self._replies[id].cancel()

    async def unload(self) -> None:
        """Let the model go."""
        model, self._model = self._model, None
        if model is not None:
            model.close()

    async def _reply(self, id: Any, messages: list[Any], settings: dict[str, Any]) -> None:
        if self._model is None:
            self._tell("error", id=id, kind="other", sentence="There is no model: choose one.")
            return
        chosen = {name: value for name, value in settings.items() if value is not None}
        think = bool(chosen.pop("think", False))
        finish, count, begun = "stopped", 0, time.monotonic()
        batch = _Batch(self, id)
        try:
            async for piece in self._model.achat(messages, think=think, **chosen):
                count += 1
                begun = begun if count > 1 else time.monotonic()
                batch.add(piece.thinking, thinking=True)
                batch.add(piece.text, thinking=False)
                finish = piece.finish or finish
        except asyncio.CancelledError:
            pass
        except WebgemmaError as error:
            self._tell_error(error, _kind(error), id=id)
            return
        batch.flush()
        seconds = time.monotonic() - begun
        rate = (count - 1) / seconds if count > 1 and seconds > 0 else 0
        self._tell("done", id=id, finish=finish, tokens=count, tokens_per_second=rate)

    def _tell(self, type: str, **facts: Any) -> None:
        self._post(json.dumps({"type": type, **facts}))

    def _tell_error(self, error: WebgemmaError, kind: str, **facts: Any) -> None:
        self._tell("error", sentence=str(error), kind=kind, **facts)


class _Batch:
    """Text that is told to the page a frame at a time."""

    def __init__(self, tab: Tab, id: Any) -> None:
        self._tab = tab
        self._id = id
        self._text, self._thinking = "", False
        self._told = 0.0

    def add(self, text: str, *, thinking: bool) -> None:
        if not text:
            return
        if thinking != self._thinking:
            self.flush()
        self._text, self._thinking = self._text + text, thinking
        if time.monotonic() - self._told >= FRAME_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._text:
            self._tab._tell("piece", id=self._id, text=self._text, thinking=self._thinking)
        self._text, self._told = "", time.monotonic()


def _kind(error: WebgemmaError) -> str:
    return "device-lost" if isinstance(error, DeviceError) and "was lost" in str(error) else "other"
