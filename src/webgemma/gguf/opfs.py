"""OPFS model store: copies of models in the browser's origin-private file system."""

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
RESERVED_NBYTES = 64 << 20  # of the quota, for everything else that this origin stores
Progress = Callable[[str, int, int], None]  # "copying" or "checking", bytes done, total bytes


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A stored copy of a model; copying an incomplete one again resumes where it stopped."""

    id: str
    name: str
    nbytes: int
    stored_nbytes: int
    whole: bool  # all bytes are stored and match the digest
    digest: str | None = None  # sha256:…, as Ollama names it
    tag: str | None = None  # version of the file on the server
    notes: dict[str, Any] = field(default_factory=dict)  # facts that callers of `note` added


class OpfsStore:
    """The models stored by this origin; only a worker can add one."""

    def __init__(self, files: Any = None, folder: str = FOLDER) -> None:
        self._files = browser_files() if files is None else files
        self._folder = folder

    async def list(self) -> list[StoredModel]:
        """Return all models by name, also damaged copies, so that they can be deleted."""
        sizes = dict(await self._files.list(self._folder))
        ids = {name.rpartition(".")[0] for name in sizes}
        models = [await self._read_description(id, sizes) for id in ids]
        return sorted(models, key=lambda model: (model.name, model.id))

    async def free_nbytes(self) -> int | None:
        """Return how many bytes may still be stored; None if the browser does not report it."""
        nbytes = await self._files.available()
        return None if nbytes is None else max(0, int(nbytes) - RESERVED_NBYTES)

    async def find(self, id: str) -> StoredModel:
        """Return the model with this id, or raise ModelNotFoundError."""
        for model in await self.list():
            if model.id == id:
                return model
        raise ModelNotFoundError("This model is no longer stored in this browser.")

    async def open(self, id: str) -> BrowserSource:
        """Open a complete model for loading."""
        model = await self.find(id)
        if not model.whole:
            raise GgufError(f"The copy of {model.name} is not complete: resume copying it.")
        source = await self._open(f"{id}.gguf")
        source.name = model.name
        return source

    async def store(
        self,
        source: Source,
        name: str | None = None,
        digest: str | None = None,
        progress: Progress | None = None,
    ) -> StoredModel:
        """Copy a model, resuming an interrupted copy, and compare it with its digest.

        Raises StorageError or GgufError. Copied bytes stay stored, unless the digest differs.
        """
        model = await self._begin(source, name or source.name, digest)
        if model.whole:
            return model
        report = progress or _ignore
        path = f"{self._folder}/{model.id}.gguf"
        await self._write_description(model)
        try:
            file = await self._files.stored(path, True)
        except Exception as error:  # any JavaScript error
            raise _storage_error(model.name, error) from error
        try:
            await _copy(source, file, model, report)
            valid = digest is None or await _digest(file, model, report) == parse_digest(digest)
        finally:
            file.close()
        if not valid:
            await self.delete(model.id)
            raise GgufError(
                f"{model.name} is damaged: its bytes do not match its digest {digest}. The "
                "copy was deleted; fetch the model again from its origin."
            )
        complete = replace(model, stored_nbytes=model.nbytes, whole=True)
        await self._write_description(complete)
        return complete

    async def note(self, id: str, **notes: Any) -> StoredModel:
        """Add notes to a model and return it."""
        model = await self.find(id)
        noted = replace(model, notes={**model.notes, **notes})
        await self._write_description(noted)
        return noted

    async def delete(self, id: str) -> None:
        """Delete a model, or the parts of it that exist."""
        for suffix in (".gguf", ".json"):
            await self._remove(id + suffix)

    async def _begin(self, source: Source, name: str, digest: str | None) -> StoredModel:
        """Return the copy of this source to resume, or a new one; StorageError if too large."""
        id = stored_id(name, source.nbytes, digest)
        tag = getattr(source, "tag", None)
        copy = StoredModel(id, name, source.nbytes, 0, False, digest, tag)
        for model in await self.list():
            if model.id == id:
                same = model.nbytes == source.nbytes and (digest or model.tag == tag)
                if same:
                    copy = model
                else:  # another version: nothing of it can be used
                    await self.delete(id)
        free_nbytes, missing = await self.free_nbytes(), copy.nbytes - copy.stored_nbytes
        if free_nbytes is not None and missing > free_nbytes:
            raise StorageError(
                f"{name} needs {_size(missing)}, but this browser allows this page to store "
                f"only {_size(free_nbytes)} more: delete a stored model, or free space on the disk."
            )
        return copy

    async def _read_description(self, id: str, sizes: dict[str, int]) -> StoredModel:
        """Return the model that a JSON file describes, or "a damaged copy" if that is not valid.

        Writing a description may have been interrupted.
        """
        stored_nbytes = sizes.get(f"{id}.gguf", 0)
        try:
            source = await self._open(f"{id}.json")
            try:
                text = (await source.read(0, source.nbytes)).decode()
                # The rest of a longer description may follow.
                facts, _ = json.JSONDecoder().raw_decode(text)
            finally:
                source.close()
            model = StoredModel(id, stored_nbytes=stored_nbytes, **facts)
            if isinstance(model.notes, dict) and (
                stored_nbytes == model.nbytes if model.whole else stored_nbytes <= model.nbytes
            ):
                return model
        except (WebgemmaError, ValueError, TypeError):
            pass
        return StoredModel(id, "a damaged copy", stored_nbytes, stored_nbytes, False)

    async def _write_description(self, model: StoredModel) -> None:
        facts = asdict(model)
        del facts["id"], facts["stored_nbytes"]  # the names and sizes of the files give these
        text = json.dumps(facts).encode()
        try:
            file = await self._files.stored(f"{self._folder}/{model.id}.json", True)
            try:
                # Before truncating: if the disk is full, the description stays as it was.
                file.write(text, 0)
                file.truncate(len(text))
            finally:
                file.close()
        except Exception as error:  # any JavaScript error
            raise _storage_error(model.name, error) from error

    async def _open(self, name: str) -> BrowserSource:
        try:
            return BrowserSource(await self._files.stored(f"{self._folder}/{name}", False))
        except Exception as error:  # any JavaScript error
            raise file_error(name, error) from error

    async def _remove(self, name: str) -> None:
        try:
            await self._files.remove(f"{self._folder}/{name}")
        except Exception as error:  # any JavaScript error
            if getattr(error, "name", "") != "NotFoundError":
                raise StorageError(
                    "The stored model cannot be deleted: it is in use, here or in another tab."
                ) from error


async def open_stored(name: str, mode: str) -> BinaryIO:
    """Open a file of the origin's private file system; only a worker can do so.

    `mode` is "rb" or "wb". The file persists when the tab is closed.
    """
    if mode not in ("rb", "wb"):
        raise InputError(f"{mode!r} is not a valid mode; use rb or wb.")
    try:
        file = await browser_files().stored(f"webgemma/{name}", mode == "wb")
    except Exception as error:  # any JavaScript error
        if getattr(error, "name", "") == "NotFoundError":
            raise InputError(f"There is no file {name}.") from error
        raise _storage_error(name, error) from error
    if not hasattr(file, "truncate"):  # it is asynchronous, which a Python file cannot be
        raise StorageError(f"{name} can be opened from a worker only, and in one tab at a time.")
    if mode == "wb":
        file.truncate(0)
    return cast(BinaryIO, StoredFile(name, file))


class StoredFile(io.RawIOBase):
    """An OPFS file, opened by files.js in a worker, with the interface of a Python file."""

    def __init__(self, name: str, file: Any) -> None:
        self.name = name
        self._file = file
        self._at = 0

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next `nbytes` bytes, by default all that follow."""
        end = self._file.size if nbytes < 0 else min(self._at + nbytes, self._file.size)
        data: bytes = self._file.read(self._at, end).to_bytes()
        self._at += len(data)
        return data

    def write(self, data: Any) -> int:
        """Write bytes at the current position; raise OSError if the disk is full."""
        try:
            self._file.write(data, self._at)
        except Exception as error:  # any JavaScript error
            raise OSError(str(_storage_error(self.name, error))) from error
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the current position and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def flush(self) -> None:
        """Write everything to the disk."""
        if not self.closed:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            super().close()  # flushes
            self._file.close()


