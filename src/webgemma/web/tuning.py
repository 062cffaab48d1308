"""Fine-tuning in the page: examples are looked through, an adapter learns, is kept and put on."""

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
from webgemma.lora.adapter import Adapter
from webgemma.lora.course import Course, Training
from webgemma.lora.data import Example, Report, bucket, split
from webgemma.lora.estimate import estimate
from webgemma.lora.fresh import GROUPS, new_adapter
from webgemma.lora.gguf_file import gguf_adapter_bytes, open_gguf_adapter
from webgemma.lora.trainer import Options, Trainer
from webgemma.web.room import free_nbytes

FOLDER = "webgemma/adapters"
NAMED_ROWS = 20  # that cannot be used; the page shows no more


@dataclass(frozen=True, slots=True)
class Asked:
    """What the page asks for, beside the examples."""

    name: str = "examples.jsonl"  # of their file
    rank: int = 16
    parts: str = "all"  # a group of fresh.py
    rate: float = 2e-4
    epochs: int = 3
    steps: int | None = None  # in place of epochs
    batch: int = 4
    max_length: int = 512  # tokens of an example
    held_out: float = 0.0  # share of the rows to judge by


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be learnt from what, and what it takes."""

    adapter: Adapter
    learn: list[Example]
    judges: list[Example]
    report: Report
    options: Options
    course: Course
    nbytes: int  # of the GPU, beside the model
    free_nbytes: int  # of those, what it can give

    @property
    def steps(self) -> int:
        return len(self.course.steps(self.learn, self.options.sequences))


_Given = ParamSpec("_Given")
_Act = Callable[Concatenate["Tuning", _Given], Coroutine[Any, Any, None]]


def _telling(act: _Act[_Given]) -> _Act[_Given]:
    """What goes wrong is told, with the name of what was asked."""

    @wraps(act)
    async def telling(self: "Tuning", /, *given: _Given.args, **named: _Given.kwargs) -> None:
        try:
            await act(self, *given, **named)
        except WebgemmaError as error:
            self._tell_error(error, act.__name__)

    return telling


class Tuning:
    """Trains adapters on the tab's model and keeps them; what is asked is said in engine.js."""

    def __init__(
        self,
        tell: Callable[..., None],
        tell_error: Callable[[WebgemmaError, str], None],
        model: Callable[[], Gemma | None],
        files: Any,
    ) -> None:
        self._tell, self._tell_error = tell, tell_error
        self._find_model = model
        self._store = OpfsStore(files, FOLDER)
        self._unkept: dict[str, tuple[bytes, dict[str, Any]]] = {}  # there was no room
        self._latest: tuple[tuple[Gemma, str, Asked], _Task] | None = None
        self._is_enough = False

    @_telling
    async def examine(self, data: str, options: str) -> None:
        """Tell what became of the rows, and whether learning them fits into the GPU."""
        task = await self._task(self._model, data, Asked(**json.loads(options)))
        report, skipped = task.report, task.report.skipped
        facts: dict[str, Any] = {"rows": report.rows, "examples": report.examples}
        facts |= {"tokens": report.tokens, "targets": report.targets}
        facts |= {"truncated": len(report.truncated)}
        facts |= {"skipped": list(skipped.items())[:NAMED_ROWS], "skipped_count": len(skipped)}
        facts |= {"batch": task.options.sequences, "steps": task.steps}
        facts |= {"nbytes": task.nbytes, "free_nbytes": task.free_nbytes}
        self._tell("examined", **facts)

    @_telling
    async def tune(self, data: str, options: str) -> None:
        """Learn, until the course ends or it is enough; what was learnt is kept."""
        self._is_enough, model = False, self._model
        task = await self._task(model, data, Asked(**json.loads(options)))
        if task.free_nbytes < task.nbytes:
            raise InputError(
                f"Learning takes {task.nbytes / 1e9:.1f} GB of the GPU beside the model, which can "
                f"give {task.free_nbytes / 1e9:.1f} GB: take fewer examples at once, shorter ones, "
                "or a lower rank."
            )
        await self.take_off()
        learnt, facts = await self._learn(model, task)
        id = None if learnt is None else await self._keep(learnt, {"base": model.name, **facts})
        self._tell("tuned", id=id, stopped=self._is_enough, **facts)
        await self.adapters()

    def enough(self) -> None:
        """Stop learning after the step that is under way."""
        self._is_enough = True

    @_telling
    async def put_on(self, id: str) -> None:
        """Have this adapter on, and no other."""
        adapter = await open_gguf_adapter(await self._source(id))
        self._model.set_lora(adapter)
        self._tell("adapted", id=id, name=adapter.name)

    @_telling
    async def take_off(self) -> None:
        """Have none on."""
        self._model.set_lora(None)
        self._tell("adapted", id=None, name=None)

    @_telling
    async def adapters(self) -> None:
        """Tell what there is."""
        listed = [
            {**kept.notes, "id": kept.id, "name": kept.name, "nbytes": kept.nbytes, "kept": True}
            for kept in await self._store.list()
            if kept.whole
        ]
        for id, (data, notes) in self._unkept.items():
            listed.append({**notes, "id": id, "nbytes": len(data), "kept": False})
        self._tell("adapters", adapters=listed)

    async def adapter(self, id: str) -> bytes | None:
        """A GGUF adapter, as llama.cpp and Ollama read it; None, and why is told, if it is gone."""
        try:
            with closing(await self._source(id)) as source:
                return bytes(await source.read(0, source.nbytes))
        except WebgemmaError as error:
            self._tell_error(error, "adapter")
            return None

    @_telling
    async def forget_adapter(self, id: str) -> None:
        """Delete an adapter; where it is on, it stays on."""
        if self._unkept.pop(id, None) is None:
            await self._store.forget(id)
        await self.adapters()

    @property
    def _model(self) -> Gemma:
        model = self._find_model()
        if model is None:
            raise InputError("There is no model: choose one.")
        return model

    async def _task(self, model: Gemma, data: str, asked: Asked) -> _Task:
        """What is asked for; the very same is not worked out twice."""
        key = (model, data, asked)
        if self._latest is None or self._latest[0] != key:
            self._latest = None
            self._latest = (key, await _task(model, data, asked))
        return self._latest[1]

    async def _learn(self, model: Gemma, task: _Task) -> tuple[Adapter | None, dict[str, Any]]:
        """What was learnt, the best of it where that is judged, and how it went."""
        best: Adapter | None = None
        facts: dict[str, Any] = {"name": task.adapter.name, "steps": 0, "loss": None}
        begun, tokens, speed = 0.0, 0, 0.0
        with closing(Trainer(model.gpu("Learning").model, task.adapter, task.options)) as trainer:
            training = Training(trainer, task.learn, task.judges, task.course)
            async for now in training.run():
                if not begun:  # the first step compiles
                    begun = time.monotonic()
                else:
                    tokens += now.found.tokens
                    speed = tokens / max(1e-9, time.monotonic() - begun)
                facts |= {"steps": now.step, "loss": now.found.loss}
                how = {"loss": now.found.loss, "judged": now.judged, "tokens_per_second": speed}
                self._tell("tuning", step=now.step, steps=now.steps, rate=now.rate, **how)
                if now.best:
                    best = await trainer.adapter()
                    facts |= {"judged": now.judged}
                if self._is_enough:
                    break
            if not trainer.steps:
                return None, facts
            return best or await trainer.adapter(), facts

    async def _keep(self, adapter: Adapter, notes: dict[str, Any]) -> str:
        """Store an adapter; where that cannot be, it lasts as long as the page."""
        data = gguf_adapter_bytes(adapter)
        digest = hashlib.sha256(data).hexdigest()
        try:
            source = BytesSource(data, adapter.name)
            kept = await self._store.keep(source, adapter.name, f"sha256:{digest}")
            await self._store.note(kept.id, **notes)
        except StorageError:
            self._unkept[digest] = (data, notes)
        return digest

    async def _source(self, id: str) -> Source:
        if id in self._unkept:
            data, notes = self._unkept[id]
            return BytesSource(data, notes["name"])
        try:
            return await self._store.open(id)
        except ModelNotFoundError:
            raise ModelNotFoundError(
                "This adapter is not stored in this browser any more."
            ) from None


async def _task(model: Gemma, data: str, asked: Asked) -> _Task:
    engine = model.gpu("Learning")
    examples, report = model.texts(asked.max_length).parse(data, asked.name)
    learn, judges = split(examples, asked.held_out, 0)
    length = bucket(max(len(example.ids) for example in examples))
    sequences = min(asked.batch, len(learn))
    if engine.model.table is not None:
        sequences = max(1, min(sequences, BATCH_ROWS // length))
    options = Options(sequences)
    parts = GROUPS.get(asked.parts, (asked.parts,))
    name = PurePath(asked.name).stem or "adapter"
    adapter = new_adapter(model.config, parts, rank=asked.rank, name=name)
    course = Course(asked.rate, asked.epochs, total=asked.steps)
    on = engine.model.device
    memory = await estimate(engine.gguf, model.config, adapter, options, length, on)
    nbytes = memory.adapter_nbytes + memory.work_nbytes
    device = await aopen_device()
    try:
        free = await free_nbytes(device, nbytes)
    finally:
        device.close()
    return _Task(adapter, learn, judges, report, options, course, nbytes, free)
