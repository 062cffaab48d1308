"""Models that a browser keeps: copies in the origin's private file system (OPFS)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, BinaryIO, cast

from webgemma.errors import (
    GgufError,
    InputError,
    ModelNotFoundError,
    StorageError,
    WebgemmaError,
)
from webgemma.gguf.browser import BrowserSource, browser_files, file_error
from webgemma.gguf.ollama import parse_digest
from webgemma.gguf.sources import Source

FOLDER = "webgemma/models"
CHUNK_NBYTES = 8 << 20
SPARE_NBYTES = 64 << 20  # of the room, for everything else that this origin stores
Progress = Callable[[str, int, int], None]  # "copying" or "checking", bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A copy, whole or cut; it goes on where it was cut."""

    id: str
    name: str
    nbytes: int
    have: int  # bytes that have come
    whole: bool  # it has come, and is what it should be
    digest: str | None = None  # sha256:…, as Ollama names it
    tag: str | None = None  # of the version on the server
    notes: dict[str, Any] = field(default_factory=dict)  # what else is known of it


class OpfsStore:
    """The models of this origin; only a worker can copy one there."""

    def __init__(self, files: Any = None, folder: str = FOLDER) -> None:
        self._files = browser_files() if files is None else files
        self._folder = folder

    async def list(self) -> list[StoredModel]:
        """All of them by name, also what is left of one that nothing describes: to be deleted."""
        sizes = dict(await self._files.list(self._folder))
        ids = {name.rpartition(".")[0] for name in sizes}
        found = [await self._described(id, sizes) for id in ids]
        return sorted(found, key=lambda model: (model.name, model.id))

    async def free_nbytes(self) -> int | None:
        """How much may still be stored, where the browser tells."""
        room = await self._files.room()
        return None if room is None else max(0, int(room) - SPARE_NBYTES)

    async def find(self, id: str) -> StoredModel:
        """A model by its id, or ModelNotFoundError."""
        for model in await self.list():
            if model.id == id:
                return model
        raise ModelNotFoundError("This model is not stored in this browser any more.")

    async def open(self, id: str) -> BrowserSource:
        """A whole model, to be loaded."""
        model = await self.find(id)
        if not model.whole:
            raise GgufError(f"The copy of {model.name} is not whole yet: let it go on.")
        source = await self._opened(f"{id}.gguf")
        source.name = model.name
        return source

    async def keep(
        self,
        source: Source,
        name: str | None = None,
        digest: str | None = None,
        progress: Progress | None = None,
    ) -> StoredModel:
        """Copy a model, from where an earlier copy was cut, and hold it against its digest.

        What goes wrong is a StorageError or GgufError; what has come stays, unless it is wrong."""
        model = await self._begin(source, name or source.name, digest)
        if model.whole:
            return model
        tell = progress or _silence
        path = f"{self._folder}/{model.id}.gguf"
        await self._describe(model)
        try:
            file = await self._files.stored(path, True)
        except Exception as error:  # JavaScript's, whatever it is
            raise _storage_error(model.name, error) from error
        try:
            await _copy(source, file, model, tell)
            right = digest is None or await _digest(file, model, tell) == parse_digest(digest)
        finally:
            file.close()
        if not right:
            await self.forget(model.id)
            raise GgufError(
                f"{model.name} is damaged: its bytes are not those of its digest {digest}. The "
                "copy was deleted; fetch the model again where it comes from."
            )
        return await self._finish(model)

    async def note(self, id: str, **notes: Any) -> StoredModel:
        """Add to what is known of a model."""
        model = await self.find(id)
        noted = replace(model, notes={**model.notes, **notes})
        await self._describe(noted)
        return noted

    async def forget(self, id: str) -> None:
        """Delete a model, or what there is of it."""
        for ending in (".gguf", ".json"):
            await self._remove(id + ending)

    async def _begin(self, source: Source, name: str, digest: str | None) -> StoredModel:
        """The copy that there is of this source, or a new one; room is looked for first."""
        id = stored_id(name, source.nbytes, digest)
        tag = getattr(source, "tag", None)
        wanted = StoredModel(id, name, source.nbytes, 0, False, digest, tag)
        for model in await self.list():
            if model.id == id:
                same = model.nbytes == source.nbytes and (digest or model.tag == tag)
                if same:
                    wanted = model
                else:  # another version: nothing of it can be used
                    await self.forget(id)
        free_nbytes, missing = await self.free_nbytes(), wanted.nbytes - wanted.have
        if free_nbytes is not None and missing > free_nbytes:
            raise StorageError(
                f"{name} needs {_size(missing)}, but this browser lets this page store only "
                f"{_size(free_nbytes)} more: delete a stored model, or make room on the disk."
            )
        return wanted

    async def _finish(self, model: StoredModel) -> StoredModel:
        done = replace(model, have=model.nbytes, whole=True)
        await self._describe(done)
        return done

    async def _described(self, id: str, sizes: dict[str, int]) -> StoredModel:
        """What a description says, if it makes sense: it may have been cut while it was written."""
        have = sizes.get(f"{id}.gguf", 0)
        try:
            source = await self._opened(f"{id}.json")
            try:
                text = (await source.read(0, source.nbytes)).decode()
                said, _ = json.JSONDecoder().raw_decode(text)  # it may have been longer
            finally:
                source.close()
            model = StoredModel(id, have=have, **said)
            if isinstance(model.notes, dict) and (
                have == model.nbytes if model.whole else have <= model.nbytes
            ):
                return model
        except (WebgemmaError, ValueError, TypeError):
            pass
        return StoredModel(id, "a damaged copy", have, have, False)

    async def _describe(self, model: StoredModel) -> None:
        facts = asdict(model)
        del facts["id"], facts["have"]  # the names and sizes of the files tell these
        text = json.dumps(facts).encode()
        try:
            file = await self._files.stored(f"{self._folder}/{model.id}.json", True)
            try:
                file.write(text, 0)  # first: without room for it, what was there stays
                file.truncate(len(text))
            finally:
                file.close()
        except Exception as error:  # JavaScript's, whatever it is
            raise _storage_error(model.name, error) from error

    async def _opened(self, name: str) -> BrowserSource:
        try:
            return BrowserSource(await self._files.stored(f"{self._folder}/{name}", False))
        except Exception as error:  # JavaScript's, whatever it is
            raise file_error(name, error) from error

    async def _remove(self, name: str) -> None:
        try:
            await self._files.remove(f"{self._folder}/{name}")
        except Exception as error:  # JavaScript's, whatever it is
            if getattr(error, "name", "") != "NotFoundError":
                raise StorageError(
                    "The stored model cannot be deleted: it is in use, here or in another tab."
                ) from error