def _ignore(_stage: str, _done: int, _total: int) -> None:
    """Ignore progress."""


async def _copy(source: Source, file: Any, model: StoredModel, report: Progress) -> None:
    """Copy the missing bytes; those of a source with `raw` bypass Python's memory."""
    read = getattr(source, "raw", source.read)
    # The last chunk may be incomplete.
    begin = model.stored_nbytes - model.stored_nbytes % CHUNK_NBYTES
    _check_space(file, model, begin)
    for at in range(begin, model.nbytes, CHUNK_NBYTES):
        report("copying", at, model.nbytes)
        data = await read(at, min(CHUNK_NBYTES, model.nbytes - at))
        try:
            file.write(data, at)
        except Exception as error:  # any JavaScript error
            raise _storage_error(model.name, error) from error
        await asyncio.sleep(0)  # lets a chat run meanwhile
    file.flush()
    report("copying", model.nbytes, model.nbytes)


def _check_space(file: Any, model: StoredModel, begin: int) -> None:
    """Raise StorageError unless the file can have its final size; truncate it to `begin`.

    In some browsers extending the file is the only way to find out whether it will fit.
    """
    try:
        file.truncate(model.nbytes)
    except Exception as error:  # any JavaScript error
        if getattr(error, "name", "") == "QuotaExceededError":
            raise StorageError(
                f"{model.name} needs {_size(model.nbytes - begin)}, more than this browser can "
                "store: delete a stored model, or free space on the disk."
            ) from error
        raise _storage_error(model.name, error) from error
    finally:
        file.truncate(begin)


async def _digest(file: Any, model: StoredModel, report: Progress) -> str:
    """Return the SHA-256 of a stored file in hex.

    The browser's own function would need the whole file in memory.
    """
    digest = hashlib.sha256()
    for at in range(0, model.nbytes, CHUNK_NBYTES):
        report("checking", at, model.nbytes)
        data = file.read(at, min(at + CHUNK_NBYTES, model.nbytes))
        digest.update(data.to_bytes())
        await asyncio.sleep(0)
    report("checking", model.nbytes, model.nbytes)
    return digest.hexdigest()


def stored_id(name: str, nbytes: int, digest: str | None) -> str:
    """Return the id of a copy, equal for the same file so that copying it again resumes."""
    if digest:
        return parse_digest(digest)
    return hashlib.sha256(f"{name} {nbytes}".encode()).hexdigest()[:32]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _storage_error(name: str, error: Exception) -> StorageError:
    kind = getattr(error, "name", "")
    if kind == "QuotaExceededError":
        return StorageError(
            f"There is no space left for {name} in this browser: delete a stored model, or free "
            "space on the disk; the copy then resumes where it stopped."
        )
    if kind == "NoModificationAllowedError":
        return StorageError(f"{name} is in use or being copied, perhaps in another tab.")
    if kind == "TypeError":
        return StorageError(f"{name} can be stored from a worker only, not from the page itself.")
    message = str(getattr(error, "message", "") or error).rstrip(".")
    return StorageError(f"{name} cannot be stored: {message}.")
