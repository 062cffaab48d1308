"""The models in memory: several within limits, the least recently used ones leave for others.

Who asks for a model that is in memory gets it at once. Others are served first come, first served:
one model is loaded at a time, and while it needs the memory of models that are in use, those who
come later wait behind it, so that nobody waits for ever."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from webgemma.api import Gemma
from webgemma.engine.gpu import DEFAULT_SLOTS
from webgemma.engine.memory_budget import MemoryBudget, gigabytes
from webgemma.errors import DeviceMemoryError, InputError, WebgemmaError
from webgemma.gemma.weights import TableLocation
from webgemma.server.engine import Engine
from webgemma.server.offered import Key, Offered
from webgemma.server.ollama import FOREVER
from webgemma.server.protocol import RequestError

LONGEST_SECONDS = 1e9  # beyond, a model stays for ever
TABLE_LOCATIONS: tuple[TableLocation, ...] = ("device", "host")
PREPARE_SECONDS = 1.0  # that a model is idle before it is prepared for structured output
CLOSE_SECONDS = 5.0  # that those who use a model have when all are closed

log = logging.getLogger("webgemma.server")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be in memory at once; None is no limit."""

    models: int | None = 1
    nbytes: int | None = None  # of weights and caches

    def hold(self, models: "Sequence[LoadedModel]", nbytes: int) -> bool:
        """Return whether one of so many bytes fits beside some models."""
        if self.models is not None and len(models) >= self.models:
            return False
        return self.nbytes is None or sum(m.nbytes for m in models) + nbytes <= self.nbytes


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model in memory, or on its way there."""

    offered: Offered
    keep_seconds: float
    ready: "asyncio.Future[Engine]"  # done when it is loaded, or cannot be
    estimate: int = 0  # bytes; zero without a limit for them
    users: int = 0  # those who wait for it, too
    used: float = 0.0  # when it was last asked for or released, on the monotonic clock
    expires: float = FOREVER  # seconds since 1970, while nobody uses it
    timer: asyncio.TimerHandle | None = None
    task: "asyncio.Task[None] | None" = field(default=None, repr=False)
    preparing: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def engine(self) -> Engine | None:
        """The engine, once it is loaded."""
        is_loaded = self.ready.done() and not self.ready.cancelled() and not self.ready.exception()
        return self.ready.result() if is_loaded else None

    @property
    def nbytes(self) -> int:
        """What it takes: as estimated, or as counted if that is more."""
        return max(self.estimate, self.engine.model.memory_nbytes if self.engine else 0)

    def cancel_timer(self) -> None:
        """Stay, whatever time it is."""
        if self.timer:
            self.timer.cancel()
            self.timer = None


class LoadedModels:
    """The models in memory, within limits."""

    def __init__(
        self,
        limits: Limits,
        keep_seconds: float,
        options: dict[str, Any],
        adapters: Mapping[str, str],
    ) -> None:
        """The options are those of `Gemma.load`; the adapters are attached to what is loaded."""
        self.limits, self.keep_seconds, self.options = limits, keep_seconds, options
        self.adapters = adapters
        self._models: dict[Key, LoadedModel] = {}
        self._line: list[object] = []  # those who wait for a model that has to be loaded
        self._loading: asyncio.Task[None] | None = None
        self._closed: set[Key] = set()  # models in use whose memory another one needs
        self._freeing: set[asyncio.Task[None]] = set()
        self._frees = 0  # so far
        self._changed = asyncio.Event()
        self._is_open = True

    @property
    def is_loading(self) -> bool:
        """Whether a model is on its way, and none is there."""
        return self._loading is not None and not self.all()

    def all(self) -> list[LoadedModel]:
        """Return the models that are loaded, those used last first."""
        loaded = [model for model in list(self._models.values()) if model.engine]
        return sorted(loaded, key=lambda model: -model.used)

    def loading(self) -> list[str]:
        """Return the names of models that are on their way."""
        return [model.offered.name for model in self._models.values() if not model.ready.done()]

    @asynccontextmanager
    async def use(
        self, offered: Offered, keep_seconds: float | None = None
    ) -> AsyncIterator[Engine]:
        """Give the engine of a model, which stays in memory meanwhile and for some time after."""
        model = await self._join(offered)
        try:
            yield await asyncio.shield(model.ready)
        finally:
            self._release(model, keep_seconds)

    async def unload(self, name: str) -> None:
        """Free a model now or, if it is in use, as soon as it is not."""
        for model in self._named(name):
            model.keep_seconds = 0
            if not model.users:
                await asyncio.shield(self._free(model))

    async def close(self) -> None:
        """Free all models; those who use them have some seconds to end."""
        self._is_open = False
        if self._loading:
            self._loading.cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._loading or any(model.users for model in self._models.values()):
                    await self._next_change()
        except TimeoutError:
            log.warning("A model is closed while it is in use.")
        for model in self.all():
            self._free(model)
        if self._freeing:
            await asyncio.wait(list(self._freeing))

    # Who waits

    async def _join(self, offered: Offered) -> LoadedModel:
        """Return a model that is loaded or being loaded, with one user more."""
        ticket = object()
        self._line.append(ticket)
        try:
            while self._is_open:
                model = self._models.get(offered.key)
                if model is not None and offered.key not in self._closed:
                    model.users += 1
                    model.used = time.monotonic()
                    model.cancel_timer()
                    return model
                if self._loading is None and self._line[0] is ticket:
                    self._start(offered)
                else:
                    await self._next_change()
            raise _stopping()
        finally:
            self._line.remove(ticket)
            self._change()

    def _release(self, model: LoadedModel, keep_seconds: float | None) -> None:
        model.users -= 1
        model.used = time.monotonic()
        if keep_seconds is not None:
            model.keep_seconds = keep_seconds
        if not model.users and self._models.get(model.offered.key) is model:
            if model.engine is None:  # everybody who waited for it has left
                self._forget(model)
                if model.task:
                    model.task.cancel()
            else:
                self._rest(model)
        self._change()

    def _rest(self, model: LoadedModel) -> None:
        """Let a model that nobody uses leave in its time."""
        self._prepare(model)
        if model.keep_seconds <= LONGEST_SECONDS:
            model.expires = time.time() + model.keep_seconds
            loop = asyncio.get_running_loop()
            model.timer = loop.call_later(model.keep_seconds, self._expire, model)
        else:
            model.expires = FOREVER

    def _prepare(self, model: LoadedModel) -> None:
        """Prepare a model once it is idle: that may hold up Python for a second or two."""

        async def prepare() -> None:
            await asyncio.sleep(PREPARE_SECONDS)
            if model.users or model.engine is None:
                model.preparing = None  # when it is idle again
            else:
                await model.engine.prepare()

        if model.preparing is None:
            model.preparing = asyncio.create_task(prepare())
            model.preparing.add_done_callback(_log_failure)

    def _expire(self, model: LoadedModel) -> None:
        if self._models.get(model.offered.key) is model and not model.users:
            self._free(model)

    async def _next_change(self) -> None:
        await self._changed.wait()

    def _change(self) -> None:
        """Let all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # Loading

    def _start(self, offered: Offered) -> None:
        """Begin to load a model."""
        for old in self._named(offered.name):  # of which another file is there now
            old.keep_seconds = 0
            if not old.users:
                self._free(old)
        model = LoadedModel(offered, self.keep_seconds, asyncio.get_running_loop().create_future())
        self._models[offered.key] = model
        model.task = self._loading = asyncio.create_task(self._load(model))
        model.task.add_done_callback(lambda task: self._end(model, task))

    def _end(self, model: LoadedModel, task: "asyncio.Task[None]") -> None:
        """Let the next one be loaded, whatever became of this one."""
        error = _stopping() if task.cancelled() else task.exception()
        if type(error) is InputError:  # of the server's options, not of what the client sent
            error = RequestError(str(error), 500)
        if error is not None:
            model.ready.set_exception(error)
            model.ready.exception()  # it may be that nobody waits any more
            self._forget(model)
        model.task = self._loading = None
        self._closed.clear()
        self._change()

    async def _load(self, model: LoadedModel) -> None:
        options = self.options
        needed, table = await asyncio.to_thread(self._needed, model.offered)
        if self.limits.nbytes is not None:
            model.estimate = needed.nbytes(table)
        await self._make_room(model)
        log.info("%s is being loaded: %s.", model.offered.name, self._described(needed, table))
        while True:
            if self.limits.nbytes is not None:
                free = self.limits.nbytes - sum(other.nbytes for other in self._others(model))
                options = {**self.options, "memory_gb": (free + 1) / 1e9, "slots": needed.slots}
            frees = self._frees
            try:
                loaded = await self._opened(model.offered, options)
                break
            except DeviceMemoryError as error:  # the device has less than the limits allow
                if not await self._free_another(model, frees):
                    raise RequestError(str(error), 500) from None
        model.ready.set_result(Engine(loaded))

    async def _opened(self, offered: Offered, options: dict[str, Any]) -> Gemma:
        """Return a model; if this is cancelled, one that is there nevertheless is freed."""
        opening = asyncio.create_task(self._open(offered, options))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.cancel()
            self._track(_discard(opening))
            raise

    async def _open(self, offered: Offered, options: dict[str, Any]) -> Gemma:
        model = await Gemma.aload(offered.found, **options)
        try:
            if self.adapters:
                await asyncio.to_thread(model.attach_lora, self.adapters)
        except BaseException:
            await _close_model(model)
            raise
        return model

    def _needed(self, offered: Offered) -> tuple[MemoryBudget, TableLocation]:
        """Return what a model takes, and where its table of per-layer embeddings is.

        If the limit does not hold all of it, the model gets fewer slots, at least one; if that is
        still too much, the table stays in the file."""
        budget = offered.memory_budget(self.options, DEFAULT_SLOTS)
        most = self.limits.nbytes
        if most is None:
            return budget, "device"
        for location in TABLE_LOCATIONS:
            fitting = budget.fitting(most, location)
            if fitting.nbytes(location) <= most:
                return fitting, location
        budget = replace(budget, slots=1)
        refusal = budget.refusal(f"this server may take {gigabytes(most)} (--memory-gb)")
        raise RequestError(str(refusal), 500)

    def memory_sentence(self, offered: Offered) -> str:
        """Return what a model takes, or why it cannot be loaded; this opens its file."""
        try:
            return self._described(*self._needed(offered))
        except WebgemmaError as error:
            return str(error)

    def _described(self, budget: MemoryBudget, table: TableLocation) -> str:
        is_lazy = self.limits.nbytes is None and self.options.get("slots") is None
        return budget.described(table, most=is_lazy)

    async def _make_room(self, model: LoadedModel) -> None:
        """Free what others take until a model fits; those in use are waited for."""
        while self._freeing or not self.limits.hold(self._others(model), model.estimate):
            if not self._freeing:
                leaving = self._leaving(model, self._idle(model))
                for other in leaving:
                    self._free(other)
                if not leaving and not self._closed:
                    # The least recently used ones; if others are idle before them, those leave.
                    some = self._leaving(model, self._others(model))
                    self._closed = {other.offered.key for other in some}
            if not self._freeing:
                await self._next_change()
            else:
                await asyncio.wait(list(self._freeing))
        self._closed.clear()
        self._change()

    async def _free_another(self, model: LoadedModel, frees: int) -> bool:
        """Wait until more than so many models have been freed, the least recently used one next;
        return False if there is no other model."""
        while self._frees == frees:
            if self._freeing:
                await asyncio.wait(list(self._freeing))
            elif idle := self._idle(model):
                self._free(idle[0])
            elif others := self._others(model):
                self._closed = self._closed or {others[0].offered.key}
                await self._next_change()
            else:
                return False
        self._closed.clear()
        self._change()
        return True

    def _leaving(self, model: LoadedModel, candidates: Sequence[LoadedModel]) -> list[LoadedModel]:
        """Return the first models of some without which another fits; none if all are too few."""
        staying = self._others(model)
        leaving: list[LoadedModel] = []
        for candidate in candidates:
            leaving.append(candidate)
            staying.remove(candidate)
            if self.limits.hold(staying, model.estimate):
                return leaving
        return []

    def _others(self, model: LoadedModel) -> list[LoadedModel]:
        """Return all other models in memory, the least recently used one first."""
        others = [other for other in self._models.values() if other is not model]
        return sorted(others, key=lambda other: other.used)

    def _idle(self, model: LoadedModel) -> list[LoadedModel]:
        return [other for other in self._others(model) if not other.users]

    # Freeing

    def _free(self, model: LoadedModel) -> "asyncio.Task[None]":
        """Begin to free a loaded model, which nobody can ask for any more; return when it ends."""
        self._forget(model)
        return self._track(_close(model.ready))

    def _track(self, freeing: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Free something in a task of its own, which nobody who leaves can cancel."""
        task = asyncio.create_task(freeing)
        self._freeing.add(task)
        task.add_done_callback(self._freed)
        return task

    def _freed(self, task: "asyncio.Task[None]") -> None:
        self._freeing.remove(task)
        self._frees += 1
        self._change()

    def _forget(self, model: LoadedModel) -> None:
        model.cancel_timer()
        if model.preparing:
            model.preparing.cancel()
        if self._models.get(model.offered.key) is model:
            del self._models[model.offered.key]

    def _named(self, name: str) -> list[LoadedModel]:
        return [model for model in self.all() if model.offered.name == name]


def _stopping() -> RequestError:
    return RequestError("The server is stopping; send the request again later.", 503)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("A model could not be prepared.", exc_info=task.exception())


async def _close(ready: "asyncio.Future[Engine]") -> None:
    await _close_model(ready.result().model)


async def _discard(opening: "asyncio.Task[Gemma]") -> None:
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await _close_model(opening.result())


async def _close_model(model: Gemma) -> None:
    try:
        await asyncio.to_thread(model.close)
    except Exception as error:
        log.error("A model could not be freed.", exc_info=error)
