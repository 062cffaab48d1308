"""The chat page's engine: the Python side of its worker, which loads models and generates replies.

The messages between page and worker are listed in static/tab_engine.js."""

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from webgemma.api import Gemma
from webgemma.denoising import Canvas
from webgemma.device import aopen_device
from webgemma.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    GgufError,
    MissingEncoderError,
    MissingPackageError,
    ModelNotFoundError,
    PromptLengthError,
    StorageError,
    WebgemmaError,
)
from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gguf.browser import ANY_SERVER, ServerAdvice, browser_files, open_address, open_file
from webgemma.gguf.opfs import OpfsStore, stored_id
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import Source
from webgemma.models import BUNDLED, BUNDLED_PATH, gpu_nbytes
from webgemma.replies import Usage, canvas_facts
from webgemma.settings import SETTINGS, applicable
from webgemma.text.markup import CHANNEL_OPEN
from webgemma.web.gpu_memory import free_nbytes

if TYPE_CHECKING:
    from webgemma.web.searching import Searching
    from webgemma.web.tuning import Tuning

Result = TypeVar("Result")

FRAME_SECONDS = 1 / 60  # minimum time between two messages with text of a reply
PROGRESS_SECONDS = 0.1  # minimum time between two messages of progress
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

# Keys in the notes of stored models. Browsers hold models stored under these names: do not rename.
PART_NOTES = {"mmproj": "eyes", "draft": "draft"}  # the ids of files that belong to the model
GPU_NOTE, GPU_MIN_NOTE = "gpu_nbytes", "gpu_least_nbytes"


