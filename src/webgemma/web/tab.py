"""The chat page's Python: it loads a model from what its worker hands it, and talks."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from webgemma.api import Gemma
from webgemma.denoising import Canvas
from webgemma.device import aopen_device
from webgemma.engine.opening import gpu_needs
from webgemma.errors import (
    DeviceError,
    DeviceMemoryError,
    GgufError,
    InputError,
    ModelNotFoundError,
    StorageError,
    WebgemmaError,
)
from webgemma.gguf.browser import browser_files, open_address, open_file
from webgemma.gguf.opfs import OpfsStore, stored_id
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import Source
from webgemma.models import BUNDLED, BUNDLED_PATH
from webgemma.pieces import spelled
from webgemma.web.room import free_nbytes

if TYPE_CHECKING:
    from webgemma.web.tuning import Tuning

FRAME_SECONDS = 1 / 60  # pieces of a reply are told no oftener
PROGRESS_SECONDS = 0.1
BLOCK_SETTINGS = ("max_tokens", "seed", "stop")  # that mean something to DiffusionGemma
BUNDLED_URL = f"/package/demo/{BUNDLED_PATH.name}"  # the page's wheel is without it
NO_SERVER = "`webgemma web` does not answer; see that it still runs"


class Tab:
    """One model and the replies it gives, and the models that are kept; `post` tells the page.

    What is asked and told is said in engine.js; `files` is files.js."""

    def __init__(self, post: Callable[[str], None], files: Any = None) -> None:
        self._post = post
        self._files = browser_files() if files is None else files
        self._store = OpfsStore(self._files)
        self._model: Gemma | None = None
        self._replies: dict[Any, asyncio.Future[None]] = {}
        self._copies: dict[str, asyncio.Future[None]] = {}
        self._tuning: Tuning | None = None

    async def greet(self) -> None:
        """Find what computes, and say it."""
        try:
            device = await aopen_device()
        except WebgemmaError as error:
            self._tell_error(error, "no-webgpu")
            return
        self._tell("ready", device=device.name, software=device.software)
        device.close()

    # The model

    async def load(self, asked: Any, context: int | None, precision: Any) -> None:
        """Load a model in place of the one that is there, perhaps with eyes of their own file."""
        await self.unload()
        progress = _Paced(lambda loaded, total: self._tell("progress", loaded=loaded, total=total))
        try:
            model = await Gemma.aload(
                await self._source(asked),
                "gpu",
                context=context,
                precision=precision,
                progress=progress,
                mmproj=await self._eyes(asked),
            )
        except WebgemmaError as error:
            self._tell_error(error, _kind(error))
            return
        finally:
            progress.close()
        self._model = model
        facts = {"name": model.name, "context": model.context, "device": model.device}
        self._tell("loaded", nbytes=model.memory_nbytes, **facts)

    async def chat(self, id: Any, messages: str, settings: str, media: Any = ()) -> None:
        """Reply to a conversation, until it ends or is stopped.

        A picture or a sound in it is a number: which one of `media` is meant."""
        said = json.loads(messages)
        for part in _media_parts(said):
            part[part["type"]] = media[part[part["type"]]]
        reply = self._replies[id] = asyncio.ensure_future(
            self._reply(id, said, json.loads(settings))
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

    async def room(self, nbytes: int) -> None:
        """Tell how much of so many bytes the GPU can give, with what the model holds already."""
        held = self._model.memory_nbytes if self._model else 0
        try:
            device = await aopen_device()
        except WebgemmaError:  # why was told when the page began
            self._tell("room", nbytes=None)
            return
        try:
            free = await free_nbytes(device, nbytes - held)
        finally:
            device.close()
        self._tell("room", nbytes=held + free)

    @property
    def tuning(self) -> "Tuning":
        """Fine-tuning of the model; made when first asked for: who only chats need not wait."""
        if self._tuning is None:
            from webgemma.web.tuning import Tuning

            def tell_error(error: WebgemmaError, what: str) -> None:
                self._tell_error(error, _kind(error), tune=what)

            self._tuning = Tuning(self._tell, tell_error, lambda: self._model, self._files)
        return self._tuning

    # What is kept

    async def keep(self, asked: Any) -> None:
        """Copy a model into this browser's storage, until it is there or is left."""
        try:
            id = stored_id(asked.name, asked.nbytes, asked.digest or None)
        except WebgemmaError as error:
            self._tell_error(error, _kind(error), keep=None)
            return
        if id in self._copies:
            return
        copy = self._copies[id] = asyncio.ensure_future(self._copy(id, asked))
        try:
            await copy
        except asyncio.CancelledError:
            if not copy.cancelled():
                raise
            self._tell("left", id=id, name=asked.name)
        except WebgemmaError as error:
            await self.stored()  # first: whether something has come belongs to what is said
            self._tell_error(error, _kind(error), keep=id)
            return
        finally:
            del self._copies[id]
        await self.stored()

    def leave(self, id: str) -> None:
        """Stop copying; what has come stays."""
        if id in self._copies:
            self._copies[id].cancel()

    async def forget(self, id: str) -> None:
        """Delete what is stored, with the eyes that no other model has."""
        try:
            eyes = {model.id: model.notes.get("eyes") for model in await self._store.list()}
            own = eyes.pop(id, None)
            await self._store.forget(id)
            if own and own not in eyes.values():
                await self._store.forget(own)
        except WebgemmaError as error:
            self._tell_error(error, _kind(error), keep=id)
        await self.stored()

    async def stored(self) -> None:
        """Tell what is stored, and how much room there is for more."""
        models = []
        for model in await self._store.list():
            facts = {"id": model.id, "name": model.name, "nbytes": model.nbytes}
            facts |= {"have": model.have, "whole": model.whole, "digest": model.digest}
            models.append({"gpu_nbytes": None, "gpu_least_nbytes": None, **model.notes, **facts})
        self._tell("stored", models=models, free_nbytes=await self._store.free_nbytes())

    async def _copy(self, id: str, asked: Any) -> None:
        eyes = getattr(asked, "eyes", None)
        seeing = await self._copy_file(id, eyes) if eyes else None  # first: a whole model has them
        await self._copy_file(id, asked)
        if seeing:
            await self._store.note(id, eyes=seeing)
        await self._note_needs(id)
        self._tell("kept", id=id, name=asked.name)

    async def _copy_file(self, id: str, asked: Any) -> str:
        """Store a file of a model of this id; what it is stored as."""

        def tell(stage: str) -> _Paced:
            facts = {"id": id, "name": asked.name, "stage": stage}
            return _Paced(
                lambda done, total: self._tell("keeping", done=done, total=total, **facts)
            )

        stages = {stage: tell(stage) for stage in ("copying", "checking")}
        source = await self._source(asked)
        try:
            kept = await self._store.keep(
                source, asked.name, asked.digest or None, lambda stage, *how: stages[stage](*how)
            )
        finally:
            source.close()
            for stage in stages.values():
                stage.close()
        return kept.id

    async def _note_needs(self, id: str) -> None:
        """Remember what the model takes of a GPU: whoever lists it need not read it again."""
        try:
            gguf = await Gguf.aopen(await self._store.open(id))
            try:
                full, least = gpu_needs(gguf)
            finally:
                gguf.close()
            await self._store.note(id, gpu_nbytes=full, gpu_least_nbytes=least)
        except WebgemmaError:
            pass  # whoever loads it is told why it is no model

    async def _source(self, asked: Any) -> Source:
        """What the page means."""
        if asked.kind == "bundled":
            return await open_address(BUNDLED_URL, self._files, BUNDLED, NO_SERVER, whole=True)
        if asked.kind == "stored":
            return await self._store.open(asked.id)
        if asked.kind == "file":
            return await open_file(asked.file, self._files)
        return await open_address(asked.url, self._files, asked.name, NO_SERVER)

    async def _eyes(self, asked: Any) -> Source | None:
        """What the model sees with, where that is a file of its own."""
        if eyes := getattr(asked, "eyes", None):
            return await self._source(eyes)
        if asked.kind == "stored":
            kept: str | None = (await self._store.find(asked.id)).notes.get("eyes")
            return await self._store.open(kept) if kept else None
        return None

    async def _reply(self, id: Any, messages: list[Any], settings: dict[str, Any]) -> None:
        if self._model is None:
            self._tell("error", id=id, kind="other", sentence="There is no model: choose one.")
            return
        chosen = {name: value for name, value in settings.items() if value is not None}
        think = bool(chosen.pop("think", False))
        if self._model.config.diffusion:  # it draws whole blocks, by rules of its own
            chosen = {name: chosen[name] for name in BLOCK_SETTINGS if name in chosen}
            chosen["watch"] = True
        finish, count, begun = "stopped", 0, time.monotonic()
        batch = _Batch(self, id)
        senses = sorted({part["type"] for part in _media_parts(messages)}, reverse=True)
        sensing = _Paced(
            lambda done, total: self._tell("sensing", id=id, senses=senses, done=done, total=total)
        )
        if senses:
            sensing(0, 1)  # decoding them, and loading eyes and ears, takes a while, too
        try:
            pieces = self._model.achat(messages, think=think, progress=sensing, **chosen)
            async for piece in pieces:
                if piece.canvas is not None:
                    batch.flush()
                    self._tell_canvas(id, piece.canvas)
                    continue
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
        finally:
            sensing.close()
        batch.flush()
        seconds = time.monotonic() - begun
        rate = (count - 1) / seconds if count > 1 and seconds > 0 else 0
        self._tell("done", id=id, finish=finish, tokens=count, tokens_per_second=rate)

    def _tell_canvas(self, id: Any, canvas: Canvas) -> None:
        assert self._model is not None
        runs = spelled(canvas, self._model.tokenizer)
        settled, size = sum(canvas.accepted), len(canvas.ids)
        facts = {"block": canvas.block + 1, "step": canvas.step, "settled": settled, "size": size}
        self._tell("canvas", id=id, runs=runs, **facts)

    def _tell(self, type: str, **facts: Any) -> None:
        self._post(json.dumps({"type": type, **facts}))

    def _tell_error(self, error: WebgemmaError, kind: str, **facts: Any) -> None:
        self._tell("error", sentence=str(error), kind=kind, **facts)


