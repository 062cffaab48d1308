"""The files of a folder: which of them are worth reading, and their bytes.

A folder may hold anything: links are not followed, nothing but plain files is opened, and what
cannot be read is a line in the report instead of an end."""

import os
import stat
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from webgemma.errors import InputError

GENERATED = ("node_modules", "__pycache__")  # folders that programs fill

_FLAGS = os.O_RDONLY | sum(getattr(os, n, 0) for n in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


@dataclass(frozen=True, slots=True)
class File:
    """A file: its path in the folder, with forward slashes, and its size when it was listed."""

    path: str
    nbytes: int


@dataclass(slots=True)
class Listing:
    """What a folder holds."""

    files: list[File] = field(default_factory=list)  # in the order of their paths
    skipped: Counter[str] = field(default_factory=Counter)  # why, and how many
    problems: dict[str, str] = field(default_factory=dict)  # a sentence for each path
    closed: list[str] = field(default_factory=list)  # folders that could not be listed

    def may_hold(self, path: str) -> bool:
        """Return whether a file may exist although it is not listed: its folder is closed."""
        return any(path.startswith(f"{folder}/") for folder in self.closed)


def list_files(folder: Path, without: Collection[Path] = ()) -> Listing:
    """Return the files of a folder and of those in it, without some, such as the index.

    InputError if the folder itself cannot be listed."""
    listing = Listing()
    aside = {path.resolve() for path in without}
    whole = folder.resolve()
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(folder / inside) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if not inside:
                raise InputError(f"{folder} cannot be listed: {reason(error)}.") from None
            listing.problems[inside] = f"The folder cannot be listed: {reason(error)}."
            listing.closed.append(inside)
            continue
        for entry in found:
            path = f"{inside}/{entry.name}" if inside else entry.name
            if whole / path in aside:
                continue
            kind = _kind(entry)
            if kind == "folder":
                waiting.append(path)
            elif kind == "file":
                listing.files.append(File(path, _nbytes(entry)))
            else:
                listing.skipped[kind] += 1
    listing.files.sort(key=lambda file: file.path)
    return listing


def _kind(entry: os.DirEntry[str]) -> str:
    """Return "file", "folder", or why it is skipped."""
    if entry.name.startswith(".") or entry.name in GENERATED:
        return "hidden"
    if entry.is_symlink():
        return "links"
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    return "file" if entry.is_file(follow_symlinks=False) else "special"


def _nbytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # it is gone; whoever reads it says so
        return 0


def read_bytes(path: Path, most_nbytes: int) -> bytes | None:
    """Return the bytes of a plain file; None if it has more than `most_nbytes`, or is no file now.

    OSError if it cannot be read."""
    with _open(path) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_nbytes:
            return None
        data = file.read(most_nbytes + 1) or b""  # None: one in /proc that would wait
    return data if len(data) <= most_nbytes else None


def read_beginning(path: Path, nbytes: int) -> bytes:
    """Return the first bytes of a plain file, or of what is no file now, nothing.

    OSError if it cannot be read."""
    with _open(path) as file:
        is_plain = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        return (file.read(nbytes) if is_plain else None) or b""


def _open(path: Path) -> BinaryIO:
    return open(os.open(path, _FLAGS), "rb")


def reason(error: OSError) -> str:
    """Return why the system refuses something, without a full stop."""
    return str(error.strerror or error).rstrip(".")
