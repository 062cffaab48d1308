"""The models in this browser's storage: copies are made, noted, listed and deleted."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from webgemma.errors import WebgemmaError
from webgemma.gguf.opfs import OpfsStore, stored_id
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import Source
from webgemma.models import gpu_nbytes
from webgemma.web.reports import ThrottledProgress, kind_of

# Keys in the notes of stored models. Browsers hold models stored under these names: do not rename.
PART_NOTES = {"mmproj": "eyes", "draft": "draft"}  # the ids of files that belong to the model
GPU_NOTE, GPU_MIN_NOTE = "gpu_nbytes", "gpu_least_nbytes"


class StoredModels:
    """The stored models, of which it reports to the page; `open_source` opens what is copied."""

    def __init__(
        self,
        report: Callable[..., None],
        report_error: Callable[..., None],
        open_source: Callable[[Any], Awaitable[Source]],
        files: Any,
    ) -> None:
        self._report, self._report_error = report, report_error
        self._open_source = open_source
        self._store = OpfsStore(files)
        self._copies: dict[str, asyncio.Future[None]] = {}

    async def open(self, id: str) -> Source:
        """Open a stored file."""
        return await self._store.open(id)

    async def open_part(self, id: str, part: str) -> Source | None:
        """Open the file of a model's encoders ("mmproj") or drafter ("draft"), if it has one."""
        noted: str | None = (await self._store.find(id)).notes.get(PART_NOTES[part])
        return await self._store.open(noted) if noted else None

    async def store(self, spec: Any) -> None:
        """Copy a model into this browser's storage, until it is complete or cancelled."""
        try:
            id = stored_id(spec.name, spec.nbytes, spec.digest or None)
        except WebgemmaError as error:
            self._report_error(error, kind_of(error), store=None)
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
            report_end = partial(self._report_error, error, kind_of(error), store=id)
        finally:
            del self._copies[id]
        await self.list()  # first: the page's message depends on what was copied
        report_end()

    def cancel(self, id: str) -> None:
        """Stop copying a model; what has been copied stays."""
        if id in self._copies:
            self._copies[id].cancel()

    async def delete(self, id: str) -> None:
        """Delete a stored model, with the files of its own that no other model uses."""
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
            self._report_error(error, kind_of(error), store=id)
        await self.list()

    async def list(self) -> None:
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

        def stage_progress(stage: str) -> ThrottledProgress:
            facts = {"id": id, "name": spec.name, "stage": stage}
            return ThrottledProgress(
                lambda done, total: self._report("storing", done=done, total=total, **facts)
            )

        stages = {stage: stage_progress(stage) for stage in ("copying", "checking")}
        source = await self._open_source(spec)
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