class Tab:
    """One loaded model with its replies, and the models stored in this browser.

    `post` sends a message, as JSON, to the page; `files` is the object that gguf/files.js defines.
    A `spec` is the description of a model's source that the page sends, a JavaScript object."""

    def __init__(self, post: Callable[[str], None], files: Any = None) -> None:
        self._post = post
        self._files = browser_files() if files is None else files
        self._store = OpfsStore(self._files)
        self._model: Gemma | None = None
        self._watch: asyncio.Future[None] | None = None  # of the model's device
        self._inspected: tuple[Any, Gguf] | None = None  # the latest, and its id
        self._replies: dict[Any, asyncio.Future[Any]] = {}  # and embeddings
        self._stopped: set[Any] = set()  # ids of replies that were stopped before they began
        self._copies: dict[str, asyncio.Future[None]] = {}
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
            self._report_error(error, _kind(error), inspect=id)
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
        progress = _ThrottledProgress(
            lambda loaded, total: self._report("progress", loaded=loaded, total=total)
        )
        try:
            gguf: Any = self._take_inspected(inspected) or await Gguf.aopen(await self._open(spec))
            if context is not None:
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
            self._report_error(error, _kind(error))
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
            self._report_error(error, _kind(error))

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
                self._report_error(error, _kind(error), tune=request)

            self._tuning = Tuning(self._report, report_error, lambda: self._model, self._files)
        return self._tuning

    @property
    def searching(self) -> "Searching":
        """Search in documents; imported on first use, as fine-tuning is."""
        if self._searching is None:
            from webgemma.web.searching import Searching

            def report_error(error: WebgemmaError, request: Any) -> None:
                self._report_error(error, _kind(error), search=request)

            self._searching = Searching(self._report, report_error, self._open)
        return self._searching

    async def add_adapter(self, spec: Any) -> None:
        """Store the adapter in a file that the user has chosen."""
        try:
            source = await self._open(spec)
        except WebgemmaError as error:
            self._report_error(error, _kind(error), tune="add_adapter")
            return
        await self.tuning.add_adapter(source)

    # Stored models

    async def store(self, spec: Any) -> None:
        """Copy a model into this browser's storage, until it is complete or cancelled."""
        try:
            id = stored_id(spec.name, spec.nbytes, spec.digest or None)
        except WebgemmaError as error:
            self._report_error(error, _kind(error), store=None)
            return
        if id in self._copies:
            return
        copy = self._copies[id] = asyncio.ensure_future(self._copy(id, spec))
        try:
            await copy
            report_end = partial(self._report, "stored", id=id, name=spec.name)
        except asyncio.CancelledError:
            if not copy.cancelled():
                raise
            report_end = partial(self._report, "store_cancelled", id=id, name=spec.name)
        except WebgemmaError as error:
            report_end = partial(self._report_error, error, _kind(error), store=id)
        finally:
            del self._copies[id]
        await self.list_stored()  # first: the page's message depends on what was copied
        report_end()

    def cancel_store(self, id: str) -> None:
        """Stop copying a model; what has been copied stays."""
        if id in self._copies:
            self._copies[id].cancel()

    async def delete(self, id: str) -> None:
        """Delete a stored model, with the files of its own that no other model uses."""
        self._take_inspected(None)  # it may be this one, if loading it was cancelled
        try:
            parts = {
                model.id: {model.notes[note] for note in PART_NOTES.values() if note in model.notes}
                for model in await self._store.list()
            }
            own = parts.pop(id, set())
            await self._store.delete(id)
            for part in own.difference(*parts.values()):
                await self._store.delete(part)
        except WebgemmaError as error:
            self._report_error(error, _kind(error), store=id)
        await self.list_stored()

    async def list_stored(self) -> None:
        """Report the stored models, and how much more can be stored."""
        models = [
            {
                "id": model.id,
                "name": model.name,
                "nbytes": model.nbytes,
                "stored_nbytes": model.stored_nbytes,
                "complete": model.whole,
                "digest": model.digest,
                **{part: model.notes.get(note) for part, note in PART_NOTES.items()},
                "gpu_nbytes": model.notes.get(GPU_NOTE),
                "gpu_min_nbytes": model.notes.get(GPU_MIN_NOTE),
            }
            for model in await self._store.list()
        ]
        free = await self._store.free_nbytes()
        self._report("stored_models", models=models, free_nbytes=free)

    async def _copy(self, id: str, spec: Any) -> None:
        """Copy a model and the files that belong to it, and note what it needs."""
        parts = {note: getattr(spec, part, None) for part, note in PART_NOTES.items()}
        # The parts first: a model that is complete then has them.
        notes = {note: await self._copy_file(id, part) for note, part in parts.items() if part}
        await self._copy_file(id, spec)
        if notes:
            await self._store.note(id, **notes)
        await self._note_gpu_needs(id)

    async def _copy_file(self, id: str, spec: Any) -> str:
        """Copy one file of the model with this id; return the id of the file's copy."""

        def stage_progress(stage: str) -> _ThrottledProgress:
            facts = {"id": id, "name": spec.name, "stage": stage}
            return _ThrottledProgress(
                lambda done, total: self._report("storing", done=done, total=total, **facts)
            )

        stages = {stage: stage_progress(stage) for stage in ("copying", "checking")}
        source = await self._open(spec)
        try:
            copy = await self._store.store(
                source, spec.name, spec.digest or None, lambda stage, *done: stages[stage](*done)
            )
        finally:
            source.close()
            for stage in stages.values():
                stage.close()
        return copy.id

    async def _note_gpu_needs(self, id: str) -> None:
        """Note the GPU memory of a stored model, so that listing does not read its header."""
        try:
            gguf = await Gguf.aopen(await self._store.open(id))
            try:
                nbytes, min_nbytes = gpu_nbytes(gguf)
            finally:
                gguf.close()
            await self._store.note(id, **{GPU_NOTE: nbytes, GPU_MIN_NOTE: min_nbytes})
        except WebgemmaError:
            pass  # loading reports why it is not a model

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
            return await self._store.open(spec.id)
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
            id: str | None = (await self._store.find(spec.id)).notes.get(PART_NOTES[part])
            return await self._store.open(id) if id else None
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
        encoding = _ThrottledProgress(
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
                for call in piece.tool_calls:
                    self._report("tool_call", id=id, name=call.name, arguments=call.arguments)
                finish = piece.finish or finish
        except asyncio.CancelledError:
            pass
        except WebgemmaError as error:
            self._report_error(error, _kind(error), id=id)
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
            self._report_error(error, _kind(error), id=id)
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


class _ThrottledProgress:
    """Progress that is reported every PROGRESS_SECONDS at most; the latest value is never lost."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._report_seconds = 0.0  # when the last report was sent
        self._latest = (0, 0)
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, done: int, total: int) -> None:
        self._latest = (done, total)
        if time.monotonic() - self._report_seconds >= PROGRESS_SECONDS or done == total:
            self._flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PROGRESS_SECONDS, self._flush)

    def _flush(self) -> None:
        self.close()
        self._report_seconds = time.monotonic()
        self._report(*self._latest)

    def close(self) -> None:
        """Drop a pending report: the work has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


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


def _kind(error: WebgemmaError) -> str:
    """Return the kind of an error, by which the page chooses its advice."""
    if isinstance(error, StorageError):
        return "storage"
    if isinstance(error, PromptLengthError):
        return "prompt"
    if isinstance(error, DeviceMemoryError):
        return "memory"
    if isinstance(error, GgufError | ModelNotFoundError):
        return "file"
    if isinstance(error, MissingEncoderError):
        return "no-encoder"
    if isinstance(error, MissingPackageError):
        return "no-schemas"
    if isinstance(error, DeviceLostError):
        return "device-lost"
    return "device" if isinstance(error, DeviceError) else "other"