class _Paced:
    """Tells how far something has come, now and then; also what came last before it stalls."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = tell
        self._told = 0.0
        self._latest = (0, 0)
        self._later: asyncio.TimerHandle | None = None

    def __call__(self, done: int, total: int) -> None:
        self._latest = (done, total)
        if time.monotonic() - self._told >= PROGRESS_SECONDS or done == total:
            self._flush()
        elif self._later is None:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(PROGRESS_SECONDS, self._flush)

    def _flush(self) -> None:
        self.close()
        self._told = time.monotonic()
        self._tell(*self._latest)

    def close(self) -> None:
        """It has ended: nothing more is told."""
        if self._later is not None:
            self._later.cancel()
        self._later = None


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


def _media_parts(messages: list[Any]) -> list[dict[str, Any]]:
    """The pictures and sounds of messages."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part["type"] in ("image", "audio")]


def _kind(error: WebgemmaError) -> str:
    """What the page can do about it."""
    if isinstance(error, StorageError):
        return "storage"
    if isinstance(error, DeviceMemoryError):
        return "memory"
    if isinstance(error, GgufError | ModelNotFoundError):
        return "file"
    if isinstance(error, InputError) and (
        "cannot see" in str(error) or "cannot hear" in str(error)
    ):
        return "senses"
    return "device-lost" if isinstance(error, DeviceError) and "was lost" in str(error) else "other"
