"""Fine-tuning in the page: checks examples, trains LoRA adapters, stores and applies them."""

import hashlib
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from pathlib import PurePath
from typing import Any, Concatenate, ParamSpec

from webgemma.api import Gemma
from webgemma.device import aopen_device
from webgemma.errors import (
    InputError,
    ModelNotFoundError,
    StorageError,
    WebgemmaError,
)
from webgemma.gemma.weights import BATCH_ROWS
from webgemma.gguf.opfs import OpfsStore
from webgemma.gguf.sources import BytesSource, Source
from webgemma.lora.adapter import TARGET_GROUPS, Adapter, new_adapter
from webgemma.lora.data import Example, Report, bucket, split
from webgemma.lora.estimate import estimate
from webgemma.lora.gguf_file import gguf_adapter_bytes, open_gguf_adapter
from webgemma.lora.schedule import Schedule
from webgemma.lora.trainer import Trainer, TrainingOptions
from webgemma.lora.training import train
from webgemma.web.gpu_memory import free_nbytes

FOLDER = "webgemma/adapters"
MAX_SKIPPED = 20  # skipped rows that are reported one by one

# A key in the notes of stored adapters. Browsers hold adapters stored under it: do not rename.
HELD_OUT_NOTE = "judged"


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options that the page sends with the examples."""

    name: str = "examples.jsonl"  # of the examples' file
    rank: int = 16
    targets: str = "all"  # a group of lora/adapter.py
    learning_rate: float = 2e-4
    epochs: int = 3
    steps: int | None = None  # instead of epochs
    batch: int = 4
    max_length: int = 512  # tokens of an example
    held_out: float = 0.0  # share of the rows that is not trained on


@dataclass(frozen=True, slots=True)
class _Task:
    """A training that is ready to start, and the memory it needs."""

    adapter: Adapter
    examples: list[Example]
    held_out: list[Example]
    report: Report
    options: TrainingOptions
    schedule: Schedule
    nbytes: int  # of GPU memory, in addition to the model
    free_nbytes: int  # of those, what the GPU can allocate

    @property
    def steps(self) -> int:
        return len(self.schedule.steps(self.examples, self.options.batch_size))


_Args = ParamSpec("_Args")
_Handler = Callable[Concatenate["Tuning", _Args], Coroutine[Any, Any, None]]


def _reports_errors(handler: _Handler[_Args]) -> _Handler[_Args]:
    """Make a request's handler report errors, with the request's name, instead of raising them."""

    @wraps(handler)
    async def reporting(self: "Tuning", /, *args: _Args.args, **kwargs: _Args.kwargs) -> None:
        try:
            await handler(self, *args, **kwargs)
        except WebgemmaError as error:
            self._report_error(error, handler.__name__)

    return reporting


class Tuning:
    """Trains adapters on the tab's model and stores them.

    Its methods handle the requests of the same names that static/tab_engine.js lists."""

    def __init__(
        self,
        report: Callable[..., None],
        report_error: Callable[[WebgemmaError, str], None],
        model: Callable[[], Gemma | None],
        files: Any,
    ) -> None:
        self._report, self._report_error = report, report_error
        self._current_model = model
        self._store = OpfsStore(files, FOLDER)
        self._unstored: dict[str, tuple[bytes, dict[str, Any]]] = {}  # the storage was full
        self._latest: tuple[tuple[Gemma, str, TuneOptions], _Task] | None = None
        self._is_stopped = False

    @_reports_errors
    async def examine(self, data: str, options: str) -> None:
        """Report how many rows can be used, and whether training on them fits the GPU."""
        task = await self._task(self._model, data, TuneOptions(**json.loads(options)))
        report, skipped = task.report, task.report.skipped
        facts: dict[str, Any] = {"rows": report.rows, "examples": report.examples}
        facts |= {"tokens": report.tokens, "targets": report.targets}
        facts |= {"truncated": len(report.truncated)}
        facts |= {"skipped": list(skipped.items())[:MAX_SKIPPED], "skipped_count": len(skipped)}
        facts |= {"batch": task.options.batch_size, "steps": task.steps}
        facts |= {"nbytes": task.nbytes, "free_nbytes": task.free_nbytes}
        self._report("examined", **facts)

    @_reports_errors
    async def tune(self, data: str, options: str) -> None:
        """Train an adapter to the end or until `stop_tuning`, and store it."""
        self._is_stopped, model = False, self._model
        task = await self._task(model, data, TuneOptions(**json.loads(options)))
        if task.free_nbytes < task.nbytes:
            raise InputError(
                f"Training needs {task.nbytes / 1e9:.1f} GB of GPU memory in addition to the "
                f"model, but {task.free_nbytes / 1e9:.1f} GB is free: use a smaller batch, shorter "
                "examples or a lower rank."
            )
        await self.detach_adapter()
        adapter, facts = await self._train(model, task)
        id = None if adapter is None else await self._save(adapter, model.name, facts)
        self._report("tuned", id=id, stopped=self._is_stopped, **facts)
        await self.list_adapters()

    def stop_tuning(self) -> None:
        """Stop training after the current step."""
        self._is_stopped = True

    @_reports_errors
    async def apply_adapter(self, id: str) -> None:
        """Apply this adapter to the model, in place of any other."""
        adapter = await open_gguf_adapter(await self._open(id))
        self._model.set_lora(adapter)
        self._report("adapter_applied", id=id, name=adapter.name)

    @_reports_errors
    async def detach_adapter(self) -> None:
        """Run the model without an adapter."""
        self._model.set_lora(None)
        self._report("adapter_applied", id=None, name=None)

    @_reports_errors
    async def list_adapters(self) -> None:
        """Report all adapters."""
        adapters = [
            _facts(stored.notes)
            | {"id": stored.id, "name": stored.name, "nbytes": stored.nbytes, "stored": True}
            for stored in await self._store.list()
            if stored.whole
        ]
        for id, (data, notes) in self._unstored.items():
            adapters.append(_facts(notes) | {"id": id, "nbytes": len(data), "stored": False})
        self._report("adapters", adapters=adapters)

    @_reports_errors
    async def add_adapter(self, source: Source) -> None:
        """Store an adapter from a file, so that it can be applied."""
        with closing(source):
            data = bytes(await source.read(0, source.nbytes))
        adapter = await open_gguf_adapter(BytesSource(data, source.name))
        name = PurePath(source.name).stem
        notes = {"base": adapter.base} if adapter.base else {}
        id = await self._save_file(data, name, {"name": name, **notes})
        self._report("adapter_added", id=id, name=name)
        await self.list_adapters()

    async def read_adapter(self, id: str) -> bytes | None:
        """Return an adapter as a GGUF file for llama.cpp and Ollama.

        If it does not exist any more, report the error and return None."""
        try:
            with closing(await self._open(id)) as source:
                return bytes(await source.read(0, source.nbytes))
        except WebgemmaError as error:
            self._report_error(error, "read_adapter")
            return None

    @_reports_errors
    async def delete_adapter(self, id: str) -> None:
        """Delete an adapter; one that is applied stays applied."""
        if self._unstored.pop(id, None) is None:
            await self._store.delete(id)
        await self.list_adapters()

    @property
    def _model(self) -> Gemma:
        model = self._current_model()
        if model is None:
            raise InputError("No model is loaded: choose one.")
        return model

    async def _task(self, model: Gemma, data: str, options: TuneOptions) -> _Task:
        """Prepare a training; the latest one is cached, as `tune` follows `examine`."""
        key = (model, data, options)
        if self._latest is None or self._latest[0] != key:
            self._latest = None
            self._latest = (key, await _task(model, data, options))
        return self._latest[1]

    async def _train(self, model: Gemma, task: _Task) -> tuple[Adapter | None, dict[str, Any]]:
        """Train; return the adapter and facts about the training.

        With held-out rows it is the adapter of the lowest held-out loss; None without a step."""
        best: Adapter | None = None
        facts: dict[str, Any] = {"name": task.adapter.name, "steps": 0, "loss": None}
        start, tokens, speed = 0.0, 0, 0.0
        weights = model.gpu_engine("Fine-tuning").model
        with closing(Trainer(weights, task.adapter, task.options)) as trainer:
            steps = train(trainer, task.examples, task.held_out, task.schedule)
            async for now in steps:
                if not start:  # the first step compiles kernels
                    start = time.monotonic()
                else:
                    tokens += now.result.tokens
                    speed = tokens / max(1e-9, time.monotonic() - start)
                facts |= {"steps": now.step, "loss": now.result.loss}
                losses = {"loss": now.result.loss, "held_out_loss": now.held_out_loss}
                progress = {
                    "step": now.step,
                    "steps": now.steps,
                    "learning_rate": now.learning_rate,
                }
                self._report("tuning", tokens_per_second=speed, **progress, **losses)
                if now.best:
                    best = await trainer.adapter()
                    facts |= {"held_out_loss": now.held_out_loss}
                if self._is_stopped:
                    break
            if not trainer.steps:
                return None, facts
            return best or await trainer.adapter(), facts

    async def _save(self, adapter: Adapter, base: str, facts: dict[str, Any]) -> str:
        """Store an adapter that was trained; return its id."""
        notes = {"base": base, **facts}
        if "held_out_loss" in notes:
            notes[HELD_OUT_NOTE] = notes.pop("held_out_loss")
        return await self._save_file(gguf_adapter_bytes(adapter), adapter.name, notes)

    async def _save_file(self, data: bytes, name: str, notes: dict[str, Any]) -> str:
        """Store an adapter's file, or keep it until the page is closed if that fails.

        One that is stored already keeps its notes. Returns its id."""
        digest = hashlib.sha256(data).hexdigest()
        try:
            known = {adapter.id: adapter for adapter in await self._store.list()}
            if digest not in known or not known[digest].whole:
                await self._store.store(BytesSource(data, name), name, f"sha256:{digest}")
                await self._store.note(digest, **notes)
        except StorageError:
            self._unstored[digest] = (data, notes)
        return digest

    async def _open(self, id: str) -> Source:
        if id in self._unstored:
            data, notes = self._unstored[id]
            return BytesSource(data, notes["name"])
        try:
            return await self._store.open(id)
        except ModelNotFoundError:
            raise ModelNotFoundError(
                "This adapter is no longer stored in this browser: train it again."
            ) from None


def _facts(notes: dict[str, Any]) -> dict[str, Any]:
    """Return the notes of a stored adapter under the names that messages use."""
    return {"held_out_loss" if key == HELD_OUT_NOTE else key: value for key, value in notes.items()}


async def _task(model: Gemma, data: str, tune: TuneOptions) -> _Task:
    """Parse the examples, and estimate and probe the memory that training on them needs."""
    engine = model.gpu_engine("Fine-tuning")
    rows, report = model.example_reader(tune.max_length).parse(data, tune.name)
    examples, held_out = split(rows, tune.held_out, 0)
    length = bucket(max(len(example.ids) for example in rows))
    batch_size = min(tune.batch, len(examples))
    if engine.model.table is not None:
        batch_size = max(1, min(batch_size, BATCH_ROWS // length))
    options = TrainingOptions(batch_size)
    targets = TARGET_GROUPS.get(tune.targets, (tune.targets,))
    name = PurePath(tune.name).stem or "adapter"
    adapter = new_adapter(model.config, targets, rank=tune.rank, name=name)
    schedule = Schedule(tune.learning_rate, tune.epochs, max_steps=tune.steps)
    on = engine.model.device
    memory = await estimate(engine.gguf, model.config, adapter, options, length, on)
    nbytes = memory.adapter_nbytes + memory.scratch_nbytes
    device = await aopen_device()
    try:
        free = await free_nbytes(device, nbytes)
    finally:
        device.close()
    return _Task(adapter, examples, held_out, report, options, schedule, nbytes, free)
