"""The chat page's engine: the Python side of its worker, which loads models and generates replies.

The messages between page and worker are listed in static/tab_engine.js."""

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from webgemma.api import Gemma
from webgemma.denoising import Canvas
from webgemma.device import aopen_device
from webgemma.errors import DeviceLostError, GgufError, WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gguf.browser import ANY_SERVER, ServerAdvice, browser_files, open_address, open_file
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import Source
from webgemma.models import BUNDLED, BUNDLED_PATH
from webgemma.replies import Usage, canvas_facts
from webgemma.settings import SETTINGS, applicable
from webgemma.text.markup import CHANNEL_OPEN
from webgemma.web.gpu_memory import free_nbytes
from webgemma.web.reports import ThrottledProgress, kind_of
from webgemma.web.stored_models import StoredModels

if TYPE_CHECKING:
    from webgemma.web.searching import Searching
    from webgemma.web.tuning import Tuning

Result = TypeVar("Result")

FRAME_SECONDS = 1 / 60  # minimum time between two messages with text of a reply
BUNDLED_URL = f"package/demo/{BUNDLED_PATH.name}"  # the page's wheel leaves it out
SERVER = ServerAdvice(
    "its server does not respond; if that is `webgemma web`, check that it is still running",
    "open the address that `webgemma web` printed",
)
NO_MODEL = "No model is loaded: choose one."

