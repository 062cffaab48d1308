"""Saved sessions: a file with a header that names the model, keys and values, and a checksum."""

import hashlib
import json
import os
import secrets
import struct
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from webgemma.errors import InputError
from webgemma.gemma.kv_cache import ELEMENT_NBYTES, cache_shapes
from webgemma.gemma.soft_tokens import FIRST_MARK
from webgemma.gemma.weights import Model

MAGIC = b"webgemma"
VERSION = 1
_START = struct.Struct("<8sII")  # magic, version, bytes of the header
_MAX_HEADER_NBYTES = 1 << 24  # eight times that of the longest context
_DIGEST_NBYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class SavedSession:
    """The header; the cache's bytes follow it."""

    fingerprint: str  # of the model
    shapes: list[list[int]]  # of the layers' caches
    kv: str
    context: int
    lost: int  # positions before this one have left the rings of sliding layers
    tokens: list[int]
    adapters: dict[str, float] = field(default_factory=dict)  # that were chosen by their names


SavedPath = str | os.PathLike[str] | BinaryIO  # a path, or an open file


async def write_saved(path: SavedPath, saved: SavedSession, chunks: AsyncIterator[bytes]) -> None:
    """Write a file; a file with a path appears under its name only when it is complete."""
    if not isinstance(path, str | os.PathLike):
        try:
            await _write(path, saved, chunks)
        except (OSError, ValueError) as error:
            raise InputError(f"{_name(path)} cannot be written: {error}.") from error
        return
    target = Path(path)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with draft.open("xb") as file:
            await _write(file, saved, chunks)
            os.fsync(file.fileno())
        draft.replace(target)
    except (OSError, ValueError) as error:
        raise InputError(f"{target} cannot be written: {error}.") from error
    finally:
        draft.unlink(missing_ok=True)


async def _write(file: BinaryIO, saved: SavedSession, chunks: AsyncIterator[bytes]) -> None:
    fields = {name: value for name, value in asdict(saved).items() if name != "adapters" or value}
    header = json.dumps(fields, separators=(",", ":")).encode()
    start = _START.pack(MAGIC, VERSION, len(header)) + header
    digest = hashlib.sha256(start)
    file.write(start)
    async for chunk in chunks:
        digest.update(chunk)
        file.write(chunk)
    file.write(digest.digest())
    file.flush()


def _name(path: SavedPath) -> str:
    if isinstance(path, str | os.PathLike):
        return str(path)
    return str(getattr(path, "name", "The file"))


class SavedFile:
    """A file that is read once, from header to checksum, with every length checked."""

    def __init__(self, path: SavedPath) -> None:
        self.name = _name(path)
        self._owned = isinstance(path, str | os.PathLike)  # opened here, so closed here
        try:
            if not isinstance(path, str | os.PathLike):
                self._file = path
            elif Path(path).is_file():
                self._file = Path(path).open("rb")  # noqa: SIM115 (this is the context manager)
            else:  # opening a pipe would block
                raise InputError(f"There is no file {self.name}.")
            self._left = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)
        except (OSError, ValueError) as error:
            raise InputError(f"{self.name} cannot be read: {error}.") from error
        try:
            self._digest = hashlib.sha256()
            self.saved = self._header()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache that have not been read yet."""
        return self._left - _DIGEST_NBYTES

    def take(self, nbytes: int) -> bytes:
        """Read the next bytes."""
        if nbytes > self._left:
            raise self.damaged("it is truncated")
        try:
            data = self._file.read(nbytes)
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error}.") from error
        if len(data) < nbytes:
            raise self.damaged("it is truncated")
        self._left -= nbytes
        self._digest.update(data)
        return data

    def finish(self) -> None:
        """Raise InputError unless the checksum is right and nothing follows it."""
        digest = self._digest.digest()
        if self.take(_DIGEST_NBYTES) != digest:
            raise self.damaged("its checksum is wrong")
        if self._left:
            raise self.damaged("data follows its end")

    def damaged(self, what: str) -> InputError:
        """Return the error for a damaged file."""
        return InputError(f"{self.name} is damaged ({what}): start the conversation again.")

    def _header(self) -> SavedSession:
        if self._left < _START.size:
            raise InputError(f"{self.name} is not a saved conversation.")
        magic, version, nbytes = _START.unpack(self.take(_START.size))
        if magic != MAGIC:
            raise InputError(f"{self.name} is not a saved conversation.")
        if version != VERSION:
            raise InputError(
                f"{self.name} has version {version}, and this webgemma reads {VERSION}: "
                "start the conversation again."
            )
        if nbytes > min(self._left, _MAX_HEADER_NBYTES):
            raise self.damaged("it is truncated")
        try:
            saved = SavedSession(**json.loads(self.take(nbytes)))
            _check(saved)
        except (ValueError, TypeError, RecursionError) as error:
            raise self.damaged("its header is not valid") from error
        return saved


def check_saved(file: SavedFile, model: Model) -> None:
    """Raise InputError for a file of another model, and for numbers that are not possible."""
    saved, config = file.saved, model.config
    fingerprint = model.fingerprint_with(saved.adapters)
    if (saved.fingerprint, saved.shapes) != (fingerprint, cache_shapes(config)):
        raise InputError(f"{file.name} belongs to another model than {config.name}: load its own.")
    length = len(saved.tokens)
    if not (
        saved.kv in ELEMENT_NBYTES
        and max(1, length) <= saved.context <= config.context
        and saved.lost <= max(0, length - config.window + 1)
        and all(token < config.vocab or token >= FIRST_MARK for token in saved.tokens)
    ):
        raise file.damaged("its header is not valid")


def _check(saved: SavedSession) -> None:
    """Raise TypeError for a wrong type: the header may be any JSON."""
    texts = (saved.fingerprint, saved.kv)
    numbers = [saved.context, saved.lost, *saved.tokens, *(n for row in saved.shapes for n in row)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("not a string")
    if not all(isinstance(factor, int | float) for factor in dict(saved.adapters).values()):
        raise TypeError("not a number")
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise TypeError("not a whole number")