async def open_stored(name: str, mode: str) -> BinaryIO:
    """A file of this origin's own, which stays when the tab is closed; only a worker writes."""
    if mode not in ("rb", "wb"):
        raise InputError(f"There is no mode {mode!r}; choose rb or wb.")
    try:
        file = await browser_files().stored(f"webgemma/{name}", mode == "wb")
    except Exception as error:  # JavaScript's, whatever it is
        if getattr(error, "name", "") == "NotFoundError":
            raise InputError(f"There is no file {name}.") from error
        raise _storage_error(name, error) from error
    if not hasattr(file, "truncate"):  # one that makes us wait, which no file of Python's does
        raise StorageError(f"{name} can be opened from a worker only, and in one tab at a time.")
    if mode == "wb":
        file.truncate(0)
    return cast(BinaryIO, StoredFile(name, file))


class StoredFile(io.RawIOBase):
    """A file of files.js that a worker holds open, as Python's files are."""

    def __init__(self, name: str, file: Any) -> None:
        self.name = name
        self._file = file
        self._at = 0

    def read(self, nbytes: int = -1) -> bytes:
        """The next bytes."""
        end = self._file.size if nbytes < 0 else min(self._at + nbytes, self._file.size)
        data: bytes = self._file.read(self._at, end).to_bytes()
        self._at += len(data)
        return data

    def write(self, data: Any) -> int:
        """Put bytes here; a full disk is an OSError."""
        try:
            self._file.write(data, self._at)
        except Exception as error:  # JavaScript's, whatever it is
            raise OSError(str(_storage_error(self.name, error))) from error
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def flush(self) -> None:
        """Have everything written."""
        if not self.closed:
            self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        if not self.closed:
            super().close()  # flushes
            self._file.close()


def _silence(_stage: str, _done: int, _total: int) -> None:
    """Progress that nobody asked for."""


async def _copy(source: Source, file: Any, model: StoredModel, tell: Progress) -> None:
    """The bytes that are missing; Python never holds them where the source gives them raw."""
    read = getattr(source, "raw", source.read)
    begin = model.have - model.have % CHUNK_NBYTES  # the last chunk may have been cut
    _check_room(file, model, begin)
    for at in range(begin, model.nbytes, CHUNK_NBYTES):
        tell("copying", at, model.nbytes)
        data = await read(at, min(CHUNK_NBYTES, model.nbytes - at))
        try:
            file.write(data, at)
        except Exception as error:  # JavaScript's, whatever it is
            raise _storage_error(model.name, error) from error
        await asyncio.sleep(0)  # a chat goes on meanwhile
    file.flush()
    tell("copying", model.nbytes, model.nbytes)


def _check_room(file: Any, model: StoredModel, begin: int) -> None:
    """Let the file be as long as it will be, and cut it to `begin`: some browsers tell only so."""
    try:
        file.truncate(model.nbytes)
    except Exception as error:  # JavaScript's, whatever it is
        if getattr(error, "name", "") == "QuotaExceededError":
            raise StorageError(
                f"{model.name} needs {_size(model.nbytes - begin)}, for which there is no room in "
                "this browser: delete a stored model, or make room on the disk."
            ) from error
        raise _storage_error(model.name, error) from error
    finally:
        file.truncate(begin)


async def _digest(file: Any, model: StoredModel, tell: Progress) -> str:
    """The SHA-256 of what is stored; browsers compute it of whole files in memory only."""
    digest = hashlib.sha256()
    for at in range(0, model.nbytes, CHUNK_NBYTES):
        tell("checking", at, model.nbytes)
        data = file.read(at, min(at + CHUNK_NBYTES, model.nbytes))
        digest.update(data.to_bytes())
        await asyncio.sleep(0)
    tell("checking", model.nbytes, model.nbytes)
    return digest.hexdigest()


def stored_id(name: str, nbytes: int, digest: str | None) -> str:
    """What a copy is stored under: the same file, chosen again, goes on."""
    if digest:
        return parse_digest(digest)
    return hashlib.sha256(f"{name} {nbytes}".encode()).hexdigest()[:32]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _storage_error(name: str, error: Exception) -> StorageError:
    kind = getattr(error, "name", "")
    if kind == "QuotaExceededError":
        return StorageError(
            f"There is no room left for {name} in this browser: delete a stored model or make room "
            "on the disk; the copy then goes on where it stopped."
        )
    if kind == "NoModificationAllowedError":
        return StorageError(f"{name} is in use or being copied, perhaps in another tab.")
    if kind == "TypeError":
        return StorageError(f"{name} can be stored from a worker only, not from the page itself.")
    said = str(getattr(error, "message", "") or error).rstrip(".")
    return StorageError(f"{name} cannot be stored: {said}.")