# What a request's settings may say of a reply, beside the settings of its generation.
OPTIONS = (
    *("think", "schema", "regex", "grammar", "choices"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)


class Tab:
    """One loaded model with its replies, and the models stored in this browser.

    `post` sends a message, as JSON, to the page; `files` is the object that gguf/files.js defines.
    A `spec` is the description of a model's source that the page sends, a JavaScript object."""

    def __init__(self, post: Callable[[str], None], files: Any = None) -> None:
        self._post = post
        self._files = browser_files() if files is None else files
        self._model: Gemma | None = None
        self._watch: asyncio.Future[None] | None = None  # of the model's device
        self._inspected: tuple[Any, Gguf] | None = None  # the latest, and its id
        self._replies: dict[Any, asyncio.Future[Any]] = {}  # and embeddings
        self._stopped: set[Any] = set()  # ids of replies that were stopped before they began
        self.stored = StoredModels(self._report, self._report_error, self._open, self._files)
        self._tuning: Tuning | None = None
        self._searching: Searching | None = None

    async def report_device(self) -> None:
        """Open the GPU once and report its name, or the error if there is none."""
        try:
            device = await aopen_device()
        except WebgemmaError as error:
            self._report_error(error, "no-webgpu")
            return
        units = "subgroup-matrix" in device.features
        self._report("ready", device=device.name, software=device.software, matrix_units=units)
        device.close()

    # The model

    async def inspect(self, id: Any, spec: Any) -> None:
        """Report what a file is, a model, an adapter or an mmproj file, or the error in it.

        Nothing is freed: only a file whose header is right takes the place of the loaded model."""
        try:
            gguf = await Gguf.aopen(await self._open(spec))
            try:
                kind = _kind_of_file(gguf)
                if kind == "model":
                    config = Config.from_gguf(gguf)  # an error if it cannot run
                    config.check_writes(gguf.name)
                    await self._check_parts(spec, config)
            except BaseException:
                gguf.close()
                raise
        except WebgemmaError as error:
            self._report_error(error, kind_of(error), inspect=id)
            return
        self._take_inspected(None)
        if kind == "model":
            self._inspected = (id, gguf)
        else:
            gguf.close()
        self._report("inspected", id=id, kind=kind)

    async def load(
        self, spec: Any, context: int | None, precision: Any, inspected: Any = None
    ) -> None:
        """Load a model, with its mmproj file and its drafter, after closing the current model.

        `inspected` is the id of an inspection, whose header is then not read again. A context that
        is larger than the model's becomes the model's."""
        await self.unload()
        progress = ThrottledProgress(
            lambda loaded, total: self._report("progress", loaded=loaded, total=total)
        )
        try:
            gguf: Any = self._take_inspected(inspected) or await Gguf.aopen(await self._open(spec))
            if isinstance(context, int):  # of another type it is refused below
                context = min(context, Config.from_gguf(gguf).context)
            abilities = await self._abilities(gguf, spec)
            model = await Gemma.aload(
                gguf,
                "gpu",
                context=context,
                precision=precision,
                progress=progress,
                mmproj=await self._open_part(spec, "mmproj"),
                draft=await self._open_part(spec, "draft"),
            )
        except WebgemmaError as error:
            self._report_error(error, kind_of(error))
            return
        finally:
            progress.close()
        self._model = model
        self._watch = asyncio.ensure_future(self._watch_device(model))
        facts = {"name": model.name, "context": model.context, "device": model.device}
        self._report("loaded", nbytes=model.memory_nbytes, **facts, **abilities)

    async def chat(
        self,
        id: Any,
        messages: str,
        settings: str,
        media: Any = (),
        continue_last: bool = False,
    ) -> None:
        """Reply to a conversation, until the reply ends or is stopped.

        `messages` and `settings` are JSON, in which an image or audio is its index in `media`;
        `continue_last` continues the last message, which is a reply."""
        conversation = json.loads(messages)
        for part in _media_parts(conversation):
            part[part["type"]] = media[part[part["type"]]]
        reply = self._reply(id, conversation, json.loads(settings), continue_last)
        try:
            await self._until_stopped(id, reply)
        except _StoppedError:
            facts = {"tokens": 0, "tokens_per_second": 0, "usage": None}
            self._report("done", id=id, finish="stopped", **facts)

    async def embed(
        self, id: Any, texts: str, task: Any = None, size: int | None = None
    ) -> bytes | None:
        """Return the vectors of texts, which are JSON, as float32 after one another.

        None: they were stopped, or the error has been reported."""
        try:
            return await self._until_stopped(id, self._vectors(id, json.loads(texts), task, size))
        except _StoppedError:
            return None

    async def _until_stopped(self, id: Any, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what a request's work returns; _StoppedError if the page stops the request."""
        running: asyncio.Future[Result] = asyncio.ensure_future(work)
        self._replies[id] = running
        if id in self._stopped:
            running.cancel()
        try:
            return await running
        except asyncio.CancelledError:
            if not running.cancelled():
                raise
            raise _StoppedError from None
        finally:
            del self._replies[id]
            self._stopped.discard(id)

    def stop(self, id: Any) -> None:
        """Stop a reply at once, also while its prompt is processed, or before it begins."""
        if id in self._replies:
            self._replies[id].cancel()
        else:
            self._stopped.add(id)

    async def unload(self) -> None:
        """Close the model."""
        if self._watch is not None:
            self._watch.cancel()
        model, self._model, self._watch = self._model, None, None
        if model is not None:
            model.close()

    async def _watch_device(self, model: Gemma) -> None:
        """Report at once that the model's GPU is lost; otherwise the next message would."""
        if model.config.embedding:  # its next call reports it
            return
        lost = getattr(model.gpu_engine("The page").model.device, "lost", None)
        if lost is None:  # natively, the next call reports it
            return
        error: DeviceLostError = await lost()
        if self._model is model:
            self._watch = None  # not cancelled: it ends here
            await self.unload()
            self._report_error(error, kind_of(error))

    async def probe_gpu_memory(self, nbytes: int) -> None:
        """Report how many of `nbytes` the GPU can hold, including what the loaded model takes."""
        model_nbytes = self._model.memory_nbytes if self._model else 0
        try:
            device = await aopen_device()
        except WebgemmaError:  # `report_device` has reported why
            self._report("gpu_memory", nbytes=None)
            return
        try:
            free = await free_nbytes(device, nbytes - model_nbytes)
        finally:
            device.close()
        self._report("gpu_memory", nbytes=model_nbytes + free)

    @property
    def tuning(self) -> "Tuning":
        """Fine-tuning of the model; imported on first use, so that a chat starts sooner."""
        if self._tuning is None:
            from webgemma.web.tuning import Tuning

            def report_error(error: WebgemmaError, request: str) -> None:
                self._report_error(error, kind_of(error), tune=request)

            self._tuning = Tuning(self._report, report_error, lambda: self._model, self._files)
        return self._tuning

    @property
    def searching(self) -> "Searching":
        """Search in documents; imported on first use, as fine-tuning is."""
        if self._searching is None:
            from webgemma.web.searching import Searching

            def report_error(error: WebgemmaError, request: Any) -> None:
                self._report_error(error, kind_of(error), search=request)

            self._searching = Searching(self._report, report_error, self._open)
        return self._searching

    async def add_adapter(self, spec: Any) -> None:
        """Store the adapter in a file that the user has chosen."""
        try:
            source = await self._open(spec)
        except WebgemmaError as error:
            self._report_error(error, kind_of(error), tune="add_adapter")
            return
        await self.tuning.add_adapter(source)

    async def delete(self, id: str) -> None:
        """Delete a stored model, with the files of its own that no other model uses."""
        self._take_inspected(None)  # it may be this one, if loading it was cancelled
        await self.stored.delete(id)

    # Sources

    def _take_inspected(self, id: Any) -> Gguf | None:
        """Return the file of this inspection if it is the latest one; close any other."""
        (latest, gguf), self._inspected = self._inspected or (None, None), None
        if gguf is not None and latest != id:
            gguf.close()
            return None
        return gguf

    async def _check_parts(self, spec: Any, config: Config) -> None:
        """Raise GgufError if the mmproj file holds no encoder, or the drafter is of another
        model."""
        if source := await self._open_part(spec, "mmproj"):
            with await Gguf.aopen(source) as gguf:
                encoders = EncoderConfigs.from_gguf(gguf)
            if encoders.vision is None and encoders.audio is None:
                raise GgufError(f"{source.name} holds neither a vision nor an audio encoder.")
        if source := await self._open_part(spec, "draft"):
            with await Gguf.aopen(source) as gguf:
                drafter_config(gguf, config)

    async def _abilities(self, gguf: Gguf, spec: Any) -> dict[str, bool]:
        """Return whether a model reads images and audio, and whether it may think, by its files."""
        encoders = [EncoderConfigs.from_gguf(gguf)]
        with suppress(WebgemmaError):  # the first image says what is wrong with a file of encoders
            if source := await self._open_part(spec, "mmproj"):
                with await Gguf.aopen(source) as part:
                    encoders.append(EncoderConfigs.from_gguf(part))
        vocabulary: Any = gguf.metadata.get("tokenizer.ggml.tokens", ())
        return {
            "images": any(each.vision is not None for each in encoders),
            "audio": any(each.audio is not None for each in encoders),
            "thinking": CHANNEL_OPEN in vocabulary,
        }

    async def _open(self, spec: Any) -> Source:
        """Open the source that the page describes."""
        if spec.kind == "bundled":
            return await open_address(BUNDLED_URL, self._files, BUNDLED, SERVER, whole=True)
        if spec.kind == "stored":
            return await self.stored.open(spec.id)
        if spec.kind == "file":
            return await open_file(spec.file, self._files)
        is_other = "://" in spec.url  # the page's own addresses are relative
        return await open_address(
            spec.url, self._files, spec.name, ANY_SERVER if is_other else SERVER
        )

    async def _open_part(self, spec: Any, part: str) -> Source | None:
        """Open the file of the model's encoders ("mmproj") or of its drafter ("draft"); None if
        there is none."""
        if part_spec := getattr(spec, part, None):
            return await self._open(part_spec)
        if spec.kind == "stored":
            return await self.stored.open_part(spec.id, part)
        return None

    async def _reply(
        self, id: Any, messages: list[Any], settings: dict[str, Any], continue_last: bool
    ) -> None:
        """Generate a reply and report its pieces, then `done` or the error.

        Settings may have `think`, what the reply keeps to, and `tools`, which the page calls: see
        OPTIONS."""
        if self._model is None:
            self._report("error", id=id, kind="no-model", message=NO_MODEL)
            return
        diffusion = self._model.config.diffusion is not None
        # The page offers settings of all models; names that are none give the error for them.
        left_out = {*SETTINGS} - {*applicable(diffusion)}
        given = {name: value for name, value in settings.items() if value is not None}
        options: Any = {name: given.pop(name) for name in OPTIONS if name in given}
        chosen: Any = {name: value for name, value in given.items() if name not in left_out}
        if diffusion:
            chosen["watch"] = True
        finish, count, start = "stopped", 0, time.monotonic()
        batch = _TextBatch(self, id)
        media = sorted({part["type"] for part in _media_parts(messages)}, reverse=True)
        encoding = ThrottledProgress(
            lambda done, total: self._report("encoding", id=id, media=media, done=done, total=total)
        )
        if media:
            encoding(0, 1)  # decoding the files and loading the encoders also takes a while
        try:
            pieces = self._model.achat(
                messages,
                continue_last=continue_last,
                progress=encoding,
                **options,
                **chosen,
            )
            async for piece in pieces:
                batch.usage = piece.usage or batch.usage
                if piece.canvas is not None:
                    batch.flush()
                    self._report_canvas(id, piece.canvas)
                    continue
                count += 1
                start = start if count > 1 else time.monotonic()
                batch.add(piece.thinking, thinking=True)
                batch.add(piece.text, thinking=False)
                if piece.tool_calls:
                    batch.flush()  # what came before them
                for call in piece.tool_calls:
                    self._report("tool_call", id=id, name=call.name, arguments=call.arguments)
                finish = piece.finish or finish
        except asyncio.CancelledError:
            pass
        except WebgemmaError as error:
            self._report_error(error, kind_of(error), id=id)
            return
        finally:
            encoding.close()
        batch.flush()
        seconds = time.monotonic() - start
        rate = (count - 1) / seconds if count > 1 and seconds > 0 else 0
        facts = {"tokens": count, "tokens_per_second": rate, "usage": batch.usage_facts()}
        self._report("done", id=id, finish=finish, **facts)

    async def _vectors(
        self, id: Any, texts: list[Any], task: Any, size: int | None
    ) -> bytes | None:
        """Return the vectors of texts, or report the error."""
        if self._model is None:
            self._report("error", id=id, kind="no-model", message=NO_MODEL)
            return None
        try:
            rows = await self._model.aembed(texts, task, size)
        except WebgemmaError as error:
            self._report_error(error, kind_of(error), id=id)
            return None
        return array("f", chain.from_iterable(rows)).tobytes()

    def _report_canvas(self, id: Any, canvas: Canvas) -> None:
        assert self._model is not None
        self._report("canvas", id=id, **canvas_facts(canvas, self._model.tokenizer))

    def _report(self, type: str, **facts: Any) -> None:
        self._post(json.dumps({"type": type, **facts}))

    def _report_error(self, error: WebgemmaError, kind: str, **facts: Any) -> None:
        # The page, which has neither Python nor a command line, adds what to do there.
        self._report("error", message=error.reason, kind=kind, **facts)


class _StoppedError(Exception):
    """The page has stopped a request."""


class _TextBatch:
    """Text of a reply, sent to the page once per frame at most."""

    def __init__(self, tab: Tab, id: Any) -> None:
        self._tab = tab
        self._id = id
        self._text, self._thinking = "", False
        self.usage: Usage | None = None  # the latest
        self._flush_seconds = 0.0  # when text was last sent

    def add(self, text: str, *, thinking: bool) -> None:
        """Add text of the reply or of its thoughts."""
        if not text:
            return
        if thinking != self._thinking:
            self.flush()
        self._text, self._thinking = self._text + text, thinking
        if time.monotonic() - self._flush_seconds >= FRAME_SECONDS:
            self.flush()

    def usage_facts(self) -> dict[str, int] | None:
        """Return the latest usage as JSON."""
        return asdict(self.usage) if self.usage else None

    def flush(self) -> None:
        """Send the text that has been added."""
        if self._text:
            facts = {"thinking": self._thinking, "usage": self.usage_facts()}
            self._tab._report("piece", id=self._id, text=self._text, **facts)
        self._text, self._flush_seconds = "", time.monotonic()


def _media_parts(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the image and audio parts of messages."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part["type"] in ("image", "audio")]


def _kind_of_file(gguf: Gguf) -> str:
    """Return what a GGUF file says that it is: "model", "adapter" or "mmproj"."""
    if gguf.metadata.get("general.type") == "adapter":
        return "adapter"
    return "mmproj" if gguf.metadata.get("general.architecture") == "clip" else "model"
