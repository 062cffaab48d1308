"""A conversation in a file: a header that says whose it is, keys and values, a checksum."""

import hashlib
import json
import os
import secrets
import struct
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Self

from webgemma.errors import InputError
from webgemma.gemma.kv_cache import ELEMENT_NBYTES, cache_shapes
from webgemma.gemma.soft_tokens import MARKS
from webgemma.gemma.weights import Model

MAGIC = b"webgemma"
VERSION = 1
_START = struct.Struct("<8sII")  # magic, version, bytes of the header
_MAX_HEADER_NBYTES = 1 << 24  # eight times that of the longest context
_DIGEST_NBYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Saved:
    """What the header says; the cache's bytes follow it."""

    fingerprint: str  # of the model
    shapes: list[list[int]]  # of the layers' caches
    kv: str
    context: int
    lost: int  # positions before this one have left the rings of sliding layers
    tokens: list[int]


SavedPath = str | os.PathLike[str] | BinaryIO  # a path, or an open file


async def write_saved(path: SavedPath, saved: Saved, pieces: AsyncIterator[bytes]) -> None:
    """Write a file; one that has a path is whole and under its name, or not there at all."""
    if not isinstance(path, str | os.PathLike):
        try:
            await _write(path, saved, pieces)
        except (OSError, ValueError) as error:
            raise InputError(f"{_name(path)} cannot be written: {error}.") from error
        return
    target = Path(path)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with draft.open("xb") as file:
            await _write(file, saved, pieces)
            os.fsync(file.fileno())
        draft.replace(target)
    except (OSError, ValueError) as error:
        raise InputError(f"{target} cannot be written: {error}.") from error
    finally:
        draft.unlink(missing_ok=True)


async def _write(file: BinaryIO, saved: Saved, pieces: AsyncIterator[bytes]) -> None:
    header = json.dumps(asdict(saved), separators=(",", ":")).encode()
    start = _START.pack(MAGIC, VERSION, len(header)) + header
    digest = hashlib.sha256(start)
    file.write(start)
    async for piece in pieces:
        digest.update(piece)
        file.write(piece)
    file.write(digest.digest())
    file.flush()


def _name(path: SavedPath) -> str:
    if isinstance(path, str | os.PathLike):
        return str(path)
    return str(getattr(path, "name", "The file"))


class SavedFile:
    """A file that is read once, from its header to its checksum; every length is checked."""

    def __init__(self, path: SavedPath) -> None:
        self.name = _name(path)
        self._opened = isinstance(path, str | os.PathLike)  # by us: then we close it
        try:
            if not isinstance(path, str | os.PathLike):
                self._file = path
            elif Path(path).is_file():
                self._file = Path(path).open("rb")  # noqa: SIM115 (this is the context manager)
            else:  # opening a pipe would wait for ever
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
        if self._opened:
            self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache that have not been taken yet."""
        return self._left - _DIGEST_NBYTES

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        if nbytes > self._left:
            raise self.damaged("it is cut short")
        try:
            data = self._file.read(nbytes)
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error}.") from error
        if len(data) < nbytes:
            raise self.damaged("it is cut short")
        self._left -= nbytes
        self._digest.update(data)
        return data

    def finish(self) -> None:
        """Make sure that what was taken is all there is, and what was once written."""
        digest = self._digest.digest()
        if self.take(_DIGEST_NBYTES) != digest:
            raise self.damaged("its checksum is wrong")
        if self._left:
            raise self.damaged("it goes on after its end")

    def damaged(self, what: str) -> InputError:
        """The sentence for a file that is not as it was written."""
        return InputError(f"{self.name} is damaged ({what}): the conversation must be read again.")

    def _header(self) -> Saved:
        if self._left < _START.size:
            raise InputError(f"{self.name} is no saved conversation.")
        magic, version, nbytes = _START.unpack(self.take(_START.size))
        if magic != MAGIC:
            raise InputError(f"{self.name} is no saved conversation.")
        if version != VERSION:
            raise InputError(
                f"{self.name} is of version {version}, and this webgemma reads {VERSION}: "
                "the conversation must be read again."
            )
        if nbytes > min(self._left, _MAX_HEADER_NBYTES):
            raise self.damaged("it is cut short")
        try:
            saved = Saved(**json.loads(self.take(nbytes)))
            _check(saved)
        except (ValueError, TypeError, RecursionError) as error:
            raise self.damaged("its header makes no sense") from error
        return saved


def check_saved(file: SavedFile, model: Model) -> None:
    """Refuse a file of another model, and numbers that cannot be."""
    saved, config = file.saved, model.config
    if (saved.fingerprint, saved.shapes) != (model.fingerprint, cache_shapes(config)):
        raise InputError(f"{file.name} belongs to another model than {config.name}: load that one.")
    length = len(saved.tokens)
    if not (
        saved.kv in ELEMENT_NBYTES
        and max(1, length) <= saved.context <= config.context
        and saved.lost <= max(0, length - config.window + 1)
        and all(token < config.vocab or token >= MARKS for token in saved.tokens)
    ):
        raise file.damaged("its header makes no sense")


def _check(saved: Saved) -> None:
    """Refuse what is not of the right type: the header may be anything at all."""
    texts = (saved.fingerprint, saved.kv)
    numbers = [saved.context, saved.lost, *saved.tokens, *(n for row in saved.shapes for n in row)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("not a text")
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise TypeError("not a whole number")
